"""An OpenTelemetry collector for tests: a real OTLP server that keeps what it is sent."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.trace.v1 import trace_pb2


@dataclass
class Received:
    """A span and the service.name of the process it came from."""

    service: str
    span: trace_pb2.Span

    @property
    def attributes(self) -> dict:
        return {
            entry.key: getattr(entry.value, entry.value.WhichOneof("value") or "") for entry in self.span.attributes
        }

    @property
    def events(self) -> list[str]:
        return [event.name for event in self.span.events]


@dataclass
class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """Keeps spans in the order they came."""

    url: str = ""
    spans: list[Received] = field(default_factory=list)

    async def Export(self, request, context):
        for group in request.resource_spans:
            names = {entry.key: entry.value.string_value for entry in group.resource.attributes}
            for scope in group.scope_spans:
                self.spans += [Received(names["service.name"], span) for span in scope.spans]
        return trace_service_pb2.ExportTraceServiceResponse()

    def named(self, name: str) -> Received:
        (found,) = [received for received in self.spans if received.span.name == name]
        return found


@asynccontextmanager
async def collecting() -> AsyncIterator[Collector]:
    """A collector on a free port."""
    server, collector = grpc.aio.server(), Collector()
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(collector, server)
    collector.url = f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    try:
        yield collector
    finally:
        await server.stop(grace=None)
