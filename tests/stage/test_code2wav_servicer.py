"""Code2WavService over a real gRPC server on loopback, inline and from another server's stream."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
import torch

from quartet.v1 import code2wav_pb2, code2wav_pb2_grpc, stream_pb2, stream_pb2_grpc
from services.code2wav.engine import DecodeEngine
from services.code2wav.family import Decoder, load_decoder
from services.code2wav.servicer import Code2WavServicer, FrameWindow
from services.code2wav.stream import DecodeEnd, Event, Samples
from services.common.errors import InvalidInput, QueueFull, RequestCancelled, Unavailable
from services.common.rpc import channels
from services.common.rpc.call import Admission
from services.common.rpc.status import from_rpc_error
from services.common.stream.hub import StreamHub, TensorStreamServicer
from services.common.stream.rows import Rows
from services.common.stream.tensors import to_message, to_torch
from tests.support.clock import until
from tests.support.stage.streaming import CHANNELS, CONSUMER

GUARD_S = 120.0
TOLERANCE = 1e-4
SAMPLE_RATE_HZ = 24000


@pytest.fixture(scope="module")
def decoder(tiny_checkpoint) -> Decoder:
    return load_decoder(str(tiny_checkpoint), device="cpu")


class Service:
    """A code2wav server with two slots and one place in the queue, and a talker's server beside it."""

    def __init__(self, engine: DecodeEngine, admission: Admission, address: str, hub: StreamHub, talker: str) -> None:
        self.engine, self.admission, self.address, self.hub, self.talker = engine, admission, address, hub, talker

    def call(self, **request) -> grpc.aio.UnaryStreamCall:
        request = code2wav_pb2.DecodeRequest(**{"request_id": "r", **request})
        return code2wav_pb2_grpc.Code2WavServiceStub(CHANNELS.channel(self.address)).Decode(request)

    def source(self, stream_id: str = "s") -> stream_pb2.StreamSource:
        return stream_pb2.StreamSource(address=self.talker, stream_id=stream_id)

    async def idle(self) -> None:
        await until(lambda: self.engine._states.free_slots == 2 and not self.admission.in_flight)


@pytest.fixture
async def service(decoder) -> AsyncIterator[Service]:
    engine, hub, admission = DecodeEngine(decoder, 2, 4), StreamHub(), Admission(2, 1)
    admission.open()
    servicer = Code2WavServicer(admission, CONSUMER)
    servicer.engine = engine
    server, talker = (grpc.aio.server(options=channels.SERVER_OPTIONS) for _ in range(2))
    code2wav_pb2_grpc.add_Code2WavServiceServicer_to_server(servicer, server)
    stream_pb2_grpc.add_TensorStreamServiceServicer_to_server(TensorStreamServicer(hub, "test"), talker)
    addresses = [f"127.0.0.1:{s.add_insecure_port('127.0.0.1:0')}" for s in (server, talker)]
    for s in (server, talker):
        await s.start()
    yield Service(engine, admission, addresses[0], hub, addresses[1])
    for s in (server, talker):
        await s.stop(None)
    await CHANNELS.close_all()
    engine.stop()


def random_codes(decoder: Decoder, frames: int, seed: int) -> torch.Tensor:
    shape = (frames, decoder.spec.num_code_groups)
    codes = torch.randint(decoder.spec.codebook_sizes[0], shape, generator=torch.Generator().manual_seed(seed))
    return codes.to(torch.int32)


def whole(decoder: Decoder, codes: torch.Tensor) -> torch.Tensor:
    states = decoder.new_states(1)
    return decoder.step(codes[None], states.batch([states.acquire() or 0]))[0]


async def collect(call: grpc.aio.UnaryStreamCall) -> tuple[torch.Tensor, code2wav_pb2.DecodeSummary]:
    """All samples, and the summary; checks that chunks follow on each other."""
    pieces, summary, received = [torch.zeros(0)], None, 0
    async with asyncio.timeout(GUARD_S):
        async for response in call:
            assert summary is None
            if response.HasField("summary"):
                summary = response.summary
                continue
            assert response.audio.first_sample == received
            pieces.append(to_torch(response.audio.samples))
            received += len(pieces[-1])
    assert summary is not None
    return torch.cat(pieces[1:] or pieces), summary


def rows(first: int, codes: torch.Tensor) -> Rows:
    return Rows("codes", first, codes)


async def error_of(call: grpc.aio.UnaryStreamCall) -> Exception:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await collect(call)
    return from_rpc_error(caught.value)


@pytest.mark.parametrize("dtype", [torch.int16, torch.int64])
async def test_inline(decoder, service, dtype):
    codes = random_codes(decoder, 50, 1)
    samples, summary = await collect(service.call(codes=to_message(codes.to(dtype))))
    expected = whole(decoder, codes)
    assert samples.dtype is torch.float32
    assert (samples - expected).abs().max() <= TOLERANCE
    assert (summary.frames, summary.samples, summary.sample_rate_hz) == (50, len(expected), SAMPLE_RATE_HZ)
    assert 0 < summary.timings.first_output_ms <= summary.timings.total_ms
    await service.idle()


@pytest.mark.parametrize("inline", [True, False])
async def test_a_prompt_is_decoded_and_not_heard(decoder, service, inline):
    """It is longer than what the service takes in at a time."""
    codes, prompt = random_codes(decoder, 50, 11), 40
    if inline:
        call = service.call(codes=to_message(codes), prompt_frames=prompt)
    else:
        call = service.call(source=service.source())
        with service.hub.open("s", ["codes"]) as stream:
            stream.start(prompt)
            stream.put([rows(0, codes[:prompt]), rows(prompt, codes[prompt:])])
            stream.finish(len(codes))
    samples, summary = await collect(call)
    expected = whole(decoder, codes)[prompt * decoder.spec.samples_per_frame - decoder.spec.trimmed_samples :]
    assert (summary.frames, summary.samples) == (10, len(expected))
    assert samples.shape == expected.shape
    assert (samples - expected).abs().max() <= TOLERANCE
    await service.idle()


async def test_pcm16(decoder, service):
    codes = random_codes(decoder, 5, 2)
    call = service.call(codes=to_message(codes), sample_format=code2wav_pb2.SAMPLE_FORMAT_PCM16)
    samples, _ = await collect(call)
    assert samples.dtype is torch.int16
    assert (samples - (whole(decoder, codes) * 32768).round().clamp(-32768, 32767)).abs().max() <= 1


async def test_samples_come_while_the_talker_still_speaks(decoder, service):
    codes = random_codes(decoder, 9, 3)
    call = service.call(source=service.source())
    with service.hub.open("s", ["codes"]) as stream:
        stream.start(0)
        stream.put([rows(0, codes[:1])])
        async with asyncio.timeout(GUARD_S):
            first = await call.read()
        assert first.audio.frames == 1
        stream.put([rows(1, codes[1:3])])
        stream.put([rows(3, codes[3:])])
        stream.finish(9)
    pieces = [to_torch(first.audio.samples)]
    async with asyncio.timeout(GUARD_S):
        while not (response := await call.read()).HasField("summary"):
            pieces.append(to_torch(response.audio.samples))
    assert (torch.cat(pieces) - whole(decoder, codes)).abs().max() <= TOLERANCE
    # for the end of the stream too, which is no output: it may come long after the last frame
    assert 0 < response.summary.waited_for_frames_ms <= response.summary.timings.total_ms


@pytest.mark.parametrize("inline", [True, False])
async def test_no_frames_give_no_audio(decoder, service, inline):
    if inline:
        call = service.call(codes=to_message(random_codes(decoder, 0, 1)))
    else:
        call = service.call(source=service.source())
        with service.hub.open("s", ["codes"]) as stream:
            stream.start(0)
            stream.finish(0)
    samples, summary = await collect(call)
    assert (len(samples), summary.frames, summary.samples) == (0, 0, 0)
    assert not summary.timings.HasField("first_output_ms")


async def test_bad_requests_are_refused_while_another_streams_on(decoder, service):
    codes = random_codes(decoder, 6, 4)
    wrong = codes.clone()
    wrong[2, 1] = decoder.spec.codebook_sizes[0]
    good = service.call(source=service.source("good"))
    with service.hub.open("good", ["codes"]) as stream:
        stream.start(0)
        stream.put([rows(0, codes[:2])])
        await good.read()
        bad = {
            "codes": {"codes": to_message(wrong)},
            "codes.shape": {"codes": to_message(codes[:, 1:])},
            "codes.dtype": {"codes": to_message(codes.float())},
            "input": {},
            "request_id": {"request_id": "", "codes": to_message(codes)},
            "sample_format": {"codes": to_message(codes), "sample_format": 9},
            "source.address": {"source": stream_pb2.StreamSource(stream_id="s")},
            "prompt_frames": {"codes": to_message(codes), "prompt_frames": 7},
            "prompt_frames ": {"codes": to_message(codes), "prompt_frames": -1},
            "prompt_frames  ": {"source": service.source(), "prompt_frames": 1},
        }
        for field, request in bad.items():
            error = await error_of(service.call(**request))
            assert isinstance(error, InvalidInput), field
            assert error.field == field.strip()
        with service.hub.open("wrong", ["codes"]) as other:
            other.start(0)
            other.put([rows(0, wrong)])
            other.finish(len(wrong))
            error = await error_of(service.call(source=service.source("wrong")))
        assert isinstance(error, InvalidInput)
        assert "source.codes: code" in str(error)
        for prompt in (-1, 7):
            # an id of its own: a stream is there until its reader has left, which the reader's client does not see
            with service.hub.open(f"prompt {prompt}", ["codes"]) as other:
                other.start(prompt)
                other.put([rows(0, codes)])
                other.finish(len(codes))
                error = await error_of(service.call(source=service.source(f"prompt {prompt}")))
            assert isinstance(error, InvalidInput)
            assert error.field == "source.prompt_positions"
        stream.put([rows(2, codes[2:])])
        stream.finish(6)
    _, summary = await collect_rest(good)
    assert summary.frames == 6
    await service.idle()


async def collect_rest(call: Any) -> tuple[list, code2wav_pb2.DecodeSummary]:
    responses = []
    async with asyncio.timeout(GUARD_S):
        while not (response := await call.read()).HasField("summary"):
            responses.append(response)
    return responses, response.summary


@pytest.mark.parametrize("error", [QueueFull("the talker is full", 3.0), Unavailable("the talker drains")])
async def test_the_talkers_error_ends_the_decode(decoder, service, error):
    call = service.call(source=service.source())
    with contextlib.suppress(type(error)), service.hub.open("s", ["codes"]) as stream:
        stream.start(0)
        stream.put([rows(0, random_codes(decoder, 1, 5))])
        await call.read()
        raise error
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await asyncio.wait_for(call.read(), GUARD_S)
    ended = from_rpc_error(caught.value)
    assert (type(ended), str(ended)) == (type(error), str(error))
    await service.idle()


async def test_an_abandoned_talker_request_cancels_the_decode(service):
    call = service.call(source=service.source())
    with service.hub.open("s", ["codes"]) as stream:
        stream.start(0)
        await stream.subscription(GUARD_S)
    assert isinstance(await error_of(call), RequestCancelled)


@pytest.mark.parametrize("when", ["before the first frame", "between frames", "unread"])
async def test_a_clients_cancel_frees_slot_and_subscription(decoder, service, when):
    call = service.call(source=service.source())
    with service.hub.open("s", ["codes"]) as stream:
        stream.start(0)
        await stream.subscription(GUARD_S)
        if when == "between frames":
            stream.put([rows(0, random_codes(decoder, 2, 6))])
            await call.read()
        elif when == "unread":
            stream.put([rows(0, random_codes(decoder, 2000, 6))])
            await asyncio.sleep(0.1)
        call.cancel()
        await service.idle()
        await until(lambda: stream.consumer_gone)
    codes = random_codes(decoder, 5, 7)
    samples, _ = await collect(service.call(codes=to_message(codes)))
    assert (samples - whole(decoder, codes)).abs().max() <= TOLERANCE


async def test_requests_beyond_slots_wait_and_beyond_the_queue_are_refused(decoder, service):
    codes = random_codes(decoder, 3, 8)
    held = [service.call(source=service.source(name)) for name in "ab"]
    with service.hub.open("a", ["codes"]) as a, service.hub.open("b", ["codes"]) as b:
        for stream in (a, b):
            stream.start(0)
            await stream.subscription(GUARD_S)
        queued = asyncio.create_task(collect(service.call(codes=to_message(codes))))
        await until(lambda: service.admission.in_flight == 3)
        assert isinstance(await error_of(service.call(codes=to_message(codes))), QueueFull)
        await asyncio.sleep(0.05)
        assert not queued.done()
        a.finish(0)
    samples, summary = await queued
    assert (samples - whole(decoder, codes)).abs().max() <= TOLERANCE
    assert summary.timings.queue_ms >= 40
    for call in held:
        call.cancel()
    await service.idle()


async def test_a_client_that_does_not_read_bounds_what_is_decoded(decoder, service):
    """Beyond what gRPC's own window holds, the engine decodes a few steps' frames, not all of them."""
    frames = 4000  # 30 MiB of samples
    call = service.call(codes=to_message(random_codes(decoder, frames, 9)))
    async with asyncio.timeout(GUARD_S):
        await call.read()
    (stream,) = service.engine._running
    before = -1
    async with asyncio.timeout(GUARD_S):
        while stream.frames_decoded != before:
            before = stream.frames_decoded
            await asyncio.sleep(0.5)
    assert stream.frames_decoded < frames // 2
    call.cancel()
    await service.idle()


async def test_a_window_smaller_than_a_chunk_and_a_slow_client_come_to_an_end(decoder):
    """The policy may wait for more frames than the window lets in: the lead runs out, so it never waits for ever."""
    engine = DecodeEngine(decoder, 1, max_frames_per_step=50, lead_margin_ms=0.0)
    window = FrameWindow(12)
    codes = random_codes(decoder, 40, 10).to(torch.int64)
    events: asyncio.Queue[Event] = asyncio.Queue()
    loop = asyncio.get_running_loop()
    stream = engine.open(lambda event: loop.call_soon_threadsafe(events.put_nowait, event))

    async def feed() -> None:
        done = 0
        while done < len(codes):
            count = await window.acquire(len(codes) - done)
            engine.put(stream, codes[done : done + count])
            done += count
        engine.finish(stream)

    feeding = asyncio.create_task(feed())
    frames = 0
    async with asyncio.timeout(GUARD_S):
        while isinstance(event := await events.get(), Samples):
            await asyncio.sleep(0.02)
            window.release(event.frames - frames)
            frames = event.frames
        await feeding
    assert isinstance(event, DecodeEnd)
    assert event.frames == len(codes)
    engine.stop()
