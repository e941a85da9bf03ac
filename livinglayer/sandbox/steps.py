"""The steps of an image's build, as people write them and as they are run and remembered."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
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


PACKAGES = {
    "apt": (r"[a-z0-9][a-z0-9+.-]*(:[a-z0-9]+)?(=[A-Za-z0-9.+:~-]+)?", ["sh", "-ec", 'apt-get update -q; DEBIAN_FRONTEND=noninteractive apt-get install -qy --no-install-recommends -- "$@"; rm -rf /var/lib/apt/lists/*_* /var/cache/apt/*.bin /var/cache/apt/archives/*.deb', "apt"]),
    "pip": (r"[A-Za-z0-9][^\s;]*", ["python3", "-m", "pip", "install", "--no-cache-dir", "--root-user-action=ignore", "--"]),
    "npm": (r"@?[A-Za-z0-9][^\s;]*", ["npm", "install", "--global", "--no-fund", "--no-audit", "--"]),
}  # fmt: skip


def read(number: int, step: Mapping[str, Any]) -> Step:
    """A step as a person wrote it, checked."""
    kinds = [kind for kind in (*PACKAGES, "files", "run") if kind in step]
    unknown = set(step) - {*kinds, "user", "env", "cwd"}
    if len(kinds) != 1 or unknown:
        raise Invalid(
            f"step {number} is {dict(step)!r}", hint="one of apt, pip, npm, files, run; with run also user, env, cwd"
        )
    kind, value = kinds[0], step[kinds[0]]
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
