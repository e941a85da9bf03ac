"""The steps of an image's build, as people write them and as they are run and remembered."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from blake3 import blake3

from livinglayer.errors import Invalid


@dataclass(frozen=True)
class Step:
    """One step: what it is remembered by, what is shown of it, and either files to write or a command to run."""

    key: Any
    shown: str
    argv: tuple[str, ...] = ()
    files: Mapping[str, bytes] | None = None
    user: str = "root"
    env: Mapping[str, str] = field(default_factory=dict)
    cwd: str = "/"
    archive: Path | None = None  # unpacked aside before the command, which puts it in its place
    force: bool = False  # it and those after it are done again, whatever was kept


# Puts what was unpacked at $1 where $3 says, as COPY of a Dockerfile does: of a directory what is in it, a file under its name or a new one.
COPY = r"""
set -e
cd -- "$1"
case "$4" in ""|*:*) owner="$4" ;; *) owner="$4:" ;; esac
if [ -n "$owner" ]; then chown -hR -- "$owner" .; fi
if [ -n "$5" ]; then chmod -R -- "$5" .; fi
make() { [ -d "$1" ] || { mkdir -p -- "$1"; if [ -n "$2" ]; then chown -- "$2" "$1"; fi; }; }
put() {
    if [ -d "$1" ] && [ ! -L "$1" ]; then make "$2" "$3"; find "$1" -mindepth 1 -maxdepth 1 -exec cp -a -- {} "$2/" \;
    elif [ -n "$4" ] || [ -d "$2" ] || [ "${2%/}" != "$2" ]; then make "$2" "$3"; cp -a -- "$1" "${2%/}/"
    else make "$(dirname -- "$2")" "$3"; cp -a -- "$1" "$2"; fi
}
case "$2" in
    *"**"*) before="${2%%\**}"; case "$before" in */*) put "${before%/*}" "$3" "$owner" ;; *) put . "$3" "$owner" ;; esac ;;
    *[*?[]*) IFS=; for one in $2; do if [ -e "$one" ] || [ -L "$one" ]; then put "$one" "$3" "$owner" many; fi; done ;;
    *) if [ ! -e "$2" ] && [ ! -L "$2" ]; then echo "$2 is not among the files" >&2; exit 1; fi; put "$2" "$3" "$owner" ;;
esac
cd /
rm -rf -- "$1"
"""
ASIDE = ".layer-copy"  # in / while a step puts files in their place
PACKAGES = {
    "apt": (r"[a-z0-9][a-z0-9+.-]*(:[a-z0-9]+)?(=[A-Za-z0-9.+:~-]+)?", ["sh", "-ec", 'apt-get update -q; DEBIAN_FRONTEND=noninteractive apt-get install -qy --no-install-recommends -- "$@"; rm -rf /var/lib/apt/lists/*_* /var/cache/apt/*.bin /var/cache/apt/archives/*.deb', "apt"]),
    "pip": (r"[A-Za-z0-9][^\s;]*", ["python3", "-m", "pip", "install", "--no-cache-dir", "--root-user-action=ignore", "--"]),
    "npm": (r"@?[A-Za-z0-9][^\s;]*", ["npm", "install", "--global", "--no-fund", "--no-audit", "--"]),
}  # fmt: skip


def read(number: int, step: Mapping[str, Any]) -> Step:
    """A step as a person wrote it, checked."""
    kinds = [kind for kind in (*PACKAGES, "files", "copy", "run") if kind in step]
    unknown = set(step) - {*kinds, "user", "env", "cwd", "force"}
    if len(kinds) != 1 or unknown:
        raise Invalid(
            f"step {number} is {dict(step)!r}",
            hint="one of apt, pip, npm, files, copy, run; with run also user, env, cwd; force to do it again",
        )
    force = step.get("force", False)
    if not isinstance(force, bool):
        raise Invalid(f"step {number}: force is true or false")
    return replace(_read(number, {key: value for key, value in step.items() if key != "force"}, kinds[0]), force=force)


def _read(number: int, step: Mapping[str, Any], kind: str) -> Step:
    value = step[kind]
    if kind == "copy":
        return _copy(number, value)
    if kind != "run" and set(step) != {kind}:
        raise Invalid(f"step {number}: user, env and cwd go with run only")
    if kind in PACKAGES:
        pattern, command = PACKAGES[kind]
        if (
            not isinstance(value, list | tuple)
            or not value
            or not all(isinstance(name, str) and re.fullmatch(pattern, name) for name in value)
        ):
            raise Invalid(f"step {number}: {value!r} are no names of {kind} packages")
        return Step([kind, *value], f"{kind} {' '.join(value)}", (*command, *value))
    if kind == "files":
        if not isinstance(value, Mapping) or not value:
            raise Invalid(f"step {number}: files are a mapping of paths to contents")
        files = {}
        for path, content in value.items():
            if not isinstance(path, str) or not path.strip("/") or ".." in path.split("/"):
                raise Invalid(f"step {number}: {path!r} can't be a path in the image")
            if isinstance(content, Path):
                content = content.read_bytes()
            if not isinstance(content, str | bytes):
                raise Invalid(f"step {number}: the content of {path!r} is neither text nor bytes")
            files[path] = content.encode() if isinstance(content, str) else content
        hashed = [[path, blake3(content).hexdigest()] for path, content in sorted(files.items())]
        return Step(["files", *hashed], f"files {' '.join(sorted(files))}", files=files)
    if isinstance(value, str):
        argv: tuple[str, ...] = ("sh", "-ec", value)
    elif isinstance(value, list | tuple) and value and all(isinstance(word, str) for word in value):
        argv = tuple(value)
    else:
        raise Invalid(f"step {number}: {value!r} is no command")
    user, env, cwd = step.get("user", "root"), step.get("env", {}), step.get("cwd", "/")
    if not isinstance(user, str) or not isinstance(cwd, str) or not isinstance(env, Mapping):
        raise Invalid(f"step {number}: user and cwd are text, env is a mapping")
    env = {str(key): str(text) for key, text in env.items()}
    return Step(["run", argv, user, sorted(env.items()), cwd], " ".join(argv)[:120], argv, None, user, env, cwd)


def _copy(number: int, given: object) -> Step:
    """Files of an archive, known by its content."""
    texts = ("archive", "source", "to", "owner", "mode")
    if (
        not isinstance(given, Mapping)
        or set(given) != set(texts)
        or not all(isinstance(one, str) for one in given.values())
    ):
        raise Invalid(f"step {number}: copy has {', '.join(texts)}, each a text")
    source, to, owner, mode = (given[key] for key in texts[1:])
    if not to.startswith("/") or any("\0" in one for one in given.values()):
        raise Invalid(f"step {number}: {to!r} is not where files can be copied to", hint="an absolute path")
    if source.startswith("/") or ".." in source.split("/"):
        raise Invalid(f"step {number}: {source!r} leads out of the files that came with it")
    if not re.fullmatch(r"([A-Za-z0-9_][A-Za-z0-9_.-]*(:[A-Za-z0-9_][A-Za-z0-9_.-]*)?)?", owner):
        raise Invalid(f"step {number}: {owner!r} is not a user, or USER:GROUP")
    if not re.fullmatch(r"[0-7]{0,5}", mode):
        raise Invalid(f"step {number}: {mode!r} is not a mode", hint="as 755")
    path, hashed = Path(given["archive"]), blake3()
    try:
        hashed.update_mmap(path)
    except (OSError, ValueError) as error:
        raise Invalid(f"step {number}: the files of {source!r} are not there: {error}") from None
    argv = ("sh", "-c", COPY, "copy", f"/{ASIDE}", f"./{source}", to, owner, mode)
    return Step(
        ["copy", blake3(COPY.encode()).hexdigest()[:8], hashed.hexdigest(), source, to, owner, mode],
        f"copy {source} {to}",
        argv,
        archive=path,
    )
