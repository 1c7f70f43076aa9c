"""A dit whose prompts are read by an encoder of its own process makes the same as one that reads them itself."""

import asyncio
import io
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from PIL import Image
from prometheus_client import REGISTRY

from quartet.v1 import (
    dit_pb2,
    dit_pb2_grpc,
    encoder_pb2,
    encoder_pb2_grpc,
    media_pb2,
    stream_pb2,
    stream_pb2_grpc,
)
from services.common.errors import InvalidInput
from services.common.rpc import channels
from services.common.rpc.call import Admission
from services.common.rpc.status import from_rpc_error
from services.common.stream.hub import StreamHub, TensorStreamServicer
from services.common.stream.shared_memory import SharedMemoryTransport
from services.common.stream.tensors import Transport, to_torch
from services.dit.config import DitSettings
from services.dit.servicer import DitServicer
from services.encoder.__main__ import EncoderServicer
from services.encoder.config import EncoderSettings
from services.encoder.engine import EncoderEngine
from tests.support.clock import until
from tests.support.families import SYSTEMS, small_edits
from tests.support.stage.dit_engine import Bench, bench
from tests.support.stage.shm import MIB, arena_directory
from tests.support.stage.streaming import CHANNELS, CONSUMER, reading
from tests.support.weights.checkpoints import diffusion_checkpoint

__all__ = ["small_edits"]  # the fixture

pytestmark = pytest.mark.usefixtures("small_edits")
GUARD_S = 300.0
TAKES_IMAGE = ("qwen-image-edit", "wan-i2v")


@pytest.fixture(scope="module", params=SYSTEMS)
def family(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def checkpoint(family: str) -> Path:
    return diffusion_checkpoint(family)


class Pair:
    """An encoder's server, with its engine and admission, and a dit's."""

    def __init__(self, encoder: str, dit: str, engine: EncoderEngine, admission: Admission) -> None:
        self.encoder, self.dit, self.engine, self.admission = encoder, dit, engine, admission

    def encode(self, start: dit_pb2.DitStart, stream_id: str) -> Any:
        async def requests() -> AsyncIterator[encoder_pb2.EncodeRequest]:
            yield encoder_pb2.EncodeRequest(start=encoder_pb2.EncodeStart(request=start, output_stream_id=stream_id))

        return encoder_pb2_grpc.EncoderServiceStub(CHANNELS.channel(self.encoder)).Encode(requests())

    def generate(self, start: dit_pb2.DitStart, stream_id: str) -> Any:
        sourced = dit_pb2.DitStart()
        sourced.CopyFrom(start)
        sourced.source.CopyFrom(stream_pb2.StreamSource(address=self.encoder, stream_id=stream_id))

        async def requests() -> AsyncIterator[dit_pb2.DitServiceGenerateRequest]:
            yield dit_pb2.DitServiceGenerateRequest(start=sourced)

        return dit_pb2_grpc.DitServiceStub(CHANNELS.channel(self.dit)).Generate(requests())


@asynccontextmanager
async def serving(checkpoint: Path, dit: Bench, transport: Transport | None = None) -> AsyncIterator[Pair]:
    engine = EncoderEngine(EncoderSettings(model=str(checkpoint)))
    engine.models.keep_encodings("encoder", 64)
    admissions = [Admission(4, 4), Admission(4, 4)]
    hub, servers = StreamHub(), [grpc.aio.server(options=channels.SERVER_OPTIONS) for _ in range(2)]
    hub.transports += [transport] if transport else []
    encoder = EncoderServicer(admissions[0], hub, EncoderSettings(model=str(checkpoint)))
    encoder.engine = engine
    servicer = DitServicer(admissions[1], CONSUMER, DitSettings(model="x"))
    servicer.engine = dit.engine
    encoder_pb2_grpc.add_EncoderServiceServicer_to_server(encoder, servers[0])
    stream_pb2_grpc.add_TensorStreamServiceServicer_to_server(TensorStreamServicer(hub, "encoder"), servers[0])
    dit_pb2_grpc.add_DitServiceServicer_to_server(servicer, servers[1])
    ports = [server.add_insecure_port("127.0.0.1:0") for server in servers]
    for admission, server in zip(admissions, servers, strict=True):
        admission.open()
        await server.start()
    yield Pair(f"127.0.0.1:{ports[0]}", f"127.0.0.1:{ports[1]}", engine, admissions[0])
    for server in servers:
        await server.stop(None)
    await CHANNELS.close_all()


async def handed_over(pair: Pair, start: dit_pb2.DitStart, stream_id: str = "s") -> list[Any]:
    """What the dit answers while the encoder streams to it."""
    encoding = asyncio.create_task(collect(pair.encode(start, stream_id)))
    responses = await collect(pair.generate(start, stream_id))
    await encoding
    return responses


def start_of(family: str, **fields: Any) -> dit_pb2.DitStart:
    start = dit_pb2.DitStart(request_id="r", prompt="a red fox", seed=5, num_inference_steps=3, guidance_scale=2.5)
    if family in ("wan", "wan-i2v"):
        start.num_frames = 5
    if family == "stable-audio":
        start.audio_s = 0.2
    else:
        start.width = start.height = 64
    if family in TAKES_IMAGE:
        file = io.BytesIO()
        Image.linear_gradient("L").resize((64, 64)).convert("RGB").save(file, "PNG")
        start.images.add(kind=media_pb2.MEDIA_KIND_IMAGE, data=file.getvalue())
    for key, value in fields.items():
        setattr(start, key, value)
    return start


async def outputs(call: Any) -> list[torch.Tensor]:
    return joined(await collect(call))


def joined(responses: list[Any]) -> list[torch.Tensor]:
    """The outputs, of their pieces."""
    made: dict[int, list[torch.Tensor]] = {}
    for response in responses:
        if response.HasField("piece"):
            made.setdefault(response.piece.output, []).append(to_torch(response.piece.data))
    return [torch.cat(pieces) for _, pieces in sorted(made.items())]


@contextmanager
def shared_memory() -> Iterator[SharedMemoryTransport]:
    """An arena for every tensor, which this process reads."""
    with arena_directory() as directory, reading(directory, "inline", "shared_memory"):
        transport = SharedMemoryTransport(directory, 64 * MIB, 1)
        yield transport
        transport.arena.close()


async def test_shared_memory_makes_the_same_to_the_bit(glm: Path) -> None:
    start = start_of("glm-image", pixel_format=dit_pb2.PIXEL_FORMAT_FLOAT32)
    with bench(glm, encoders="stream") as dit, shared_memory() as transport:
        made: list[list[torch.Tensor]] = []
        for with_transport in (None, transport):
            async with serving(glm, dit, with_transport) as pair:
                made.append(joined(await handed_over(pair, start)))
        assert all(torch.equal(inline, shared) for inline, shared in zip(*made, strict=True))
        sent = "quartet_stream_bytes_total"
        labels = {"stage": "encoder", "consumer": "dit", "rows": "tensors", "transport": "shared_memory"}
        assert REGISTRY.get_sample_value(sent, labels)
        await until(lambda: not transport.arena.used_bytes)


async def test_two_processes_make_what_one_makes(family: str, checkpoint: Path) -> None:
    start = start_of(family, count=2, pixel_format=dit_pb2.PIXEL_FORMAT_FLOAT32)
    with bench(checkpoint) as whole:
        pictures = [Image.open(io.BytesIO(media.data)).convert("RGB") for media in start.images]
        wanted = whole.make(whole.orders(start, pictures))
    with bench(checkpoint, encoders="stream") as dit:
        assert dit.info.needs_source
        async with serving(checkpoint, dit) as pair:
            encoding = asyncio.create_task(collect(pair.encode(start, "s")))
            made = await outputs(pair.generate(start, "s"))
            (summary,) = await encoding
            assert summary.summary.tensors > 0
            for mine, theirs in zip(made, wanted, strict=True):
                torch.testing.assert_close(mine, theirs.clamp(-1, 1), atol=1e-4, rtol=0)
            hits = {"stage": "encoder", "method": "encode_prompt", "outcome": "hit"}
            before = REGISTRY.get_sample_value("quartet_encoding_cache_calls_total", hits) or 0
            encoding = asyncio.create_task(collect(pair.encode(start, "again")))
            again = await outputs(pair.generate(start, "again"))
            await encoding
            assert all(torch.equal(one, other) for one, other in zip(again, made, strict=True))
            assert (REGISTRY.get_sample_value("quartet_encoding_cache_calls_total", hits) or 0) > before


async def collect(call: Any) -> list[Any]:
    async with asyncio.timeout(GUARD_S):
        return [response async for response in call]


@pytest.fixture(scope="module")
def glm() -> Path:
    return diffusion_checkpoint("glm-image")


async def test_what_goes_wrong_reaches_both(glm: Path) -> None:
    with bench(glm, encoders="stream") as dit:
        async with serving(glm, dit) as pair:
            start = start_of("glm-image")
            # the encoder refuses the prompt: its stream fails with the same words
            empty = start_of("glm-image", prompt="fox " * 5000)
            encoding = asyncio.create_task(collect(pair.encode(empty, "a")))
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await outputs(pair.generate(start, "a"))
            error = from_rpc_error(caught.value)
            assert isinstance(error, InvalidInput)
            assert error.field == "prompt"
            await asyncio.gather(encoding, return_exceptions=True)
            for bad, field in (({"count": 11}, "count"), ({"num_inference_steps": 0}, "num_inference_steps")):
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await collect(pair.encode(start_of("glm-image", **bad), field))
                error = from_rpc_error(caught.value)
                assert isinstance(error, InvalidInput)
                assert error.field == field
            # no source at all
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await outputs(dit_pb2_grpc.DitServiceStub(CHANNELS.channel(pair.dit)).Generate(one(start)))
            error = from_rpc_error(caught.value)
            assert isinstance(error, InvalidInput)
            assert error.field == "source"
            # a cancelled encoding ends while the model computes, which is called no more, and the next one works
            calls, go_on = [], threading.Event()

            def hold(module: Any, args: Any) -> None:
                calls.append(module)
                go_on.wait(GUARD_S)

            hook = pair.engine.models.pipeline.vision_language_encoder.register_forward_pre_hook(hold)
            call = pair.encode(start, "b")
            generating = asyncio.create_task(outputs(pair.generate(start, "b")))
            await until(lambda: calls)
            assert not generating.done()
            call.cancel()
            with pytest.raises(grpc.aio.AioRpcError):
                await generating
            await until(lambda: not pair.admission.in_flight)
            go_on.set()
            await asyncio.get_running_loop().run_in_executor(pair.engine._thread, hook.remove)
            assert len(calls) == 1
            encoding = asyncio.create_task(collect(pair.encode(start, "c")))
            assert len(await outputs(pair.generate(start, "c"))) == 1
            await encoding


async def one(start: dit_pb2.DitStart) -> AsyncIterator[dit_pb2.DitServiceGenerateRequest]:
    yield dit_pb2.DitServiceGenerateRequest(start=start)
