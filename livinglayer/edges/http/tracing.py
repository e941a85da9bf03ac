"""Tracing: a span for each request, when OpenTelemetry is installed and told where to send them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from typing import Any

from starlette.datastructures import Headers

Span = Callable[[str, Any, Headers], contextlib.AbstractContextManager[Any]]
SETTINGS = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_TRACES_EXPORTER")


def spans() -> Span:
    """What opens a span; without OpenTelemetry's settings nothing does."""
    if not any(os.environ.get(name) for name in SETTINGS):
        return lambda part, scope, headers: contextlib.nullcontext()
    try:
        from opentelemetry import propagate, trace
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor, ConsoleSpanExporter
    except ImportError:
        raise SystemExit(
            "layer: OpenTelemetry is asked for and not installed\nhint: pip install 'livinglayer[otel]'"
        ) from None
    exporter: Any
    if os.environ.get("OTEL_TRACES_EXPORTER") == "console":
        exporter = ConsoleSpanExporter()
    else:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

        exporter = OTLPSpanExporter()
    provider = TracerProvider(resource=Resource.create({"service.name": "livinglayer"}))
    provider.add_span_processor(BatchSpanProcessor(exporter))
    tracer = provider.get_tracer("livinglayer")

    def span(part: str, scope: Any, headers: Headers) -> contextlib.AbstractContextManager[Any]:
        attributes = {"http.request.method": scope.get("method", "WS"), "url.path": scope["path"], "layer.part": part}
        return tracer.start_as_current_span(
            part, propagate.extract(headers), kind=trace.SpanKind.SERVER, attributes=attributes
        )

    return span
