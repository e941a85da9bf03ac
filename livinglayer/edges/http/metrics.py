"""Metrics: what the server has done and holds, as Prometheus reads it."""

from __future__ import annotations

import resource
import threading
import time
from collections import Counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .serving import Serving

BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)


class Metrics:
    """Counts of requests by part and status, and how long they took until their answer began."""

    def __init__(self) -> None:
        self.requests: Counter[tuple[str, int]] = Counter()
        self.buckets: Counter[tuple[str, float]] = Counter()
        self.seconds: Counter[str] = Counter()
        self.open: Counter[str] = Counter()

    def answered(self, part: str, status: int, seconds: float) -> None:
        """One request was answered."""
        self.requests[part, status] += 1
        self.seconds[part] += seconds  # type: ignore[assignment]
        for bucket in BUCKETS:
            if seconds <= bucket:
                self.buckets[part, bucket] += 1
                break

    def text(self, serving: Serving, tx: int) -> str:
        """All of it, in Prometheus' text format."""
        lines = ["# HELP layer_requests_total Requests answered.", "# TYPE layer_requests_total counter"]
        for (part, status), count in sorted(self.requests.items()):
            lines.append(f'layer_requests_total{{part="{part}",status="{status}"}} {count}')
        lines += [
            "# HELP layer_request_seconds Time until an answer began.",
            "# TYPE layer_request_seconds histogram",
        ]
        for part in sorted({part for part, _ in self.requests}):
            total = 0
            for bucket in BUCKETS:
                total += self.buckets[part, bucket]
                lines.append(f'layer_request_seconds_bucket{{part="{part}",le="{bucket}"}} {total}')
            count = sum(n for (of, _), n in self.requests.items() if of == part)
            lines.append(f'layer_request_seconds_bucket{{part="{part}",le="+Inf"}} {count}')
            lines.append(f'layer_request_seconds_sum{{part="{part}"}} {self.seconds[part]:.6f}')
            lines.append(f'layer_request_seconds_count{{part="{part}"}} {count}')
        usage = resource.getrusage(resource.RUSAGE_SELF)
        for name, kind, text, value in (
            ("layer_requests_open", "gauge", "Requests that are being answered.", sum(self.open.values())),
            ("layer_tx", "counter", "The last tx of the layer.", tx),
            ("layer_uptime_seconds", "gauge", "Since the server began.", round(time.time() - serving.began, 3)),
            ("layer_waiting_for_threads", "gauge", "Calls that wait for a thread.", serving.pool._work_queue.qsize()),
            ("process_cpu_seconds_total", "counter", "CPU time used.", round(usage.ru_utime + usage.ru_stime, 3)),
            ("process_resident_memory_bytes", "gauge", "Memory in use.", resident()),
            ("process_threads", "gauge", "Threads.", threading.active_count()),
        ):
            lines += [f"# HELP {name} {text}", f"# TYPE {name} {kind}", f"{name} {value}"]
        return "\n".join(lines) + "\n"


def resident() -> int:
    """Bytes of memory this process holds."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()
