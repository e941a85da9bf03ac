"""Frames: `u32 length, u32 id, u32 kind` and a payload, between client and host and between host and guest agent (native/wire.h)."""

import struct
from collections.abc import Iterator
from enum import IntEnum

HEAD = struct.Struct("<III")
PAYLOAD_MAX = 65536
REQUEST_MAX = 4 << 20  # of a request that comes in pieces
WINDOW_START = 1 << 20  # what either side may send of one id before it hears that more is welcome


class Kind(IntEnum):
    """The kinds of native/wire.h, then those of the host's socket."""

    EXEC = 1
    INPUT = 2
    INPUT_END = 3
    SIGNAL = 4
    RESIZE = 5
    WINDOW = 6
    CANCEL = 7
    MORE = 8
    READ = 10
    WRITE = 11
    LIST = 12
    STAT = 13
    MOVE = 14
    REMOVE = 15
    MKDIR = 16
    LINK = 17
    CHMOD = 18
    WATCH = 19
    CONNECT = 20
    PING = 21
    CLOCK = 22
    PROCESSES = 23
    WHO = 24
    READY = 64
    STARTED = 65
    STDOUT = 66
    STDERR = 67
    EXIT = 68
    DONE = 69
    ENTRY = 70
    EVENT = 71
    PONG = 72
    CREDIT = 73
    PROCESS = 74
    PERSON = 75
    # client → host: a request; host → client: its end, well or not, and what comes before it
    CALL = 100
    RESULT = 101
    ERROR = 102
    PROGRESS = 103


# Flags of EXEC and WRITE
PTY, STDIN, CORK = 1, 2, 4
APPEND, PARENTS = 1, 2

# Plain numbers for the hot paths: a comparison with an IntEnum member costs more than one with an int.
STDOUT, STDERR, EXIT, DONE, STARTED, CREDIT, READY = 66, 67, 68, 69, 65, 73, 64
CALL, RESULT, ERROR, PROGRESS, MORE = 100, 101, 102, 103, 8


def frame(kind: int, payload: bytes = b"", number: int = 0) -> bytes:
    """One frame as bytes."""
    return HEAD.pack(len(payload), number, kind) + payload


def text(value: str) -> bytes:
    """A string as the agent reads it."""
    return value.encode("utf-8", "surrogateescape") + b"\0"


def pieces(kind: int, payload: bytes) -> list[tuple[int, bytes]]:
    """A request as frames: one that is larger than a frame begins with MORE."""
    last = max(0, len(payload) - 1) // PAYLOAD_MAX * PAYLOAD_MAX
    more = [(MORE, payload[at : at + PAYLOAD_MAX]) for at in range(0, last, PAYLOAD_MAX)]
    return [*more, (kind, payload[last:])]


class Frames:
    """Takes bytes as they come and gives the frames that are whole."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[tuple[int, int, bytes]]:
        """(id, kind, payload) of each frame that `data` completes. ValueError when the peer does not speak this protocol."""
        buffer = self._buffer
        buffer += data
        at = 0
        while len(buffer) - at >= 12:
            length, number, kind = HEAD.unpack_from(buffer, at)
            if length > PAYLOAD_MAX:
                raise ValueError(f"a frame of {length} bytes")
            if len(buffer) - at < 12 + length:
                break
            yield number, kind, bytes(buffer[at + 12 : at + 12 + length])
            at += 12 + length
        if at:
            del buffer[:at]
