"""The base `debian`: a minimal Debian of this machine's own release, from this machine's own package sources."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from livinglayer.errors import Unavailable
from livinglayer.sandbox.disk import remove_tree

if TYPE_CHECKING:
    from livinglayer.sandbox.layers import Layers

PACKAGES = ("python3-minimal", "python3", "ca-certificates")
# Documentation, translations, caches and logs: two fifths of what debootstrap leaves, and nothing a program needs.
STRIPPED = (
    "usr/share/doc", "usr/share/man", "usr/share/info", "usr/share/locale", "usr/share/lintian", "usr/share/bug", "var/cache/apt",
    "var/cache/debconf", "var/lib/apt/lists", "var/log", "debootstrap", "dev", "run", "tmp",
)  # fmt: skip
SECONDS = 900


def build(layers: Layers, progress: Callable[[str], None]) -> dict[str, Any]:
    """Build the base, or take it from the machine's cache, and register it; Unavailable says what is missing."""
    if os.geteuid() != 0:
        raise Unavailable("the base 'debian' needs root to be built", hint="import an image of it instead")
    codename = _release().get("VERSION_CODENAME", "")
    machine = os.uname().machine
    archive = _cache() / f"debian-{codename}-{machine}.tar"
    aside = layers.disk.subvolume(layers.disk.tmp / f"debian-{os.urandom(8).hex()}")
    try:
        with _alone(archive):
            if archive.exists():
                progress(f"unpacking {archive}")
                _run(
                    [
                        "tar",
                        "--extract",
                        "--numeric-owner",
                        "--preserve-permissions",
                        "--xattrs",
                        "--file",
                        str(archive),
                        "--directory",
                        str(aside),
                    ]
                )
                try:
                    _check_whole(aside, str(archive))
                except Unavailable:
                    archive.unlink()  # the next one builds it anew
                    raise
            else:
                _bootstrap(aside, codename, progress)
                _strip(aside)
                _check_whole(aside, "what was built")
                progress("keeping it for the next time")
                _run(
                    [
                        "tar",
                        "--create",
                        "--numeric-owner",
                        "--sort=name",
                        "--xattrs",
                        "--file",
                        f"{archive}.new",
                        "--directory",
                        str(aside),
                        ".",
                    ]
                )
                _check_whole(aside, "what was built")  # still: its disk may be cleared under us when the host ends
                os.chmod(f"{archive}.new", 0o600)
                os.rename(f"{archive}.new", archive)
        image = {
            "layers": [layers.add(aside)],
            "config": {"Env": ["PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"]},
        }
    finally:
        layers.disk.destroy(aside)
    layers.store.write_ref("image", "debian", image)
    return image


def _check_whole(tree: Path, what: str) -> None:
    """A base that lacks what every Debian has is no base."""
    for name in ("etc/debian_version", "usr/bin/dpkg", "usr/bin/dash", "usr/bin/python3", "var/lib/dpkg/status"):
        if not os.path.lexists(tree / name):
            raise Unavailable(f"{what} is not a whole Debian: /{name} is missing", hint="try again: it is built anew")


def _bootstrap(target: Path, codename: str, progress: Callable[[str], None]) -> None:
    if not shutil.which("debootstrap", path="/usr/sbin:/usr/bin:/sbin:/bin"):
        raise Unavailable("debootstrap is missing", hint="apt-get install debootstrap")
    mirror, keyring = _mirror(codename)
    # In namespaces of its own: however it ends, no process and no mount of it stays.
    command = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
    command += ["debootstrap", "--variant=minbase", f"--include={','.join(PACKAGES)}"]
    command += [f"--keyring={keyring}"] if keyring else []
    command += [codename, str(target), mirror]
    environment = {
        "PATH": "/usr/sbin:/usr/bin:/sbin:/bin",
        "LC_ALL": "C.UTF-8",
        "DEBIAN_FRONTEND": "noninteractive",
        **_proxy(),
    }
    said: list[str] = []
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, text=True, env=environment
    ) as process:
        assert process.stdout is not None
        try:
            for line in process.stdout:
                said = [*said[-20:], line.rstrip()]
                progress(line.rstrip())
            process.wait(SECONDS)
        except BaseException:
            process.kill()
            raise
    if process.returncode:
        log = target / "debootstrap/debootstrap.log"
        more = log.read_text(errors="replace")[-500:] if log.is_file() else ""
        raise Unavailable(
            f"debootstrap failed: {' · '.join(said[-3:])} {more}".strip(),
            hint="are this machine's package sources reachable?",
        )


def _strip(tree: Path) -> None:
    for place in STRIPPED:
        directory = tree / place
        if directory.is_dir() and not directory.is_symlink():
            remove_tree(directory)
    for place, mode in (
        ("dev", 0o755),
        ("run", 0o755),
        ("tmp", 0o1777),
        ("var/cache/apt/archives/partial", 0o755),
        ("var/lib/apt/lists/partial", 0o755),
        ("var/log", 0o755),
    ):
        (tree / place).mkdir(parents=True, exist_ok=True)
        os.chmod(tree / place, mode)
    for place in (
        "etc/machine-id",
        "etc/hostname",
        "etc/resolv.conf",
        "var/lib/dbus/machine-id",
        "var/cache/ldconfig/aux-cache",
    ):
        (tree / place).unlink(missing_ok=True)  # this machine's own
    for backup in (*tree.glob("etc/*-"), *tree.glob("var/lib/dpkg/*-old")):
        backup.unlink()


def _mirror(codename: str) -> tuple[str, str]:
    """The address and keyring from which this machine's apt gets its own release."""
    # Fields that apt does not know it leaves as they are written.
    form = "$(REPO_URI)|$(RELEASE)|$(COMPONENT)|$(SIGNED_BY)"
    said = subprocess.run(
        ["apt-get", "indextargets", "--format", form, "Created-By: Packages"],
        capture_output=True,
        text=True,
        check=False,
    )
    for line in said.stdout.splitlines():
        address, release, component, keyring = line.split("|")
        if release == codename and component == "main":
            return address, keyring if keyring.startswith("/") else ""
    raise Unavailable(
        f"apt knows no source of {codename!r}", hint="apt-get update; its sources must name the release of this machine"
    )


def _proxy() -> dict[str, str]:
    said = subprocess.run(
        ["apt-config", "shell", "proxy", "Acquire::http::Proxy"], capture_output=True, text=True, check=False
    ).stdout
    proxy = said.partition("=")[2].strip().strip("'\"")
    known = {name: os.environ[name] for name in ("http_proxy", "https_proxy", "no_proxy") if name in os.environ}
    return known | ({"http_proxy": proxy} if proxy and proxy != "DIRECT" else {})


def _release() -> dict[str, str]:
    lines = Path("/etc/os-release").read_text().splitlines() if Path("/etc/os-release").exists() else []
    found = {name: value.strip('"') for name, _, value in (line.partition("=") for line in lines)}
    if found.get("ID") != "debian" or not found.get("VERSION_CODENAME"):
        raise Unavailable("the base 'debian' is built on Debian only", hint="import an image of it instead")
    return found


def _cache() -> Path:
    path = Path(os.environ.get("LAYER_CACHE") or "/var/cache/livinglayer")
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    return path


@contextlib.contextmanager
def _alone(archive: Path) -> Iterator[None]:
    """One build at a time on this machine; the others find the archive."""
    fd = os.open(f"{archive}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise Unavailable(f"{command[0]} failed: {done.stderr.strip()[-300:]}")
