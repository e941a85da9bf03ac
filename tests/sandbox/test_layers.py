"""Bases: what a box sees of the host is an allow-list, what it sees of an image is made to fit, and a Debian can be built."""

from __future__ import annotations

import os
import shutil
import socket
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from livinglayer.errors import Invalid, NotFound, Unavailable
from livinglayer.sandbox import layers as module
from livinglayer.sandbox.disk import Disk
from livinglayer.sandbox.layers import Layers, build_mask, chain_of
from livinglayer.sandbox.store import Store

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="mounts a btrfs, which needs root")

CA = """-----BEGIN CERTIFICATE-----
MIIBdTCCARugAwIBAgIUEs5kZ0R4b1vYqv0m2bX0l3mXH5kwCgYIKoZIzj0EAwIw
-----END CERTIFICATE-----
"""


@pytest.fixture
def layers(tmp_path: Path) -> Iterator[Layers]:
    with Disk.open(tmp_path / "state", 4 << 30) as disk:
        store = Store(tmp_path / "state/store", durable=False)
        yield Layers(disk, store=store)
        store.close()


def in_overlay(layers: Layers, names: tuple[str, ...], script: str) -> str:
    """What a shell script says in a root made of these layers; no isolation, only the files."""
    box = layers.disk.create(f"b{os.urandom(4).hex()}")
    root = layers.disk.root.parent / "root"
    root.mkdir(exist_ok=True)
    lower = ":".join(str(layers.path(name)) for name in names)
    mount = f"mount -t overlay overlay -o lowerdir={lower},upperdir={box}/u,workdir={box}/w {root} && mount -t proc proc {root}/proc && mount -t tmpfs none {root}/dev && mknod -m 666 {root}/dev/null c 1 3"
    done = subprocess.run(
        ["unshare", "--mount", "--pid", "--fork", "--kill-child", "sh", "-ec", f"{mount}; exec chroot {root} /bin/sh -ec '{script}'"],
        capture_output=True, text=True, check=False, env={"PATH": "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


# the host's own files


def test_the_host_is_shown_through_an_allow_list(layers: Layers) -> None:
    names = layers.resolve("host")
    assert names[0].startswith("mask-") and names[1:] == ("host",)
    assert layers.path("host") == Path("/")
    mask = layers.path(names[0])
    shown = set(in_overlay(layers, names, "ls -A /").split())
    fresh = set(module.FRESH)
    assert shown <= fresh | {name for name in os.listdir("/") if module.SHOWN.fullmatch(name)}
    assert fresh <= shown
    for name in os.listdir("/"):
        if name not in shown:
            found = os.lstat(mask / name)
            assert stat.S_ISCHR(found.st_mode) and found.st_rdev == 0
    for name in fresh:
        assert os.getxattr(mask / name, "trusted.overlay.opaque") == b"y"


def test_no_secret_of_the_host_is_in_the_mask(layers: Layers) -> None:
    mask = layers.path(layers.mask())
    etc = {str(path.relative_to(mask / "etc")) for path in (mask / "etc").rglob("*")}
    assert not etc & {"ssh", "machine-id", "sudoers", "sudoers.d", "environment", "gshadow", "shadow-", "ssl/private", "krb5.keytab", "pip.conf", "npmrc", "gitconfig", "fstab", "apt"}  # fmt: skip
    for name in ("root", "tmp", "var/log", "srv", "mnt", "media", "home/user"):
        assert os.listdir(mask / name) == [], name
    assert os.listdir(mask / "opt") == ["livinglayer"]
    assert os.listdir(mask / "home") == ["user"]
    secrets = [
        Path(path)
        for path in ("/etc/shadow", "/etc/machine-id", "/etc/hostname", "/etc/resolv.conf", "/etc/environment")
    ]
    told = [
        line
        for path in secrets
        if path.is_file()
        for line in path.read_bytes().splitlines()
        if len(line) > 12 and b"*" not in line and b"!" not in line
    ]
    told.append(socket.gethostname().encode()) if len(socket.gethostname()) > 8 else None
    accounts = {line.split(":")[0] for line in Path("/etc/passwd").read_text().splitlines()} - {
        account[0] for account in module.ACCOUNTS
    }
    for path in mask.rglob("*"):
        if path.is_file() and not path.is_symlink():
            content = path.read_bytes()
            assert b"PRIVATE KEY" not in content, path
            for secret in told:
                assert secret not in content, path
    assert not accounts & {line.split(":")[0] for line in (mask / "etc/passwd").read_text().splitlines()}


def test_programs_of_the_host_run(layers: Layers) -> None:
    script = """
        /usr/bin/python3 -c "import ssl, json, pwd, zoneinfo; print(pwd.getpwuid(1000).pw_dir, ssl.create_default_context() is not None)"
        su user -c "id -un; touch ~/mine; ls -l ~/mine | cut -c1-10"
        stat -c "%a %u %g" /home/user /tmp /var/tmp /root /etc/shadow
        cat /etc/resolv.conf /etc/hostname
    """
    assert in_overlay(layers, layers.resolve("host"), script).splitlines() == [
        "/home/user True", "user", "-rw-r--r--", "755 1000 1000", "1777 0 0", "1777 0 0", "700 0 0", "640 0 42", "nameserver 198.18.0.1", "box",
    ]  # fmt: skip


def test_a_mask_is_built_once_and_again_when_root_has_a_new_name(
    layers: Layers, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = layers.mask()
    assert layers.mask() == first
    assert Layers(layers.disk, store=layers.store).mask() == first  # by content
    listed = os.listdir
    monkeypatch.setattr(os, "listdir", lambda path=".": [*listed(path), "new-secret"] if path == "/" else listed(path))
    second = layers.mask()
    assert second != first
    assert stat.S_ISCHR(os.lstat(layers.path(second) / "new-secret").st_mode)


def test_keys_and_links_elsewhere_are_not_borrowed(tmp_path: Path) -> None:
    source = tmp_path / "etc"
    (source / "dir").mkdir(parents=True)
    (source / "dir/plain").write_text("plain")
    (source / "dir/key.pem").write_text("-----BEGIN RSA PRIVATE KEY-----")
    (source / "dir/own").write_text("mine")
    os.chmod(source / "dir/own", 0o600)
    (source / "dir/out").symlink_to("/root/.ssh/id_rsa")
    (source / "dir/in").symlink_to("/usr/lib/os-release")
    os.mkfifo(source / "dir/fifo")
    (source / "closed").mkdir(mode=0o700)
    module._borrow(source / "dir", tmp_path / "to/dir")
    module._borrow(source / "closed", tmp_path / "to/closed")
    assert sorted(os.listdir(tmp_path / "to/dir")) == ["in", "plain"]
    assert os.listdir(tmp_path / "to") == ["dir"]


def test_the_gateways_certificate_is_trusted(layers: Layers, tmp_path: Path) -> None:
    before = layers.mask()
    (tmp_path / "ca.pem").write_text(CA)
    trusting = Layers(layers.disk, tmp_path / "ca.pem", layers.store)
    assert trusting.mask() != before
    certs = trusting.path(trusting.mask()) / "etc/ssl/certs"
    assert (certs / "livinglayer.pem").read_text() == CA
    assert (certs / "ca-certificates.crt").read_text().endswith(CA)
    host = Path("/etc/ssl/certs/ca-certificates.crt")
    if host.is_file():
        assert (certs / "ca-certificates.crt").read_text() == host.read_text() + CA


def test_an_empty_host_has_a_mask_too(tmp_path: Path, layers: Layers) -> None:
    tree = layers.disk.subvolume(layers.disk.tmp / "t")
    build_mask(tree, [], None)
    assert (tree / "home/user").stat().st_uid == 1000


# names


@pytest.mark.parametrize("name", ["", ".", "..", "../boxes", "a/b", "-x", "/etc"])
def test_names_that_are_no_layers(layers: Layers, name: str) -> None:
    with pytest.raises(Invalid, match="can't name a layer"):
        layers.path(name)


def test_unknown_bases(layers: Layers) -> None:
    with pytest.raises(NotFound, match="the base 'nothing' is not known"):
        layers.resolve("nothing")
    with pytest.raises(NotFound):
        layers.path("mask-0000")


def test_chains_mean_the_same_everywhere(layers: Layers) -> None:
    names = ("a" * 64, *layers.resolve("host"))
    assert chain_of(names) == ("a" * 64, "mask", "host")
    assert layers.expand(("mask", "host")) == names[1:]


# images made to fit


def image(layers: Layers, fill: object) -> tuple[str, ...]:
    tree = layers.disk.subvolume(layers.disk.tmp / f"i{os.urandom(4).hex()}")
    os.chmod(tree, 0o755)
    fill(tree)  # type: ignore[operator]
    return layers.expand(("fit", layers.add(tree)))


def test_an_empty_image_fits(layers: Layers) -> None:
    fit = layers.path(image(layers, lambda tree: (tree / "x").touch())[0])
    assert (fit / "etc/resolv.conf").read_text() == "nameserver 198.18.0.1\n"
    assert (fit / "etc/passwd").read_text().splitlines() == [
        "root:x:0:0::/root:/bin/sh",
        "user:x:1000:1000::/home/user:/bin/sh",
    ]
    assert os.lstat(fit / "home/user").st_uid == 1000
    assert os.lstat(fit / "tmp").st_mode & 0o7777 == 0o1777


def test_accounts_and_modes_of_an_image_stay(layers: Layers) -> None:
    def fill(tree: Path) -> None:
        (tree / "etc").mkdir(mode=0o750)
        (tree / "etc/passwd").write_text("root:x:0:0::/root:/bin/ash\nnode:x:1000:1000::/home/node:/bin/sh")
        (tree / "etc/group").write_text("root:x:0:\nuser:x:7:\n")

    fit = layers.path(image(layers, fill)[0])
    assert (fit / "etc/passwd").read_text().splitlines() == [
        "root:x:0:0::/root:/bin/ash", "node:x:1000:1000::/home/node:/bin/sh", "user:x:1000:1000::/home/user:/bin/sh",
    ]  # fmt: skip
    assert (fit / "etc/group").read_text() == "root:x:0:\nuser:x:7:\n"
    assert os.lstat(fit / "etc").st_mode & 0o777 == 0o750


def test_a_hostile_image_is_not_read_through(layers: Layers) -> None:
    def links(tree: Path) -> None:
        (tree / "etc").symlink_to("/etc")
        (tree / "home").symlink_to("/root")

    def files(tree: Path) -> None:
        (tree / "etc/ssl/certs").mkdir(parents=True)
        (tree / "etc/passwd").symlink_to("/etc/shadow")
        os.mkfifo(tree / "etc/group")
        (tree / "etc/ssl/certs/ca-certificates.crt").symlink_to("/etc/shadow")
        with open(tree / "etc/hosts", "wb") as file:
            file.truncate(1 << 40)
        (tree / "home").write_text("no directory")

    for fill in (links, files):
        fit = layers.path(image(layers, fill)[0])
        assert (fit / "etc/passwd").read_text().splitlines()[0] == "root:x:0:0::/root:/bin/sh"
        assert (fit / "etc").is_dir() and not (fit / "etc").is_symlink()
        assert os.lstat(fit / "home/user").st_uid == 1000


def test_layers_come_back_when_their_directories_are_deleted(layers: Layers) -> None:
    names = image(layers, lambda tree: (tree / "x").write_text("x"))
    for name in names:
        layers.disk.destroy(layers.disk.layers / name)
    assert layers.expand(("fit", names[1])) == names
    assert (layers.path(names[1]) / "x").read_text() == "x"
    with pytest.raises(OSError, match="Read-only"):
        (layers.path(names[1]) / "y").touch()


def test_sweep(layers: Layers) -> None:
    layers.disk.subvolume(layers.disk.tmp / "left")
    (layers.disk.tmp / "dir").mkdir()
    layers.sweep()
    assert os.listdir(layers.disk.tmp) == []


# Debian


@pytest.mark.skipif(
    not shutil.which("debootstrap", path="/usr/sbin:/usr/bin:/sbin:/bin"), reason="debootstrap is not installed"
)
def test_a_minimal_debian(layers: Layers) -> None:
    """Built once a machine, from its own package sources; afterwards taken from the cache."""
    said: list[str] = []
    try:
        names = layers.resolve("debian", said.append)
    except Unavailable as error:
        pytest.skip(f"no package sources here: {error}")
    assert said
    script = """
        python3 -c "import ssl, json, sys; print(sys.version_info[0])"
        id -un 1000; ls /usr/share/doc 2>/dev/null | wc -l; ls -A /dev/ | grep -v null | wc -l
        test ! -s /etc/machine-id && dpkg -s python3-minimal | grep Status
        cat /etc/resolv.conf
    """
    assert in_overlay(layers, names, script).splitlines() == [
        "3",
        "user",
        "0",
        "0",
        "Status: install ok installed",
        "nameserver 198.18.0.1",
    ]
    assert layers.resolve("debian") == names
    root = layers.path(names[1])
    assert sum(os.lstat(Path(at, name)).st_blocks * 512 for at, _, files in os.walk(root) for name in files) < 200 << 20
