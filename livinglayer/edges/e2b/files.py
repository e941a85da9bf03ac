"""Files: the files of a box, as E2B's filesystem.Filesystem and /files have them.

As E2B does it, all of them can be reached (a caller may be the box's root anyway), and what is made belongs to its user.
"""

from __future__ import annotations

import asyncio
import errno
import json
import mimetypes
import posixpath
import re
import zlib
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from email.utils import formatdate, parsedate_to_datetime
from typing import Any
from urllib.parse import quote

from python_multipart.exceptions import MultipartParseError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.types import Receive, Send

from ...errors import Conflict, LayerError, LimitExceeded, NotFound, Unavailable
from ...sandbox.sandbox import AsyncWriting, Entry
from .asking import Asked, home, is_gone, resolve
from .frames import STREAM, Failure, Left, answer, failure, flag, frame, number, over, text
from .tending import Tending

ROOT = "root"
PREFIX = "user.e2b."
METADATA = 4096  # bytes of a file's metadata, names and values
TYPES = {"file": "FILE_TYPE_FILE", "directory": "FILE_TYPE_DIRECTORY", "link": "FILE_TYPE_SYMLINK"}
PIECE = 65536
KEEPALIVE = b'{"keepalive":{}}'
# What inotify says, as E2B tells it; that a file was closed after writing is no event of its own.
EVENTS = (
    (0x100 | 0x80, "EVENT_TYPE_CREATE"),
    (0x40 | 0x800, "EVENT_TYPE_RENAME"),
    (0x4, "EVENT_TYPE_CHMOD"),
    (0x2, "EVENT_TYPE_WRITE"),
    (0x200 | 0x400, "EVENT_TYPE_REMOVE"),
)
CARRY = {"EVENT_TYPE_CREATE", "EVENT_TYPE_CHMOD", "EVENT_TYPE_WRITE"}  # the others are of what is not there any more


# ---- entries ----


def clean(value: str) -> str:
    """A name as JSON can say it: what is not UTF-8 is replaced."""
    return value if value.isascii() else value.encode("utf-8", "replace").decode()


def told(found: Entry, path: str) -> dict[str, Any]:
    """An entry as E2B tells it."""
    link = found.type == "link"
    kind, mode = found.type, found.mode
    if link and found.leads_mode:
        kind = {0o100000: "file", 0o040000: "directory"}.get(found.leads_mode & 0o170000, "other")
        mode = found.leads_mode
    moment = datetime.fromtimestamp(found.mtime, UTC)
    entry: dict[str, Any] = {
        "name": clean(posixpath.basename(path) or "/"),
        "path": clean(path),
        "size": str(found.size),
        "mode": mode & 0o777,
        "permissions": permissions(found),
        "owner": clean(found.owner),
        "group": clean(found.group),
        "modifiedTime": moment.strftime("%Y-%m-%dT%H:%M:%S.%fZ"),
    }
    if kind in TYPES:
        entry["type"] = TYPES[kind]
    if link:
        entry |= {"isSymlink": True, "symlinkTarget": clean(found.leads or path)}
    if marks := metadata(found):
        entry["metadata"] = marks
    return entry


def permissions(found: Entry) -> str:
    """As Go writes a mode."""
    kind = {"directory": "d", "link": "L", "other": "?"}.get(found.type, "")
    special = "".join(letter for bit, letter in ((0o4000, "u"), (0o2000, "g"), (0o1000, "t")) if found.mode & bit)
    bits = "".join(letter if found.mode >> 8 - at & 1 else "-" for at, letter in enumerate("rwxrwxrwx"))
    return (kind + special or "-") + bits


def metadata(found: Entry) -> dict[str, str]:
    """What was said of a file when it was uploaded, or since."""
    return {
        name[len(PREFIX) :]: value
        for name, value in found.attributes.items()
        if name.startswith(PREFIX) and clean(name + value) == name + value
    }


def wrong(error: LayerError, path: str, what: str = "file not found") -> LayerError | Failure:
    """Why a path can't be used."""
    number = error.details.get("errno")
    if number in (errno.ENOENT, errno.ENOTDIR) and error.details.get("of") == "path":
        return Failure("not_found", f"{what}: {path}: no such file or directory")
    if number == errno.ELOOP:
        return Failure("failed_precondition", f"cyclic symlink at {path!r}")
    return error


async def place(asked: Asked, path: str) -> str:
    """Where a path leads, for a user that there is."""
    return resolve(path, await home(asked.serving, asked.box, asked.user))


# ---- procedures ----


async def stat(asked: Asked, message: dict[str, Any]) -> dict[str, Any]:
    """What is at a path; a link is not followed."""
    return await entry_at(asked, await place(asked, text(message, "path", default="")))


async def entry_at(asked: Asked, path: str) -> dict[str, Any]:
    try:
        return {"entry": told(await asked.box.box.files.stat(path, user=ROOT), path)}
    except LayerError as error:
        raise wrong(error, path) from None


async def list_dir(asked: Asked, message: dict[str, Any]) -> dict[str, Any]:
    """What is below a directory, as deep as wanted."""
    path = await place(asked, text(message, "path", default=""))
    depth = min(100, number(message, "depth") or 1)
    try:
        found = await asked.box.box.files.list(path, depth=depth, user=ROOT)
    except LayerError as error:
        if error.details.get("errno") == errno.ENOTDIR:
            await entry_at(asked, path)  # a name below a file is not there at all
            raise Failure("invalid_argument", f"path is not a directory: {path}") from None
        raise wrong(error, path, "path not found") from None
    found.sort(key=lambda entry: entry.path.split("/"))
    return {"entries": [told(entry, entry.path) for entry in found]}


async def make_dir(asked: Asked, message: dict[str, Any]) -> dict[str, Any]:
    """Make a directory, and those above it."""
    path = await place(asked, text(message, "path", default=""))
    try:
        if path == "/":
            raise Conflict("it is there", of="path")
        await asked.box.box.files.mkdir(path, user=ROOT, owner=asked.user)
    except Conflict as error:
        if is_gone(error):
            raise
        there = (await entry_at(asked, path))["entry"]
        if there.get("type") == "FILE_TYPE_DIRECTORY":
            raise Failure("already_exists", f"directory already exists: {path}") from None
        raise Failure("invalid_argument", f"path already exists but it is not a directory: {path}") from None
    except LayerError as error:
        if error.details.get("errno") == errno.ENOTDIR:
            raise Failure("invalid_argument", f"something above is not a directory: {path}") from None
        raise wrong(error, path) from None
    return await entry_at(asked, path)


async def move(asked: Asked, message: dict[str, Any]) -> dict[str, Any]:
    """Rename; what was there is replaced."""
    source = await place(asked, text(message, "source", default=""))
    target = await place(asked, text(message, "destination", default=""))
    try:
        await asked.box.box.files.move(source, target, user=ROOT, owner=asked.user)
    except LayerError as error:
        raise wrong(error, source, "source file not found") from None
    return await entry_at(asked, target)


async def remove(asked: Asked, message: dict[str, Any]) -> dict[str, Any]:
    """Remove what is at a path, with all in it; that there is nothing is fine."""
    path = await place(asked, text(message, "path", default=""))
    if path == "/":
        raise Failure("invalid_argument", "the root of the box can't be removed")
    try:
        await asked.box.box.files.remove(path, user=ROOT)
    except LayerError as error:
        if error.details.get("errno") not in (errno.ENOENT, errno.ENOTDIR):
            raise
    return {}


# ---- watches ----


async def watched(asked: Asked, message: dict[str, Any]) -> tuple[str, bool, bool]:
    """A directory that can be watched, whether with all below it, and whether with entries."""
    path = await place(asked, text(message, "path", default=""))
    recursive, entries = flag(message, "recursive"), flag(message, "includeEntry", "include_entry")
    flag(message, "allowNetworkMounts", "allow_network_mounts")  # a box has none
    try:
        found = await asked.box.box.files.stat(path, user=ROOT)
    except LayerError as error:
        raise wrong(error, path, f"path {path} not found") from None
    if found.type != "directory" and (found.leads_mode or 0) & 0o170000 != 0o040000:
        raise Failure("invalid_argument", f"path {path} not a directory")
    return path, recursive, entries


async def events(
    asked: Asked, root: str, entries: bool, came: list[tuple[int, str]], seen: dict[str, Any]
) -> list[dict[str, Any]]:
    """What happened, as E2B tells it."""
    found = []
    for mask, name in came:
        for bits, kind in EVENTS:
            if not mask & bits:
                continue
            event: dict[str, Any] = {"name": clean(name or "."), "type": kind}
            if entries and kind in CARRY:
                if name not in seen:
                    try:
                        path = posixpath.join(root, name)
                        seen[name] = told(await asked.box.box.files.stat(path, user=ROOT), path)
                    except LayerError as error:
                        if is_gone(error):
                            raise
                        seen[name] = None  # gone meanwhile
                if seen[name]:
                    event["entry"] = seen[name]
            found.append(event)
    return found


async def create_watcher(asked: Asked, message: dict[str, Any]) -> dict[str, Any]:
    """Begin to gather what happens below a directory, with the host: any server may be asked for it."""
    path, recursive, entries = await watched(asked, message)
    try:
        return {
            "watcherId": await asked.box.box.files.gather(
                path, recursive=recursive, user=ROOT, notes={"entries": entries}
            )
        }
    except LayerError as error:
        raise wrong(error, path, f"path {path} not found") from None


async def get_watcher_events(asked: Asked, message: dict[str, Any]) -> dict[str, Any]:
    """What happened since this was asked last."""
    found = await asked.box.box.files.gathered(text(message, "watcherId", "watcher_id"))
    came = [(mask, name) for mask, name in found["events"]]
    return {"events": await events(asked, found["path"], found["notes"].get("entries"), came, {})}


async def remove_watcher(asked: Asked, message: dict[str, Any]) -> dict[str, Any]:
    """Gather no more."""
    await asked.box.box.files.gather_no_more(text(message, "watcherId", "watcher_id"))
    return {}


async def watch_dir(asked: Asked, receive: Receive, send: Send) -> None:
    """What happens below a directory, as it happens, until the client leaves."""
    message = await asked.first()
    path, recursive, entries = await watched(asked, message)
    watching = asked.box.box.files.watch(path, recursive=recursive, user=ROOT)
    step: asyncio.Task[Any] | None = None

    async def leave() -> None:
        if step is not None:
            step.cancel()

    tending = Tending(asked.serving, asked.box, receive, send, leave, KEEPALIVE, asked.interval, asked.seconds)
    begun = False
    try:
        while not tending.left:
            step = asked.loop.create_task(anext(watching, None))
            await asyncio.wait({step})
            if step.cancelled() or tending.left:
                break
            event = step.result()
            if event is None:
                break
            if event.type == "ready":
                body = frame(b'{"start":{}}')
            else:
                came = [(event.mask, posixpath.relpath(event.path, path) if event.path.rstrip("/") != path else "")]
                told_of = await events(asked, path, entries, came, {})
                body = b"".join(frame(json.dumps({"filesystem": one}).encode()) for one in told_of)
            if not begun:
                begun = True
                await send({"type": "http.response.start", "status": 200, "headers": STREAM})
            if body:
                tending.sent = asked.loop.time()
                await send({"type": "http.response.body", "body": body, "more_body": True})
        why = tending.why
        if tending.left and why is None:
            return
    except LayerError as error:
        if is_gone(error):
            await asked.lost()
        why = Failure("unavailable", "the box has ended") if is_gone(error) else failure(error)
    finally:
        await tending.end()
        if step is not None and not step.done():
            step.cancel()
            await asyncio.wait({step})
        await watching.aclose()  # type: ignore[attr-defined]
    if not begun:
        await send({"type": "http.response.start", "status": 200, "headers": STREAM})
    await send({"type": "http.response.body", "body": over(why)})


UNARY = {
    "Stat": stat, "ListDir": list_dir, "MakeDir": make_dir, "Move": move, "Remove": remove, "CreateWatcher": create_watcher,
    "GetWatcherEvents": get_watcher_events, "RemoveWatcher": remove_watcher,
}  # fmt: skip
STREAMS = {"WatchDir": watch_dir}


# ---- downloads ----


class Refused(Exception):
    """What /files answers when it can't."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status, self.message = status, message


def refusal(error: LayerError, path: str) -> Refused:
    """Why a file can't be read or written."""
    number = error.details.get("errno")
    if number in (errno.ENOSPC, errno.EDQUOT):
        return Refused(507, f"not enough disk space available for {path!r}")
    if number == errno.EISDIR:
        return Refused(400, f"path is a directory: {path}")
    if isinstance(error, NotFound):
        return Refused(404, f"path '{path}' does not exist")
    status = 429 if isinstance(error, LimitExceeded) else error.status if error.status < 500 else 503
    return Refused(status, error.message)


async def download(asked: Asked, path: str, send: Send) -> None:
    """A file, or a part of it; as it is, or packed for those who want just that."""
    path = await place(asked, path)
    try:
        found = await asked.box.box.files.stat(path, user=ROOT)
        if found.type == "link" and found.leads:
            found = await asked.box.box.files.stat(found.leads, user=ROOT)
    except LayerError as error:
        if is_gone(error):
            raise
        raise refusal(error, path) from None
    if found.type == "directory":
        raise Refused(400, f"path '{path}' is a directory")
    if found.type != "file":
        raise Refused(
            404 if found.type == "link" else 400,
            f"path '{path}' does not exist" if found.type == "link" else f"path '{path}' is not a file",
        )
    kind = mimetypes.guess_type(path)[0] or "application/octet-stream"
    name = posixpath.basename(path)
    headers = [
        (b"content-type", (kind + "; charset=utf-8" if kind.startswith("text/") else kind).encode()),
        (b"content-disposition", f"inline; filename*=utf-8''{quote(name, errors='replace')}".encode()),
        (b"vary", b"Accept-Encoding"),
        (b"last-modified", formatdate(found.mtime, usegmt=True).encode()),
    ]
    since = asked.headers.get(b"if-modified-since", b"").decode("latin-1")
    if since and not asked.headers.get(b"range") and not_newer(found.mtime, since):
        return await answer(send, 304, b"", headers[2:])
    accepted = asked.headers.get(b"accept-encoding", b"").decode("latin-1").lower().replace(" ", "")
    status, begin, length = 200, 0, found.size
    if wanted := asked.headers.get(b"range"):
        status, begin, length = ranged(wanted.decode("latin-1"), found.size)
        if status == 416:
            return await answer(
                send,
                416,
                b'{"code":416,"message":"the range is not in the file"}',
                [(b"content-type", b"application/json"), (b"content-range", b"bytes */%d" % found.size)],
            )
        if status == 206:
            headers.append((b"content-range", b"bytes %d-%d/%d" % (begin, begin + length - 1, found.size)))
    packer = None
    if status == 200 and not wanted and accepted in ("gzip", "gzip;q=1", "gzip;q=1.0"):
        packer = zlib.compressobj(1, zlib.DEFLATED, 31)
        headers.append((b"content-encoding", b"gzip"))
    else:
        headers += [(b"accept-ranges", b"bytes"), (b"content-length", b"%d" % length)]
    begun, left = False, length
    pieces = asked.box.box.files.pieces(path, user=ROOT, part=(begin, length))
    try:
        async for piece in pieces:
            if not begun:
                await send({"type": "http.response.start", "status": status, "headers": headers})
            begun, left = True, left - len(piece)
            body = packer.compress(piece) if packer else piece
            if body:
                await send({"type": "http.response.body", "body": body, "more_body": True})
    except LayerError as error:
        if begun:
            raise Unavailable(f"{path!r} could not be read to its end") from None
        if is_gone(error):
            raise
        raise refusal(error, path) from None
    finally:
        await pieces.aclose()  # type: ignore[attr-defined]
    if left and not packer:
        raise Unavailable(f"{path!r} became shorter while it was read")
    if not begun:
        await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": packer.flush() if packer else b""})


def not_newer(mtime: float, since: str) -> bool:
    try:
        return int(mtime) <= parsedate_to_datetime(since).timestamp()
    except (ValueError, TypeError, OverflowError):
        return False


def ranged(wanted: str, size: int) -> tuple[int, int, int]:
    """Status, offset and length of what a Range header wants; several ranges at once are given as the whole."""
    found = re.fullmatch(r"bytes=(\d{0,18})-(\d{0,18})", wanted.replace(" ", ""))
    if not found or found[0] == "bytes=-":
        return 200, 0, size
    begin, end = found[1], found[2]
    if not begin:
        length = min(size, int(end))
        return (206, size - length, length) if length else (416, 0, 0)
    first, last = int(begin), min(size - 1, int(end) if end else size - 1)
    return (206, first, last - first + 1) if first < size and first <= last else (416, 0, 0)


# ---- uploads ----


def said(headers: list[tuple[bytes, bytes]]) -> dict[str, str]:
    """The metadata that headers give a file."""
    found: dict[str, str] = {}
    for name, value in headers:
        if name.startswith(b"x-metadata-") and len(name) > 11:
            found.setdefault(name[11:].decode("latin-1").lower(), value.decode("latin-1"))
    for key, given in found.items():
        if len(key) > 255 - len(PREFIX) or not all(" " <= letter <= "~" for letter in key + given):
            raise Refused(400, f"invalid metadata: {key!r:.80} or its value is too long, or not printable ASCII")
    if (total := sum(len(PREFIX) + len(key) + len(given) for key, given in found.items())) > METADATA:
        raise Refused(400, f"invalid metadata: total metadata size {total} exceeds {METADATA} bytes")
    return found


async def body(asked: Asked) -> AsyncIterator[bytes]:
    """What is uploaded, unpacked, in pieces of a bounded size."""
    packing = asked.headers.get(b"content-encoding", b"identity").decode("latin-1").strip().lower() or "identity"
    if packing not in ("gzip", "identity"):
        raise Refused(400, f"unsupported Content-Encoding: {packing}, supported: [gzip]")
    unpacker = zlib.decompressobj(31) if packing == "gzip" else None
    try:
        while piece := await asked.incoming.piece():
            if unpacker is None:
                yield piece
                continue
            while piece:
                if unpacker.eof:  # another member
                    unpacker = zlib.decompressobj(31)
                if unpacked := unpacker.decompress(piece, PIECE):
                    yield unpacked
                piece = unpacker.unconsumed_tail or unpacker.unused_data
        if unpacker is not None and not unpacker.eof:
            raise Refused(400, "error decompressing request body: unexpected EOF")
    except zlib.error as error:
        raise Refused(400, f"error decompressing request body: {error}") from None
    except Failure as slow:
        raise Refused(slow.status, slow.message) from None


class Upload:
    """The files of one upload, written as they come."""

    def __init__(self, asked: Asked, home: str, marks: dict[str, str]) -> None:
        self._asked, self._home, self._marks = asked, home, marks
        self._writing: AsyncWriting | None = None
        self._path = ""
        self.done: list[dict[str, Any]] = []

    async def begin(self, path: str) -> None:
        """The next file."""
        self._path = resolved(path, self._home)
        if any(entry["path"] == self._path for entry in self.done):
            raise Refused(
                400,
                f"you cannot upload multiple files to the same path '{self._path}' in one upload request, only the first specified file was uploaded",
            )
        if self._path == "/":
            raise Refused(400, "path is a directory: /")
        marks = {PREFIX + key: value for key, value in self._marks.items()}
        self._writing = await self._asked.box.box.files.open(
            self._path, user=ROOT, owner=self._asked.user, attributes=marks, prefix=PREFIX
        )

    async def send(self, data: bytes) -> None:
        """Some of it."""
        assert self._writing is not None
        await self._writing.send(data)

    async def end(self) -> None:
        """All of it is there."""
        assert self._writing is not None
        writing, self._writing, marks = self._writing, None, self._marks
        try:
            await writing.end()
        except LayerError as error:
            if is_gone(error):
                raise
            if error.details.get("errno") != errno.EOPNOTSUPP:  # a place that knows no attributes, such as /proc
                raise refusal(error, self._path) from None
            marks = {}
        entry: dict[str, Any] = {"path": self._path, "name": posixpath.basename(self._path), "type": "file"}
        self.done.append(entry | ({"metadata": marks} if marks else {}))

    async def leave(self) -> None:
        """What is half written stays so."""
        if self._writing is not None:
            await self._writing.cancel()


def resolved(path: str, home: str) -> str:
    try:
        return resolve(path, home)
    except Failure as wrong:
        raise Refused(400, f"error resolving path: {wrong.message}") from None


async def upload(asked: Asked, path: str | None, headers: list[tuple[bytes, bytes]], send: Send) -> None:
    """Files of a form, or one as it is; each replaces what was there, its metadata too."""
    marks = said(headers)
    try:
        where = await home(asked.serving, asked.box, asked.user)
    except Failure as unknown:
        raise Refused(401, f"error looking up user '{asked.user}': {unknown.message}") from None
    kind, options = parse_options_header(asked.headers.get(b"content-type", b""))
    files = Upload(asked, where, marks)
    try:
        if kind == b"application/octet-stream":
            if path is None:
                raise Refused(400, "path query parameter is required for raw body upload")
            await files.begin(path)
            async for piece in body(asked):
                await files.send(piece)
            await files.end()
        elif kind.startswith(b"multipart/") and options.get(b"boundary"):
            await form(asked, path, options[b"boundary"], files)
        else:
            raise Refused(400, "unsupported content type, expected multipart/form-data or application/octet-stream")
    except (LayerError, Left) as error:
        await files.leave()
        if isinstance(error, Left) or is_gone(error):
            raise
        raise refusal(error, path or "") from None
    except BaseException:
        await files.leave()
        raise
    await answer(send, 200, json.dumps(files.done).encode())


async def form(asked: Asked, path: str | None, boundary: bytes, files: Upload) -> None:
    """The parts of a form that are named `file`."""
    steps: list[tuple[str, bytes]] = []

    def note(name: str) -> Any:
        return lambda data=b"", start=0, end=0: steps.append((name, data[start:end]))

    names = (
        "part_begin",
        "header_field",
        "header_value",
        "header_end",
        "headers_finished",
        "part_data",
        "part_end",
        "end",
    )
    try:
        parser = MultipartParser(boundary, {f"on_{name}": note(name) for name in names})  # type: ignore[arg-type]
    except (MultipartParseError, ValueError) as error:
        raise Refused(400, f"error parsing multipart form: {error}") from None
    field, value, disposition, wanted, over, size = b"", b"", b"", False, False, 0
    async for piece in body(asked):
        try:
            parser.write(piece)
        except MultipartParseError as error:
            raise Refused(400, f"error reading form: {error}") from None
        for step, data in steps:
            if step == "part_data":
                if wanted:
                    await files.send(data)
                continue
            size = 0 if step == "part_begin" else size + len(data)
            if size > PIECE:
                raise Refused(400, "error reading form: headers of a part are too long")
            if step == "part_begin":
                field, value, disposition = b"", b"", b""
            elif step == "header_field":
                field += data
            elif step == "header_value":
                value += data
            elif step == "header_end":
                if field.lower() == b"content-disposition":
                    disposition = value
                field, value = b"", b""
            elif step == "headers_finished":
                _, options = parse_options_header(disposition)
                wanted = options.get(b"name") == b"file"
                if wanted:
                    name = options.get(b"filename")
                    if path is None and name is None:
                        raise Refused(400, "filename not found in Content-Disposition header")
                    await files.begin(path if path is not None else (name or b"").decode("utf-8", "replace"))
            elif step == "part_end" and wanted:
                await files.end()
                wanted = False
            elif step == "end":
                over = True
        steps.clear()
    if not over:
        raise Refused(400, "error reading form: unexpected EOF")
