"""Hidden states and codec frames go from stage to stage; the gateway's process sees text and sound only."""

import asyncio
import re
import uuid
from collections.abc import Iterator
from contextlib import aclosing

import grpc
import httpx
import pytest
from google.protobuf.message import Message

from cli.plan import PIPELINE
from gateway.pipeline.config import load_pipeline
from gateway.pipeline.events import AudioDelta, Finished
from gateway.pipeline.pipeline import Pipeline
from gateway.pipeline.run import Job, run, speech
from quartet.v1 import talker_pb2, tensor_pb2, thinker_pb2
from services.common.rpc import channels

pytestmark = pytest.mark.e2e


class Recorder:
    """Keeps every message that comes in, by the method it answers."""

    def __init__(self) -> None:
        self.received: list[tuple[str, Message]] = []

    async def record(self, continuation, details, request):
        call = await continuation(details, request)
        method = details.method if isinstance(details.method, str) else details.method.decode()

        async def messages():
            async for message in call:
                self.received.append((method, message))
                yield message

        return messages()

    def interceptors(self) -> list[grpc.aio.ClientInterceptor]:
        """One for each kind of call: grpc.aio takes an object for one kind only."""
        record = self.record

        class UnaryStream(grpc.aio.UnaryStreamClientInterceptor):
            async def intercept_unary_stream(self, continuation, details, request):
                return await record(continuation, details, request)

        class StreamStream(grpc.aio.StreamStreamClientInterceptor):
            async def intercept_stream_stream(self, continuation, details, request_iterator):
                return await record(continuation, details, request_iterator)

        return [UnaryStream(), StreamStream()]


def tensors(message: Message) -> Iterator[tensor_pb2.Tensor]:
    """All tensors anywhere in `message`."""
    if isinstance(message, tensor_pb2.Tensor):
        yield message
    for field, value in message.ListFields():
        if field.message_type:
            repeated = not isinstance(value, Message)
            for each in value if repeated else [value]:
                if isinstance(each, Message):
                    yield from tensors(each)


async def test_the_gateways_pipeline_receives_no_hidden_state_and_no_codec_tensor(stack, monkeypatch):
    recorder = Recorder()
    opened = {}
    identity = stack.access.credentials.identity.channel_credentials()

    def recorded(address: str, server_name: str = "") -> grpc.aio.Channel:
        if address not in opened:
            opened[address] = grpc.aio.secure_channel(
                address, identity, options=channels.OPTIONS, interceptors=recorder.interceptors()
            )
        return opened[address]

    gateways = channels.Channels()
    monkeypatch.setattr(gateways, "channel", recorded)
    start = thinker_pb2.GenerateStart(
        messages=[thinker_pb2.ChatMessage(role="user", content=[thinker_pb2.ContentPart(text="Sing of the sea.")])],
        sampling=thinker_pb2.SamplingParameters(temperature=0, max_tokens=16),
    )
    speak = talker_pb2.SpeakStart(sampling=talker_pb2.TalkerSampling(seed=3, max_frames=16))
    job = Job(uuid.uuid4().hex, {"thinker": start, **speech(speak)})
    samples, finished = 0, None
    async with Pipeline(load_pipeline(PIPELINE, stack.addresses), 0.1, 60, channels=gateways) as stages:
        while not stages.ready:
            await asyncio.sleep(0.05)
        async with aclosing(run(stages, [job], 60)) as events:
            async for _, event in events:
                samples += len(event.pcm16) // 2 if isinstance(event, AudioDelta) else 0
                finished = event if isinstance(event, Finished) else finished
    for channel in opened.values():
        await channel.close()
    assert finished
    assert samples
    received = [message for _, message in recorder.received]
    assert {method.split("/")[1] for method, _ in recorder.received} == {
        "quartet.v1.ThinkerService",
        "quartet.v1.TalkerService",
        "quartet.v1.Code2WavService",
    }
    seen = [tensor for message in received for tensor in tensors(message)]
    assert sum(tensor.shape[0] for tensor in seen) == samples
    assert all(tensor.dtype == tensor_pb2.DATA_TYPE_INT16 and len(tensor.shape) == 1 for tensor in seen)
    # ... while between the stages tensors did flow.
    for stage, consumer, rows in (("thinker", "talker", "token_ids"), ("talker", "code2wav", "codes")):
        page = httpx.get(f"http://{stack.state['processes'][stage]['metrics_address']}/metrics", timeout=60).text
        labels = f'consumer="{consumer}",rows="{rows}",stage="{stage}",transport="inline"'
        sent = re.search(rf"^quartet_stream_bytes_total{{{labels}}} (\S+)", page, re.MULTILINE)
        assert sent
        assert float(sent[1]) > 0


def test_the_gateways_process_has_no_torch(stack):
    with open(f"/proc/{stack.pid('gateway')}/maps") as maps:
        loaded = maps.read()
    assert "grpc" in loaded
    assert "torch" not in loaded
