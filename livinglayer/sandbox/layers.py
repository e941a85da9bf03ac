"""Bases become layer directories: the host's own files under a mask, a minimal Debian, images.

A layer is a sealed directory `disk/layers/NAME`; the name "host" stands for the host's own / and is always the last, below a mask
that shows an allow-list of it and nothing else. Owners on disk are the box's own (root 0, user 1000).
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
import stat
import subprocess
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from livinglayer.errors import Conflict, Invalid, LimitExceeded, NotFound
from livinglayer.sandbox import inside
from livinglayer.sandbox.disk import Disk
from livinglayer.sandbox.manifest import Entry
from livinglayer.sandbox.manifest import entries as entries_of
from livinglayer.sandbox.manifest import read as read_manifest
from livinglayer.sandbox.manifest import write as write_manifest
from livinglayer.sandbox.store import HASH, Store
from livinglayer.sandbox.tree import OPAQUE, read_stacked, scan, stacked
from livinglayer.sandbox.tree import write as write_tree

HOST, DEBIAN = "host", "debian"  # bases that need no import
MASK, FIT = "mask", "fit"  # in a chain: the layer of this kind, made anew on every disk
NAMESERVER = "198.18.0.1"  # answered by the gateway whatever the box asks
USER, USER_ID = "user", 1000

# What a box sees of the host's /: programs and libraries. Every other name is whited out.
SHOWN = re.compile(r"usr|bin|sbin|lib(32|64|x32|o32)?")
# Directories a box has anew, empty but for what is written below.
FRESH = {
    "root": 0o700, "home": 0o755, "tmp": 0o1777, "var": 0o755, "run": 0o755, "etc": 0o755, "proc": 0o555, "dev": 0o755,
    "sys": 0o555, "mnt": 0o755, "media": 0o755, "opt": 0o755, "srv": 0o755,
}  # fmt: skip
# Places in /usr where an administrator keeps what is theirs.
HIDDEN = ("usr/etc", "usr/src", "usr/local/etc", "usr/local/src")
# Of the host's /etc: settings that programs of /usr can't run without, and that say nothing about this host. World-readable files only.
ETC = (
    "ld.so.cache", "ld.so.conf", "ld.so.conf.d", "alternatives", "ssl/certs", "ssl/openssl.cnf", "ca-certificates.conf", "os-release",
    "debian_version", "localtime", "timezone", "mime.types", "magic", "magic.mime", "protocols", "services", "rpc", "gai.conf",
    "inputrc", "locale.alias", "terminfo", "python3", "python3.*", "perl", "java-*", "fonts", "matplotlibrc", "shells",
)  # fmt: skip

BORROWED_LINKS = ("/usr/", "/etc/alternatives/", "/etc/ssl/certs/", "/etc/java-")  # where links of those may lead

ACCOUNTS = [  # name, id, group id, home, shell
    ("root", 0, 0, "/root", "/bin/bash"), ("daemon", 1, 1, "/usr/sbin", "/usr/sbin/nologin"), ("bin", 2, 2, "/bin", "/usr/sbin/nologin"),
    ("sys", 3, 3, "/dev", "/usr/sbin/nologin"), ("mail", 8, 8, "/var/mail", "/usr/sbin/nologin"),
    ("www-data", 33, 33, "/var/www", "/usr/sbin/nologin"), (USER, USER_ID, USER_ID, f"/home/{USER}", "/bin/bash"),
    ("nobody", 65534, 65534, "/nonexistent", "/usr/sbin/nologin"),
]  # fmt: skip
GROUPS = [
    ("root", 0), ("daemon", 1), ("bin", 2), ("sys", 3), ("adm", 4), ("tty", 5), ("disk", 6), ("mail", 8), ("www-data", 33), ("shadow", 42),
    ("utmp", 43), ("staff", 50), ("users", 100), (USER, USER_ID), ("nogroup", 65534),
]  # fmt: skip
SU = "auth sufficient pam_rootok.so\nauth required pam_deny.so\naccount required pam_permit.so\nsession required pam_permit.so\n"
PROFILE = f"""\
if [ "${{EUID:-$(id -u)}}" -eq 0 ]; then PATH=/{inside.PLACE}/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
else PATH=/{inside.PLACE}/bin:/usr/local/bin:/usr/bin:/bin; fi
export PATH
for script in /etc/profile.d/*.sh; do [ -r "$script" ] && . "$script"; done; unset script
"""
HOSTS = "127.0.0.1 localhost box\n::1 localhost ip6-localhost ip6-loopback\n"


class Layers:
    """The layer directories of one disk, a cache of what the store holds; `ca` is the gateway's certificate (PEM), which boxes trust."""

    def __init__(self, disk: Disk, ca: Path | None = None, store: Store | None = None) -> None:
        self.disk, self.ca = disk, ca
        self.store = store or Store(disk.root.parent / "store")
        self._mask: tuple[tuple[object, ...], str] | None = (
            None  # what it was built of (names of /, our own files), and the layer
        )

    def resolve(self, base: str, progress: Callable[[str], None] = lambda line: None) -> tuple[str, ...]:
        """The layer names of a base, topmost first; a Debian that is not there yet is built, which takes about a minute."""
        if base == HOST:
            return (self.mask(), HOST)
        image = self.store.find_ref("image", base)
        if image is None and base == DEBIAN:
            from livinglayer.sandbox.debian import build  # only here: a base of its own file

            image = build(self, progress)
        if image is None:
            raise NotFound(
                f"the base {base!r} is not known", hint=f"host, {DEBIAN}, or an image imported under this name"
            )
        # An image built on the host's files brings its mask; any other is made to fit.
        return self.expand(image["layers"] if HOST in image["layers"] else (FIT, *image["layers"]))

    def path(self, name: str) -> Path:
        """Where a layer lies, written from the store when its directory was deleted; "host" is the host's own /."""
        if name == HOST:
            return Path("/")
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,200}", name):
            raise Invalid(f"{name!r} can't name a layer")
        path = self.disk.layers / name
        if not path.is_dir():
            if not HASH.fullmatch(name):
                raise NotFound(f"the layer {name!r} is not on this disk")
            self.materialise(name)
        return path

    def expand(self, chain: Sequence[str]) -> tuple[str, ...]:
        """The names of a chain as they are on this disk now: every layer is there, "mask" and "fit" are the present ones."""
        names: list[str] = []
        for name in reversed(chain):
            if name == MASK:
                name = self.mask()
            elif name == FIT:
                name = self.fit(tuple(reversed(names)))
            elif name != HOST:
                self.path(name)
            names.append(name)
        return tuple(reversed(names))

    def add(self, tree: Path) -> str:
        """Keep a finished tree (a subvolume under tmp/, which is used up) as a layer; its name."""
        with self.store.writing() as writer:
            manifest = write_manifest(scan(tree, writer).entries, writer)
            writer.commit()
            self.adopt(tree, manifest.id)
        return manifest.id

    def adopt(self, tree: Path, layer: str) -> bool:
        """Make a tree that holds what `layer` holds its directory; False (and the tree is gone) when there is one."""
        if not (self.disk.layers / layer).is_dir():
            with contextlib.suppress(Conflict):
                self.disk.move(tree, self.disk.layers / layer)
                self.disk.seal_tree(self.disk.layers / layer)
                return True
        self.disk.destroy(tree)
        return False

    def materialise(self, layer: str, like: Callable[[Entry], str | None] = lambda entry: None) -> Path:
        """Write a layer's directory from the store, every chunk verified; Corrupt names the one that is damaged and nothing is left."""
        aside = self.disk.subvolume(self.disk.tmp / f"layer-{os.urandom(8).hex()}")
        try:
            with self.store.reading():
                manifest = read_manifest(layer, self.store.get)
                write_tree(entries_of(manifest, self.store.get), self.store.get, aside, like)
                self.adopt(aside, layer)
        finally:
            self.disk.destroy(aside)
        return self.disk.layers / layer

    def fit(self, layers: tuple[str, ...]) -> str:
        """The small layer above an image that makes it a box: names answered by the gateway, its certificate, the user `user`."""
        made_of = (layers, self.ca and self.ca.read_bytes(), inside.digest())
        key = hashlib.sha256(repr(made_of).encode()).hexdigest()[:24]
        name = f"{FIT}-{key}"
        if not (self.disk.layers / name).is_dir():
            below = [self.path(layer) for layer in layers]
            self._seal(lambda tree: build_fit(tree, below, self.ca), FIT, name)
        return name

    def sweep(self) -> None:
        """Remove what builds and snapshots left that did not end; only when none is under way."""
        for entry in os.listdir(self.disk.tmp):
            self.disk.destroy(self.disk.tmp / entry)

    def mask(self) -> str:
        """The layer that hides all of the host's / but its programs; built again when / has a new name."""
        names = tuple(sorted(os.listdir("/")))
        made_of = (*names, inside.signature())
        if self._mask is None or self._mask[0] != made_of or not (self.disk.layers / self._mask[1]).is_dir():
            self._mask = (made_of, self._seal(lambda tree: build_mask(tree, names, self.ca), MASK))
        return self._mask[1]

    def _seal(self, build: Callable[[Path], None], prefix: str, name: str | None = None) -> str:
        """Build a small layer aside, name it by what it holds, put it in its place."""
        aside = self.disk.subvolume(self.disk.tmp / f"{prefix}-{os.urandom(8).hex()}")
        try:
            build(aside)
            name = name or f"{prefix}-{fingerprint(aside)}"
            self.adopt(aside, name)
            return name
        finally:
            self.disk.destroy(aside)


def chain_of(names: Sequence[str]) -> tuple[str, ...]:
    """Layer names as they mean the same on every disk: the mask and the fitting layer are made anew wherever they are needed."""
    return tuple(re.sub(r"^(mask|fit)-[0-9a-f]+$", r"\1", name) for name in names)


def build_fit(tree: Path, below: Sequence[Path], ca: Path | None) -> None:
    """Write what an image lacks to be a box; whatever the image has in these places is read without following anything."""
    os.chmod(tree, 0o755)

    def content(path: str) -> str:
        try:
            return read_stacked(below, path).decode(errors="surrogateescape")
        except (NotFound, LimitExceeded):
            return ""

    def has(path: str) -> bool:
        try:
            stacked(below, path)
        except NotFound:
            return False
        return True

    def directory(path: str, mode: int = 0o755, owner: int = 0) -> Path:
        try:
            _, found = stacked(below, path)
            if stat.S_ISDIR(found.st_mode):
                mode, owner = stat.S_IMODE(found.st_mode), found.st_uid
        except NotFound:
            pass
        for parent in reversed(Path(path).parents[:-1]):
            if not (tree / parent).is_dir():
                directory(str(parent))
        _directory(tree / path, mode)
        os.chown(tree / path, owner, owner)
        return tree / path

    for name, mode in FRESH.items():
        if not has(name):
            directory(name, mode)
    etc = directory("etc")
    shell = "/bin/bash" if has("usr/bin/bash") or has("bin/bash") else "/bin/sh"
    passwd, group = content("etc/passwd") or f"root:x:0:0::/root:{shell}\n", content("etc/group") or "root:x:0:\n"
    if not re.search(rf"^{USER}:", passwd, re.MULTILINE):
        passwd = f"{passwd.rstrip()}\n{USER}:x:{USER_ID}:{USER_ID}::/home/{USER}:{shell}\n"
    if not re.search(rf"^{USER}:", group, re.MULTILINE):
        group = f"{group.rstrip()}\n{USER}:x:{USER_ID}:\n"
    texts = {
        "passwd": passwd,
        "group": group,
        "hosts": HOSTS,
        "hostname": "box\n",
        "resolv.conf": f"nameserver {NAMESERVER}\n",
    }
    for name, text in texts.items():
        (etc / name).write_text(text, errors="surrogateescape")
        os.chmod(etc / name, 0o644)
    directory(f"home/{USER}", 0o755, USER_ID)
    ours = directory(inside.PLACE)
    os.setxattr(ours, OPAQUE, b"y")
    inside.write(ours)
    if ca is not None:
        trust(
            directory("etc/ssl/certs"),
            content("etc/ssl/certs/ca-certificates.crt").encode(errors="surrogateescape"),
            ca.read_bytes(),
        )


def build_mask(tree: Path, names: Iterable[str], ca: Path | None) -> None:
    """Write the mask of a host whose / has these names into an empty directory."""
    os.chmod(tree, 0o755)
    for name in names:
        if not SHOWN.fullmatch(name) and name not in FRESH:
            os.mknod(tree / name, stat.S_IFCHR, 0)
    for name, mode in FRESH.items():
        _directory(tree / name, mode, opaque=True)
    for place in HIDDEN:
        if Path("/", place).is_dir():
            for parent in reversed(Path(place).parents[:-1]):
                if not (tree / parent).is_dir():
                    _directory(tree / parent, 0o755)
            _directory(tree / place, 0o755, opaque=True)
    for place, mode in (("var/tmp", 0o1777), ("run/lock", 0o1777), ("dev/shm", 0o1777), ("dev/pts", 0o755)):
        _directory(tree / place, mode)
    for place in (
        "var/cache",
        "var/lib",
        "var/log",
        "var/spool",
        "var/mail",
        "var/www",
        "etc/pam.d",
        "etc/profile.d",
        "etc/default",
        "etc/skel",
    ):
        _directory(tree / place, 0o755)
    (tree / "var/run").symlink_to("/run")
    (tree / "var/lock").symlink_to("/run/lock")
    _directory(tree / "home" / USER, 0o755)
    os.chown(tree / "home" / USER, USER_ID, USER_ID)

    _directory(tree / inside.PLACE, 0o755)
    inside.write(tree / inside.PLACE)
    for pattern in ETC:
        for source in sorted(Path("/etc").glob(pattern)):
            _borrow(source, tree / "etc" / source.relative_to("/etc"))
    etc = {
        "passwd": "".join(f"{n}:x:{u}:{g}::{home}:{shell}\n" for n, u, g, home, shell in ACCOUNTS),
        "group": "".join(f"{n}:x:{g}:\n" for n, g in GROUPS),
        "nsswitch.conf": "passwd: files\ngroup: files\nshadow: files\nhosts: files dns\nnetworks: files\nprotocols: files\nservices: files\n",
        "hosts": HOSTS, "hostname": "box\n", "resolv.conf": f"nameserver {NAMESERVER}\n", "profile": PROFILE,
        "bash.bashrc": '[ -z "$PS1" ] || PS1="\\u@\\h:\\w\\$ "\n',
        "pam.d/su": SU, "pam.d/su-l": SU, "pam.d/runuser": SU, "pam.d/other": SU,
        "login.defs": "ENV_PATH PATH=/usr/local/bin:/usr/bin:/bin\nENV_SUPATH PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin\n",
    }  # fmt: skip
    for name, text in etc.items():
        (tree / "etc" / name).write_text(text)
        os.chmod(tree / "etc" / name, 0o644)
    (tree / "etc/shadow").write_text("".join(f"{account[0]}:*:19000:0:99999:7:::\n" for account in ACCOUNTS))
    os.chown(tree / "etc/shadow", 0, 42)
    os.chmod(tree / "etc/shadow", 0o640)
    (tree / "etc/mtab").symlink_to("../proc/self/mounts")
    if ca is not None:
        certs = tree / "etc/ssl/certs"
        certs.mkdir(mode=0o755, parents=True, exist_ok=True)
        bundle = certs / "ca-certificates.crt"
        trust(certs, bundle.read_bytes() if bundle.is_file() else b"", ca.read_bytes())


def trust(certs: Path, bundle: bytes, ca: bytes) -> None:
    """Make programs believe the gateway's certificate: in the bundle, alone, and under the hash by which OpenSSL looks."""
    (certs / "livinglayer.pem").write_bytes(ca)
    (certs / "ca-certificates.crt").write_bytes(bundle + (b"" if bundle.endswith(b"\n") or not bundle else b"\n") + ca)
    for name in ("livinglayer.pem", "ca-certificates.crt"):
        os.chmod(certs / name, 0o644)
    if shutil.which("openssl"):
        said = subprocess.run(["openssl", "x509", "-noout", "-hash"], input=ca, capture_output=True, check=False)
        if re.fullmatch(rb"[0-9a-f]{8}", said.stdout.strip()):
            link = certs / f"{said.stdout.strip().decode()}.0"
            if not os.path.lexists(link):
                link.symlink_to("livinglayer.pem")


def fingerprint(tree: Path) -> str:
    """A name for what a small tree of our own making holds; its times do not count."""
    digest = hashlib.sha256()
    top = str(tree)
    for at, directories, names in os.walk(top):
        directories.sort()
        for name in sorted([*directories, *names]):
            path = f"{at}/{name}"
            found = os.lstat(path)
            what = os.readlink(path) if stat.S_ISLNK(found.st_mode) else ""
            size = found.st_size if stat.S_ISREG(found.st_mode) else 0
            digest.update(
                os.fsencode(f"{path[len(top) :]}\0{found.st_mode:o}\0{found.st_uid}\0{found.st_gid}\0{what}\0{size}\0")
            )
            if stat.S_ISREG(found.st_mode):
                with open(path, "rb") as file:
                    digest.update(file.read())
    return digest.hexdigest()[:24]


def _directory(path: Path, mode: int, opaque: bool = False) -> None:
    path.mkdir(exist_ok=True)
    os.chmod(path, mode)
    if opaque:
        os.setxattr(path, OPAQUE, b"y")


def _borrow(source: Path, target: Path) -> None:
    """Copy a file, link or tree of the host's /etc that anybody here may read; keys never."""
    target.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
    _copy(str(source), str(target))


def _copy(
    source: str, target: str
) -> None:  # text rather than paths: there are a thousand of them, and a host waits for this to start
    found = os.lstat(source)
    if stat.S_ISLNK(found.st_mode):
        goal = os.readlink(source)
        # A link that leads elsewhere would dangle, or name what is not shown.
        if os.path.normpath(os.path.join(os.path.dirname(source), goal)).startswith(BORROWED_LINKS):
            os.symlink(goal, target)
    elif stat.S_ISDIR(found.st_mode) and found.st_mode & 0o005 == 0o005:
        with contextlib.suppress(FileExistsError):
            os.mkdir(target)
        os.chmod(target, 0o755)
        for name in sorted(os.listdir(source)):
            _copy(f"{source}/{name}", f"{target}/{name}")
    elif stat.S_ISREG(found.st_mode) and found.st_mode & stat.S_IROTH and found.st_size <= 16 << 20:
        with open(source, "rb") as file:
            content = file.read()
        if b"PRIVATE KEY" not in content and not source.endswith(".key"):
            with open(target, "wb") as file:
                file.write(content)
            os.chmod(target, 0o755 if found.st_mode & stat.S_IXOTH else 0o644)
