"""OpenTelemetry traces: a span for each request in each stage, sent by OTLP. Without a variable that says where to,
nothing of OpenTelemetry is imported, and `begin` and `metadata` return None.
"""

import os
import socket
import time
from collections.abc import Iterable, Mapping
from contextvars import ContextVar
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from opentelemetry import trace
    from opentelemetry.sdk.trace import TracerProvider

# The first that is set turns tracing on.
ENDPOINT_VARIABLES = ("QUARTET_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
EXPORT_TIMEOUT_S = 5  # for which a missing collector may hold up the end of a process

_provider: "TracerProvider | None" = None
_current: ContextVar["Span | None"] = ContextVar("span", default=None)


class Span:
    """A request in this process. Times are time.monotonic() seconds; attributes get the prefix "quartet."."""

    def __init__(self, span: "trace.Span") -> None:
        self._span = span
        self._to_unix_ns = time.time_ns() - time.monotonic_ns()

    @property
    def trace_id(self) -> str:
        """32 hexadecimal digits."""
        return f"{self._span.get_span_context().trace_id:032x}"

    def set(self, **attributes: Any) -> None:
        """Adds attributes that are not None. Never content of the user."""
        for name, value in attributes.items():
            if value is not None:
                self._span.set_attribute(f"quartet.{name}", value)

    def rename(self, name: str) -> None:
        self._span.update_name(name)

    def event(self, name: str, at: float | None) -> None:
        """Adds an event, unless `at` is None."""
        if at is not None:
            self._span.add_event(name, timestamp=int(at * 1e9) + self._to_unix_ns)

    def end(self, error: str = "") -> None:
        """`error`: e.g. a status; none of the user's words."""
        from opentelemetry.trace import Status, StatusCode

        if error:
            self._span.set_status(Status(StatusCode.ERROR, error))
        self._span.end()

    def headers(self) -> dict[str, str]:
        """traceparent, and tracestate if any: make others' spans its children."""
        from opentelemetry.trace import set_span_in_context
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        carrier: dict[str, str] = {}
        TraceContextTextMapPropagator().inject(carrier, set_span_in_context(self._span))
        return carrier


def configure(stage: str) -> None:
    """Turns tracing on for the process quartet-`stage`, if a variable says where spans go.

    Raises:
        SystemExit: the variable is no URL, or OpenTelemetry is not installed.
    """
    global _provider
    variable = next((name for name in ENDPOINT_VARIABLES if os.environ.get(name)), None)
    if variable is None:
        return
    endpoint = os.environ[variable]
    if not endpoint.startswith(("http://", "https://")):
        raise SystemExit(f"{variable}: '{endpoint}' is no URL; write http://HOST:4317, or https:// for TLS")
    try:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        exporter = _exporter(endpoint, variable)
    except ImportError as error:
        raise SystemExit(f"{variable} is set, but tracing is not installed: install quartet[otel] ({error})") from None
    resource = Resource.create(
        {
            "service.name": os.environ.get("OTEL_SERVICE_NAME", f"quartet-{stage}"),
            "service.version": version("quartet"),
            "service.instance.id": f"{socket.gethostname()}:{os.getpid()}",
        }
    )
    _provider = TracerProvider(resource=resource)
    _provider.add_span_processor(BatchSpanProcessor(exporter))


def _exporter(endpoint: str, variable: str) -> Any:
    timeout_s = int(os.environ.get("OTEL_EXPORTER_OTLP_TIMEOUT", EXPORT_TIMEOUT_S))
    if os.environ.get("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc") == "grpc":
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter

        return OTLPSpanExporter(endpoint=endpoint, timeout=timeout_s)
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as HttpExporter

    path = "" if variable == "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT" else "/v1/traces"
    return HttpExporter(endpoint=endpoint.rstrip("/") + path, timeout=timeout_s)


def begin(name: str, request_id: str, headers: Mapping[str, str]) -> Span | None:
    """A span of the request, child of what `headers` name; None while tracing is off. This task's later calls are its
    children: see `metadata`."""
    if _provider is None:
        return None
    from opentelemetry.trace import SpanKind
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    parent = TraceContextTextMapPropagator().extract(headers)
    span = Span(_provider.get_tracer("quartet").start_span(name, parent, SpanKind.SERVER))
    span.set(request_id=request_id)
    _current.set(span)
    return span


def metadata() -> tuple[tuple[str, str], ...] | None:
    """gRPC metadata that carries this task's span to the called stage; None without one."""
    span = _current.get()
    return None if span is None else tuple(span.headers().items())


def as_headers(received: Iterable[tuple[str, str | bytes]] | None) -> dict[str, str]:
    """gRPC metadata as the headers that `begin` takes."""
    return {key: value for key, value in received or () if isinstance(value, str)}
