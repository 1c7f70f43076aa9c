"""Traces, as a collector gets them: one request, one trace, and who called whom."""

import asyncio
import os
import re
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import grpc
import pytest

from quartet.v1 import code2wav_pb2, code2wav_pb2_grpc, stream_pb2, stream_pb2_grpc
from services.common.errors import QueueFull
from services.common.stream.hub import StreamHub, TensorStreamServicer
from services.common.telemetry import tracing
from tests.support.scripted.traced import traced_stages
from tests.support.stage.streaming import CHANNELS, subscribe
from tests.support.systems import gateway as gateway_stack
from tests.support.systems.collector import Collector, collecting
from tests.support.systems.stack import free_port

SPOKEN = {
    "model": "scripted",
    "messages": [{"role": "user", "content": "a secret"}],
    "modalities": ["text", "audio"],
    "audio": {"voice": "chelsie", "format": "wav"},
}
CALLER_TRACE, CALLER_SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
STAGES = ("thinker", "talker", "code2wav")
HTTP = "POST /v1/chat/completions"
OF_SPEECH = (HTTP, *STAGES, "thinker to talker", "talker to code2wav")


def shut_down() -> None:
    """Sends what is left and turns tracing off, as the interpreter's end does."""
    if tracing._provider is not None:
        tracing._provider.shutdown()
        tracing._provider = None


@pytest.fixture
async def collector(monkeypatch: pytest.MonkeyPatch):
    """One that this process sends to. Its stages are those with streams between them."""
    monkeypatch.setattr(gateway_stack, "scripted_stages", traced_stages)
    async with collecting() as started:
        monkeypatch.setenv("QUARTET_OTLP_ENDPOINT", started.url)
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "60")  # this process is the collector too, and may stall
        tracing.configure("test")
        yield started
        await asyncio.to_thread(shut_down)


async def collected(collector: Collector, *names: str) -> None:
    """Returns when spans of these names are there: some end after the answer."""
    async with asyncio.timeout(60):
        while missing := Counter(names) - Counter(received.span.name for received in collector.spans):
            assert tracing._provider, missing
            await asyncio.to_thread(tracing._provider.force_flush)
            await asyncio.sleep(0.005)


async def test_one_request_is_one_trace(collector):
    async with gateway_stack.running() as gateway:
        headers = {"x-request-id": "r-1", "traceparent": f"00-{CALLER_TRACE}-{CALLER_SPAN}-01"}
        response = await gateway.chat(SPOKEN, headers=headers)
        assert response.status_code == 200, response.text
        await collected(collector, *OF_SPEECH)
    await asyncio.to_thread(shut_down)
    spans = {received.span.name: received.span for received in collector.spans}
    assert set(spans) == set(OF_SPEECH)
    assert len(collector.spans) == len(spans)
    assert {span.trace_id.hex() for span in spans.values()} == {CALLER_TRACE}
    assert spans[HTTP].parent_span_id.hex() == CALLER_SPAN
    for stage in STAGES:
        assert spans[stage].parent_span_id == spans[HTTP].span_id
    assert spans["thinker to talker"].parent_span_id == spans["talker"].span_id
    assert spans["talker to code2wav"].parent_span_id == spans["code2wav"].span_id


async def test_spans_say_whose_they_are_and_where_time_went_but_not_what_was_said(collector):
    async with gateway_stack.running() as gateway:
        await gateway.chat(SPOKEN, headers={"x-request-id": "r-2"})
        await gateway.chat(SPOKEN | {"modalities": []})
        await collected(collector, *OF_SPEECH, HTTP)
    first = [received for received in collector.spans if received.attributes["quartet.request_id"] == "r-2"]
    assert len(first) == 6
    for received in first:
        assert "secret" not in str(received.span)
    for stage in STAGES:
        received = collector.named(stage)
        assert received.attributes["quartet.outcome"] == "OK"
        assert received.events == ["started", "prefilled", "first output"]
        times = [event.time_unix_nano for event in received.span.events]
        assert [received.span.start_time_unix_nano, *times, received.span.end_time_unix_nano] == sorted(
            [received.span.start_time_unix_nano, *times, received.span.end_time_unix_nano]
        )
    edge = collector.named("thinker to talker").attributes
    assert (edge["quartet.chunks"], edge["quartet.size_bytes"], edge["quartet.consumer"]) == (1, 48, "talker")


async def test_a_failure_marks_its_span(collector):
    async with gateway_stack.running() as gateway:
        gateway.scripts["talker"].error = QueueFull("the words of somebody")
        response = await gateway.chat(SPOKEN, headers={"x-request-id": "r-3"})
        assert response.status_code == 429
        await collected(collector, "talker", HTTP)
    talker = collector.named("talker")
    assert talker.span.status.code == talker.span.status.STATUS_CODE_ERROR
    assert "somebody" not in str(talker.span)
    http = collector.named(HTTP)
    assert http.attributes["quartet.status"] == 429
    assert http.attributes["quartet.failed_stage"] == "talker"
    assert http.span.status.code == http.span.status.STATUS_CODE_UNSET  # the client may come again


async def test_a_stream_that_fails_ends_its_span_with_the_grpc_status(collector):
    hub, server = StreamHub(), grpc.aio.server()
    stream_pb2_grpc.add_TensorStreamServiceServicer_to_server(TensorStreamServicer(hub, "thinker"), server)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    source = stream_pb2.StreamSource(address=address, stream_id="s")
    async with subscribe(source, "r-5", []) as messages:
        with hub.open("s", []) as stream:
            reading = asyncio.ensure_future(anext(messages))
            await stream.subscription(60)
            stream.fail(QueueFull("full"))
        with pytest.raises(QueueFull):
            await reading
    await hub.drain()  # the client hears of the failure before the span ends
    await server.stop(None)
    await asyncio.to_thread(shut_down)
    assert collector.named("thinker to other").attributes["quartet.outcome"] == "RESOURCE_EXHAUSTED"


async def test_a_stage_alone_sends_its_spans_before_it_ends(tiny_checkpoint: Path):
    port = free_port()
    command = [sys.executable, "-m", "services.code2wav", "--model", str(tiny_checkpoint), "--port", str(port)]
    async with collecting() as collector:
        environment = {**os.environ, "OTEL_EXPORTER_OTLP_ENDPOINT": collector.url, "OTEL_EXPORTER_OTLP_TIMEOUT": "60"}
        process = await asyncio.create_subprocess_exec(*command, env=environment, stderr=subprocess.PIPE)
        try:
            headers = (("traceparent", f"00-{CALLER_TRACE}-{CALLER_SPAN}-01"),)
            stub = code2wav_pb2_grpc.Code2WavServiceStub(CHANNELS.channel(f"127.0.0.1:{port}"))
            async with asyncio.timeout(150):
                while True:
                    call = stub.Decode(code2wav_pb2.DecodeRequest(request_id="r-4"), metadata=headers)
                    code = await call.code()
                    if code.name == "INVALID_ARGUMENT":  # it has no frames, and the stage is up
                        break
                    await asyncio.sleep(0.2)
            process.send_signal(signal.SIGTERM)
            _, log = await asyncio.wait_for(process.communicate(), 120)
        finally:
            if process.returncode is None:
                process.kill()
        assert process.returncode == 0, log
    (received,) = [r for r in collector.spans if r.attributes["quartet.outcome"] == "INVALID_ARGUMENT"]
    assert received.service == "quartet-code2wav"
    assert (received.span.trace_id.hex(), received.span.parent_span_id.hex()) == (CALLER_TRACE, CALLER_SPAN)
    assert f'"trace_id": "{CALLER_TRACE}"' in log.decode()


def run(code: str, **variables: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if "OTLP" not in name}
    command = [sys.executable, "-c", code]
    return subprocess.run(command, env=clean | variables, capture_output=True, text=True, timeout=120, check=False)


def test_off_it_loads_nothing():
    code = """
import sys
from services.common.telemetry import tracing
tracing.configure("talker")
assert tracing.begin("talker", "r", {"traceparent": "x"}) is None
assert tracing.metadata() is None
assert not [name for name in sys.modules if name.startswith("opentelemetry")]
"""
    done = run(code)
    assert done.returncode == 0, done.stderr


def test_an_address_that_is_none_is_refused():
    configure = "from services.common.telemetry import tracing; tracing.configure('x')"
    done = run(configure, QUARTET_OTLP_ENDPOINT="collector:4317")
    assert done.returncode == 1
    assert re.search(r"^QUARTET_OTLP_ENDPOINT: 'collector:4317' is no URL; write http://", done.stderr)


def test_without_the_extra_it_says_what_to_install():
    code = "import sys; sys.modules['opentelemetry.sdk'] = None\n"
    code += "from services.common.telemetry import tracing; tracing.configure('x')"
    done = run(code, QUARTET_OTLP_ENDPOINT="http://127.0.0.1:1")
    assert done.returncode == 1
    assert "install quartet[otel]" in done.stderr


def test_a_collector_that_is_gone_does_not_keep_a_process_alive():
    code = """
from opentelemetry.exporter.otlp.proto.grpc import trace_exporter
from services.common.telemetry import tracing

class Exporter(trace_exporter.OTLPSpanExporter):
    def __init__(self, **options):
        print(options["timeout"])
        super().__init__(**options)

trace_exporter.OTLPSpanExporter = Exporter
tracing.configure("x")
tracing.begin("x", "r", {}).end()
tracing._provider.shutdown()
"""
    done = run(code, QUARTET_OTLP_ENDPOINT=f"http://127.0.0.1:{free_port()}")
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) == tracing.EXPORT_TIMEOUT_S < 10
