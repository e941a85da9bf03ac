"""What the gateway allows itself and its boxes; every field is an option of `python -m livinglayer.sandbox.egress`."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    """Sizes in bytes, times in seconds."""

    pool: int = 8  # network namespaces kept ready
    connections: int = 256  # open at once from one box
    streams: int = 100  # requests at once on one HTTP/2 connection
    names: int = 8192  # host names one box may have looked up; the oldest are forgotten
    header_bytes: int = 65536  # of one request or response head
    swap_bytes: int = 1 << 20  # largest request body in which placeholders are swapped
    connect_seconds: float = 10.0  # name resolution and each attempt to connect
    wake_seconds: float = 60.0  # for another box to be woken and its port to answer
    head_seconds: float = 30.0  # for a client to send a request head once it began, or a TLS hello
    idle_seconds: float = 300.0  # without a byte from the side that is to speak, then the request fails
    tunnel_seconds: float = 3600.0  # without a byte either way on a WebSocket or raw connection
    pending_events: int = 64  # of one box not yet taken by the host; further requests of the box wait
