"""OCI images: in from an archive or a registry, out of a snapshot, and built step by step; every layer kept by content."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import gzip
import hashlib
import io
import json
import os
import re
import shutil
import subprocess
import tarfile
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Protocol

from blake3 import blake3

from livinglayer.errors import Corrupt, Invalid, LimitExceeded, NotFound, Unavailable
from livinglayer.sandbox import manifest
from livinglayer.sandbox.layers import DEBIAN, FIT, HOST, Layers, chain_of
from livinglayer.sandbox.oci import (
    MACHINES,
    Archive,
    Blob,
    Directory,
    Source,
    Tee,
    diffs_of,
    read_image,
    settings_of,
    write_blob,
    write_layer,
)
from livinglayer.sandbox.snapshots import Snapshots
from livinglayer.sandbox.steps import ASIDE, Step
from livinglayer.sandbox.steps import read as read_step
from livinglayer.sandbox.store import HASH
from livinglayer.sandbox.tree import scan
from livinglayer.sandbox.unpack import Caps, Packed, Tree, check, unpack

MANY = 20  # layers of an image before they are kept as one
SECONDS = 1800  # for a registry

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/:@-]{0,199}")
Progress = Callable[[str], None]


def quiet(line: str) -> None:
    """Say nothing."""


@dataclass(frozen=True)
class Image:
    """An image known here: its layers, topmost first, and what its author wants run."""

    name: str
    layers: tuple[str, ...]
    env: tuple[str, ...] = ()
    user: str = ""
    workdir: str = ""
    entrypoint: tuple[str, ...] = ()
    cmd: tuple[str, ...] = ()
    digest: str = ""  # of the configuration it came with
    created: float = 0.0


@dataclass(frozen=True)
class Ran:
    """How a build step's command ended; its output is the last of stdout and stderr together."""

    exit_code: int
    output: bytes = b""


class RunInBox(Protocol):
    """Runs one command in a box made of `layers` whose changes land in `upper` (disk/boxes/ID), and returns when the box is gone."""

    async def __call__(
        self, layers: tuple[str, ...], argv: Sequence[str], *, upper: Path, user: str, env: Mapping[str, str], cwd: str
    ) -> Ran: ...


class Images:
    """The images of one state directory; `resolve(name)` of Layers makes boxes of them."""

    def __init__(self, layers: Layers, snapshots: Snapshots | None = None, caps: Caps | None = None) -> None:
        self.layers, self.disk, self.store = layers, layers.disk, layers.store
        self.snapshots = snapshots or Snapshots(self.disk, layers)
        self.caps = caps or Caps()

    def get(self, name: str) -> Image:
        document = self.store.ref("image", name)
        config = document.get("config") or {}
        return Image(
            name, tuple(document["layers"]), tuple(config.get("Env") or ()), config.get("User") or "", config.get("WorkingDir") or "",
            tuple(config.get("Entrypoint") or ()), tuple(config.get("Cmd") or ()), document.get("digest", ""), document.get("created", 0.0),
        )  # fmt: skip

    def list_images(self) -> list[Image]:
        return [self.get(name) for name in self.store.refs("image")]

    def remove(self, name: str) -> None:
        """Forget an image; its layers go at the next collection, unless something else stands on them."""
        if not self.store.remove_ref("image", name):
            raise NotFound(f"no image {name!r}")

    def of(self, snapshot: str, name: str) -> Image:
        """An image of what a snapshot holds."""
        _check_name(name)
        found = self.snapshots.get(snapshot)
        layers = [layer for layer in found.layers if layer != FIT]  # what makes it fit is made anew
        self.store.write_ref(
            "image", name, {"layers": layers, "config": self._config_below(layers), "created": time.time()}
        )
        return self.get(name)

    # in

    def import_archive(self, path: Path, name: str, progress: Progress = quiet) -> Image:
        """An image from an OCI layout (a directory or a tar) or a docker-archive. A broken or hostile one is an error and leaves nothing."""
        _check_name(name)
        if not path.exists():
            raise NotFound(f"{str(path)!r} is not there")
        with contextlib.ExitStack() as held:
            source: Source = Directory(path) if path.is_dir() else held.enter_context(Archive.at(path, self.disk.tmp))
            config, blobs = read_image(source)
            return self._take(source, config, blobs, name, progress)

    def pull(
        self, reference: str, name: str | None = None, tls: bool = True, progress: Progress = quiet, seconds: float = SECONDS,
        login: tuple[str, str] | None = None,
    ) -> Image:  # fmt: skip
        """An image from a registry, by skopeo; without `tls` also from one that speaks plain HTTP."""
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._/:@-]{0,254}", reference):
            raise Invalid(f"{reference!r} can't be an image's address", hint="as in registry.example/name:tag")
        name = name or reference
        _check_name(name)
        if not shutil.which("skopeo"):
            raise Unavailable("skopeo is missing", hint="apt-get install skopeo")
        aside = Path(tempfile.mkdtemp(prefix="pull-", dir=self.disk.tmp))
        try:
            command = ["skopeo", "--command-timeout", f"{max(1, round(seconds))}s"]
            command += [] if Path("/etc/containers/policy.json").exists() else ["--insecure-policy"]
            command += ["copy", "--quiet"]
            if login is not None:  # in a file, since arguments can be seen by others
                coded = base64.b64encode(":".join(login).encode()).decode()
                (aside / "auth.json").touch(0o600)
                (aside / "auth.json").write_text(json.dumps({"auths": {reference.partition("/")[0]: {"auth": coded}}}))
                command += ["--src-authfile", str(aside / "auth.json")]
            command += [
                f"--src-tls-verify={'true' if tls else 'false'}",
                f"docker://{reference}",
                f"oci:{aside}/image:it",
            ]
            progress(f"fetching {reference}")
            done = subprocess.run(
                command,
                capture_output=True,
                text=True,
                stdin=subprocess.DEVNULL,
                check=False,
                env={**os.environ, "TMPDIR": str(aside)},
            )
            if done.returncode:
                said = done.stderr.strip()[-400:]
                if re.search(r"manifest unknown|name unknown|not found|404", said):
                    raise NotFound(f"the registry has no image {reference!r}: {said}")
                raise Unavailable(f"the image {reference!r} can't be fetched: {said}")
            return self.import_archive(aside / "image", name, progress)
        finally:
            shutil.rmtree(aside, ignore_errors=True)

    def _take(self, source: Source, config: dict[str, Any], blobs: list[Blob], name: str, progress: Progress) -> Image:
        diffs = diffs_of(config)
        if len(diffs) != len(blobs):
            raise Invalid(f"the image has {len(blobs)} layers and names {len(diffs)}")
        trees: list[
            tuple[str, Path | None]
        ] = []  # from the lowest: the key of what it is, and the tree unless it is kept already
        left = [self.caps.bytes]

        def budget(count: int) -> None:
            left[0] -= count
            if left[0] < 0:
                raise LimitExceeded(f"the image unpacks to more than {self.caps.bytes} bytes")

        known: list[str] = []  # layers below, topmost first, of those that are kept
        paths: list[Path] = []
        alone: set[str] = set()  # those that hide all below
        key = ""
        try:
            for number, (blob, diff) in enumerate(zip(blobs, diffs, strict=True), 1):
                key = hashlib.sha256(f"{key} {diff}".encode()).hexdigest()
                cached = self.store.find_ref("diff", key)
                if cached is not None and self._have(cached["layers"]):
                    trees.append((key, None))
                    paths = [self.layers.path(layer) for layer in cached["layers"]]
                    continue
                progress(f"layer {number} of {len(blobs)}")
                aside = self.disk.subvolume(self.disk.tmp / f"image-{os.urandom(8).hex()}")
                trees.append((key, aside))
                with source.open(blob.name) as file:
                    stream = Packed(file, f"layer {number}", self.caps, budget)
                    found = unpack(stream, f"layer {number}", Tree(aside, paths), self.caps)
                    check(stream, blob.digest, diff)
                if found.skipped:
                    progress(f"layer {number}: left out {len(found.skipped)} devices")
                paths = [aside] if found.opaque else [aside, *paths]
                alone |= {key} if found.opaque else set()
            # Only now, when all of it is whole, does anything of it become part of the store.
            with self.store.reading():  # so that nothing of it is collected before the image names it
                for key, tree in trees:
                    if tree is None:
                        known = list(self.store.ref("diff", key)["layers"])
                        continue
                    layer = self.layers.add(tree)
                    known = [layer] if key in alone else [layer, *known]
                    self.store.write_ref("diff", key, {"layers": known})
                if len(known) > MANY:
                    known = [self._join(known)]
                digest = hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest()
                kept = settings_of(config.get("config"))
                self.store.write_ref(
                    "image", name, {"layers": known, "config": kept, "digest": digest, "created": time.time()}
                )
        finally:
            for _, tree in trees:
                if tree is not None:
                    self.disk.destroy(tree)
        return self.get(name)

    def _have(self, layers: Sequence[str]) -> bool:
        return all((self.disk.layers / layer).is_dir() or self._whole(layer) for layer in layers)

    def _whole(self, layer: str) -> bool:
        try:
            return all(self.store.locate(chunk) for chunk in manifest.chunks(layer, self.store.get))
        except Corrupt:
            return False

    def _join(self, layers: Sequence[str]) -> str:
        with self.store.writing() as writer:
            merged: list[manifest.Entry] = []
            for name in reversed(layers):
                above = list(manifest.entries(manifest.read(name, writer.get), writer.get))
                merged = manifest.merge(merged, above) if merged else above
            joined = manifest.write(merged, writer)
            writer.commit()
        return joined.id

    # out

    def export(self, snapshot: str, file: IO[bytes], name: str = "latest", changes_only: bool = False) -> str:
        """Write a snapshot as an OCI image archive that other tools read; the digest of its manifest.

        A snapshot of a box on the host's own files holds the changes alone, since a host is no image: Invalid unless `changes_only`.
        """
        found = self.snapshots.get(snapshot)
        if HOST in found.layers and not changes_only:
            raise Invalid(
                f"the snapshot {snapshot!r} stands on the host's own files, which no image can hold",
                hint="export its changes only",
            )
        if found.size > self.caps.bytes:
            raise LimitExceeded(
                f"the snapshot {snapshot!r} holds {found.size} bytes, holes in files included; an image may have {self.caps.bytes}"
            )
        config = self._config_below(found.layers)
        aside = Path(tempfile.mkdtemp(prefix="export-", dir=self.disk.tmp))
        try:
            blobs = aside / "blobs/sha256"
            blobs.mkdir(parents=True)
            layers, diffs = [], []
            with self.store.reading():
                for layer in reversed([layer for layer in found.layers if HASH.fullmatch(layer)]):
                    digest, diff, size = self._write_layer(layer, blobs)
                    layers.append(
                        {"mediaType": "application/vnd.oci.image.layer.v1.tar+gzip", "digest": digest, "size": size}
                    )
                    diffs.append(diff)
            when = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(found.created))
            machine = MACHINES.get(os.uname().machine, os.uname().machine)
            described = {
                "created": when, "architecture": machine, "os": "linux", "config": config, "rootfs": {"type": "layers", "diff_ids": diffs},
                "history": [{"created": when, "comment": f"snapshot {found.id}"} for _ in diffs],
            }  # fmt: skip
            configured = write_blob(blobs, described, "application/vnd.oci.image.config.v1+json")
            whole = {
                "schemaVersion": 2,
                "mediaType": "application/vnd.oci.image.manifest.v1+json",
                "config": configured,
                "layers": layers,
            }
            top = write_blob(blobs, whole, "application/vnd.oci.image.manifest.v1+json")
            top["annotations"] = {"org.opencontainers.image.ref.name": name}
            top["platform"] = {"architecture": machine, "os": "linux"}
            (aside / "index.json").write_text(json.dumps({"schemaVersion": 2, "manifests": [top]}))
            (aside / "oci-layout").write_text('{"imageLayoutVersion":"1.0.0"}')
            with tarfile.open(fileobj=file, mode="w|") as archive:
                for path in (aside / "oci-layout", aside / "index.json", *sorted(blobs.iterdir())):
                    member = tarfile.TarInfo(str(path.relative_to(aside)))
                    member.size, member.mode = path.stat().st_size, 0o644
                    with open(path, "rb") as content:
                        archive.addfile(member, content)
            return str(top["digest"])
        finally:
            shutil.rmtree(aside, ignore_errors=True)

    def _config_below(self, chain: Sequence[str]) -> dict[str, Any]:
        """The configuration of the image a chain stands on, when there is one."""
        for name in self.store.refs("image"):
            image = self.store.find_ref("image", name)
            if image and image["layers"] and tuple(image["layers"]) == tuple(chain[-len(image["layers"]) :]):
                return dict(image.get("config") or {})
        return {}

    def _write_layer(self, layer: str, blobs: Path) -> tuple[str, str, int]:
        """One layer as a gzipped tar among the blobs; its digest, diff id and size."""
        aside = blobs / f"new-{os.urandom(8).hex()}"
        diff = hashlib.sha256()
        with open(aside, "wb") as file:
            # No name and no time in the header: the same layer is the same blob whenever it is exported.
            with gzip.GzipFile(filename="", mode="wb", compresslevel=1, fileobj=file, mtime=0) as packed:
                write_layer(
                    manifest.entries(manifest.read(layer, self.store.get), self.store.get),
                    self.store.get,
                    Tee(packed, diff),
                )
        with open(aside, "rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        size = aside.stat().st_size
        os.rename(aside, blobs / digest)
        return f"sha256:{digest}", f"sha256:{diff.hexdigest()}", size

    # building

    async def build(
        self,
        name: str,
        base: str,
        steps: Sequence[Mapping[str, Any]],
        run: RunInBox,
        progress: Progress = quiet,
        cache: bool = True,
    ) -> Image:
        """An image from a base and steps, each kept under the hash of what it stands on and what it does; a step that was done is not done again.

        Steps: {"apt": [names]}, {"pip": [names]}, {"npm": [names]}, {"files": {path: text or bytes}}, {"run": argv or shell text}, the last with
        "user", "env", "cwd" if wanted. Invalid names the step that is wrong or failed, and nothing of it is kept.
        """
        _check_name(name)
        checked = [read_step(number, step) for number, step in enumerate(steps, 1)]
        names = await asyncio.to_thread(self.layers.resolve, base, progress)
        config = {} if base == HOST else dict((self.store.find_ref("image", base) or {}).get("config") or {})
        chain = chain_of(names)
        hosted = names[-1] == HOST
        ground = names[-2] if hosted else ""  # a host's files have no hash; its mask changes with its /
        for number, step in enumerate(checked, 1):
            key = blake3(json.dumps([1, chain, ground, step.key], separators=(",", ":")).encode()).hexdigest()
            cache = cache and not step.force
            done = self.store.find_ref("step", key) if cache else None
            if done is not None and await asyncio.to_thread(self._have, done["layers"]):
                progress(f"step {number} of {len(checked)}: {step.shown} (kept from before)")
                chain = (*done["layers"], *chain)
                continue
            progress(f"step {number} of {len(checked)}: {step.shown}")
            layers = await asyncio.to_thread(self.layers.expand, chain)
            made = await self._do(number, step, layers, run)
            self.store.write_ref("step", key, {"layers": made})
            chain = (*made, *chain)
        own = [layer for layer in chain if HASH.fullmatch(layer)]
        if hosted:
            # The mask and / are not part of an image's own layers: its name stands for a base on this host.
            document: dict[str, Any] = {"layers": list(chain), "config": config, "created": time.time()}
        else:
            document = {"layers": own, "config": config, "created": time.time()}
        self.store.write_ref("image", name, document)
        return self.get(name)

    async def _do(self, number: int, step: Step, layers: tuple[str, ...], run: RunInBox) -> list[str]:
        upper = self.disk.create(f"build-{os.urandom(6).hex()}")
        try:
            if step.files:
                await asyncio.to_thread(self._write_files, upper / "u", layers, step.files)
            else:
                if step.archive is not None:
                    await asyncio.to_thread(self._unpack, upper / "u", step.archive)
                ran = await run(layers, step.argv, upper=upper, user=step.user, env=step.env, cwd=step.cwd)
                if ran.exit_code:
                    said = ran.output[-2000:].decode(errors="replace").strip()
                    raise Invalid(
                        f"step {number} ({step.shown}) failed with exit code {ran.exit_code}: {said}",
                        exit_code=ran.exit_code,
                    )
            return await asyncio.to_thread(self._keep, upper)
        finally:
            await asyncio.to_thread(self.disk.destroy, upper)

    def _keep(self, upper: Path) -> list[str]:
        sealed = self.disk.seal(upper)
        try:
            with self.store.writing() as writer:
                entries = scan(sealed, writer).entries
                if len(entries) == 1:
                    return []  # it changed nothing
                kept = manifest.write(entries, writer)
                writer.commit()
                self.layers.adopt(sealed, kept.id)
            return [kept.id]
        finally:
            self.disk.destroy(sealed)

    def _unpack(self, upper: Path, archive: Path) -> None:
        """An archive that anybody may have written, in a directory of its own."""
        aside = upper / ASIDE
        aside.mkdir(mode=0o755)
        left = [self.caps.bytes]

        def budget(count: int) -> None:
            left[0] -= count
            if left[0] < 0:
                raise LimitExceeded(f"the files unpack to more than {self.caps.bytes} bytes")

        with open(archive, "rb") as file:
            unpack(Packed(file, "the files", self.caps, budget), "the files", Tree(aside, []), self.caps)

    def _write_files(self, upper: Path, layers: tuple[str, ...], files: Mapping[str, bytes]) -> None:
        """Files of a step go through the same door as those of an archive."""
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w") as archive:
            for path, content in files.items():
                member = tarfile.TarInfo(path.lstrip("/"))
                member.size, member.mode = len(content), 0o755 if content.startswith(b"#!") else 0o644
                archive.addfile(member, io.BytesIO(content))
        buffer.seek(0)
        unpack(buffer, "files", Tree(upper, [self.layers.path(layer) for layer in layers]), self.caps)


def _check_name(name: str) -> None:
    if not _NAME.fullmatch(name) or name in (HOST, DEBIAN, FIT):
        raise Invalid(
            f"{name!r} can't name an image",
            hint="letters, digits and . _ / : @ -; host and debian are bases of their own",
        )
