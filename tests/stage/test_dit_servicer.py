"""DitService over a real gRPC server on loopback, with a real engine."""

import asyncio
import io
import threading
from collections.abc import AsyncIterator, Sequence
from typing import Any

import grpc
import numpy as np
import pytest
import torch
from PIL import Image
from prometheus_client import REGISTRY

from quartet.v1 import dit_pb2, dit_pb2_grpc, media_pb2
from services.common.errors import InvalidInput, QueueFull
from services.common.rpc import channels
from services.common.rpc.call import Admission
from services.common.rpc.status import from_rpc_error
from services.common.stream.tensors import to_torch
from services.dit.config import DitSettings
from services.dit.output import Output
from services.dit.servicer import DitServicer
from tests.support.clock import until
from tests.support.stage.dit_engine import Bench, bench
from tests.support.stage.streaming import CHANNELS, CONSUMER
from tests.support.weights.checkpoints import diffusion_checkpoint

GUARD_S = 120.0
Response = dit_pb2.DitServiceGenerateResponse


@pytest.fixture(scope="module")
def dit():
    checkpoint = diffusion_checkpoint("sd3")
    with bench(checkpoint, max_running_outputs=2) as started:
        yield started


class Service:
    """A dit server that takes two requests, and one more that waits."""

    def __init__(self, admission: Admission, address: str) -> None:
        self.admission, self.address = admission, address

    async def call(self, media: Sequence[bytes] = (), **fields: Any) -> Any:
        """A call whose start has been sent, and after it `media`."""
        call = dit_pb2_grpc.DitServiceStub(CHANNELS.channel(self.address)).Generate()
        defaults = {"request_id": "r", "prompt": "a red fox", "seed": 7, "num_inference_steps": 4}
        await call.write(dit_pb2.DitServiceGenerateRequest(start=dit_pb2.DitStart(**{**defaults, **fields})))
        for data in media:
            await call.write(dit_pb2.DitServiceGenerateRequest(media=media_pb2.MediaChunk(data=data)))
        return call

    async def responses(self, media: Sequence[bytes] = (), **fields: Any) -> list[Response]:
        call = await self.call(media, **fields)
        await call.done_writing()
        async with asyncio.timeout(GUARD_S):
            return [response async for response in call]

    async def error(self, media: Sequence[bytes] = (), **fields: Any) -> Exception:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await self.responses(media, **fields)
        return from_rpc_error(caught.value)

    async def idle(self) -> None:
        await until(lambda: not self.admission.in_flight)


def nothing_runs() -> bool:
    """By what the engine tells Prometheus."""
    return REGISTRY.get_sample_value("quartet_dit_outputs_running") == 0


@pytest.fixture
async def service(dit: Bench) -> AsyncIterator[Service]:
    admission = Admission(2, 1)
    admission.open()
    servicer = DitServicer(
        admission, CONSUMER, DitSettings(model="x", max_media_bytes=200_000, max_request_image_pixels=1_000_000)
    )
    servicer.engine = dit.engine
    server = grpc.aio.server(options=channels.SERVER_OPTIONS)
    dit_pb2_grpc.add_DitServiceServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    yield Service(admission, f"127.0.0.1:{port}")
    await server.stop(None)
    await CHANNELS.close_all()


def outputs(responses: Sequence[Response]) -> dict[int, torch.Tensor]:
    """Each output's pieces, put together."""
    pieces: dict[int, list[dit_pb2.DitPiece]] = {}
    for response in responses:
        if response.WhichOneof("message") == "piece":
            mine = pieces.setdefault(response.piece.output, [])
            assert response.piece.first == sum(piece.data.shape[0] for piece in mine)
            mine.append(response.piece)
    whole = {i: torch.cat([to_torch(piece.data) for piece in mine]) for i, mine in pieces.items()}
    assert all(pieces[i][0].total == data.shape[0] for i, data in whole.items())
    return whole


def png(size: tuple[int, int] = (64, 64), mode: str = "RGB", colour: Any = "orange") -> bytes:
    file = io.BytesIO()
    Image.new(mode, size, colour).save(file, "PNG")
    return file.getvalue()


def media(data: bytes = b"", **fields: Any) -> media_pb2.Media:
    return media_pb2.Media(**{"kind": media_pb2.MEDIA_KIND_IMAGE, "data": data, **fields})


async def test_the_course_of_a_request(service: Service, dit: Bench) -> None:
    dit.begin_with(2)
    responses = await service.responses(count=2, previews=1)
    kinds = [response.WhichOneof("message") for response in responses]
    assert kinds[0] == "started"
    assert kinds[-1] == "summary"
    started, summary = responses[0].started, responses[-1].summary
    assert (started.seed, started.count, started.num_inference_steps) == (7, 2, 4)
    assert started.task == dit_pb2.DIT_TASK_TEXT_TO_IMAGE
    for output in (0, 1):
        steps = [r.progress.step for r in responses if r.HasField("progress") and r.progress.output == output]
        assert steps == [1, 2, 3, 4]
    previews = [r.preview for r in responses if r.HasField("preview")]
    assert sorted((p.output, p.index, p.step) for p in previews) == [(0, 0, 2), (1, 0, 2)]
    assert (summary.count, summary.steps, summary.mean_batch) == (2, 8, 2.0)
    assert 0 < summary.timings.prefill_ms < summary.timings.total_ms
    wanted = dit.make(dit.orders(dit_pb2.DitStart(prompt="a red fox", seed=7, num_inference_steps=4, count=2)))
    for i, pixels in outputs(responses).items():
        assert pixels.dtype == torch.uint8
        assert (pixels.float() - wanted[i] * 255).abs().max() <= 0.51


async def test_floats_and_seeds(service: Service, dit: Bench) -> None:
    fields: dict[str, Any] = {"pixel_format": dit_pb2.PIXEL_FORMAT_FLOAT32}
    first = outputs(await service.responses(**fields, seed=8))[0]
    (wanted,) = dit.make(dit.orders(dit_pb2.DitStart(prompt="a red fox", seed=8, num_inference_steps=4)))
    torch.testing.assert_close(first, wanted, atol=1e-6, rtol=0)
    drawn = await service.responses(**fields, seed=None)
    again = await service.responses(**fields, seed=drawn[0].started.seed)
    assert torch.equal(outputs(drawn)[0], outputs(again)[0])


async def test_large_outputs_leave_in_pieces(service: Service) -> None:
    responses = await service.responses(
        width=640, height=640, num_inference_steps=1, pixel_format=dit_pb2.PIXEL_FORMAT_FLOAT32
    )
    pieces = [response for response in responses if response.HasField("piece")]
    assert len(pieces) == 2
    assert outputs(responses)[0].shape == (640, 640, 3)


async def test_an_edit_by_inline_and_by_chunks(service: Service) -> None:
    picture, mask = png(), png(mode="RGBA", colour=(0, 0, 0, 0))
    inline = await service.responses(images=[media(picture)], mask=media(mask))
    announced = {"images": [media(size_bytes=len(picture))], "mask": media(size_bytes=len(mask))}
    chunks = await service.responses([picture[:50], picture[50:], mask], **announced)
    assert inline[0].started.task == dit_pb2.DIT_TASK_IMAGE_EDIT
    assert torch.equal(outputs(inline)[0], outputs(chunks)[0])


@pytest.mark.parametrize("side", ["left", "right"])
async def test_a_mask_says_where_to_paint(service: Service, side: str) -> None:
    """Where it is transparent, as at OpenAI: there two seeds differ most. (A random VAE blurs the border.)"""
    mask = Image.new("RGBA", (64, 64), (0, 0, 0, 255))
    mask.paste((0, 0, 0, 0), (0, 0, 32, 64) if side == "left" else (32, 0, 64, 64))
    file = io.BytesIO()
    mask.save(file, "PNG")
    fields = {"images": [media(png())], "mask": media(file.getvalue())}
    one, other = [outputs(await service.responses(**fields, seed=seed))[0].float() for seed in (1, 2)]
    difference = (one - other).abs().mean(dim=(0, 2))
    painted, kept = (difference[:32], difference[32:]) if side == "left" else (difference[32:], difference[:32])
    assert painted.mean() > 1.1 * kept.mean()


PNG_BOMB = png((20_000, 20_000), "1", 1)


@pytest.mark.parametrize(
    ("fields", "chunks", "field"),
    [
        ({"prompt": ""}, [], "prompt"),
        ({"context": [dit_pb2.ContextPart(text="a fox")]}, [], "context"),
        ({"task": 99}, [], "task"),
        ({"num_inference_steps": 0}, [], "num_inference_steps"),
        ({"progress_interval_ms": 60_001}, [], "progress_interval_ms"),
        ({"images": [media(b"not a picture")]}, [], "images[0]"),
        ({"images": [media(PNG_BOMB)]}, [], "images[0]"),
        ({"images": [media(png((2, 64)))]}, [], "images[0]"),
        ({"images": [media(png((4, 4000)))]}, [], "images[0]"),
        ({"images": [media(png((1000, 999)))], "mask": media(png((1000, 999)))}, [], "mask"),
        ({"images": [media(png(), kind=media_pb2.MEDIA_KIND_AUDIO)]}, [], "images[0]"),
        ({"images": [media()]}, [], "images[0]"),
        ({"images": [media(size_bytes=300_000)]}, [], "images[0]"),
        ({"images": [media(size_bytes=100)]}, [b"x" * 50], "images[0]"),
        ({"images": [media(size_bytes=100)]}, [b"x" * 150], "images[0]"),
        ({"images": [media(png())], "mask": media(png((32, 32)))}, [], "mask"),
        ({"images": [media(png()[:60], field="image[]")]}, [], "image[]"),
        ({"request_id": ""}, [], "request_id"),
    ],
)
async def test_bad_input_names_the_field(service: Service, fields: dict, chunks: list[bytes], field: str) -> None:
    error = await service.error(chunks, **fields)
    assert isinstance(error, InvalidInput)
    assert error.field == field
    await service.idle()


@pytest.mark.parametrize("field", ["prompt", "negative_prompt"])
async def test_a_prompt_of_a_megabyte_is_not_tokenized(service: Service, field: str) -> None:
    error = await service.error([], **{field: "x " * 500_000})
    assert isinstance(error, InvalidInput)
    assert (error.field, "characters" in error.reason) == (field, True)


async def test_progress_comes_no_more_often_than_asked_for(service: Service) -> None:
    responses = await service.responses(num_inference_steps=12, progress_interval_ms=60_000)
    assert [r.progress.step for r in responses if r.HasField("progress")] == [1, 12]
    assert responses[-1].summary.steps == 12


async def test_a_call_without_start(service: Service) -> None:
    call = dit_pb2_grpc.DitServiceStub(CHANNELS.channel(service.address)).Generate()
    await call.done_writing()
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call.read()
    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT


async def test_a_client_that_leaves_frees_its_place(
    service: Service, dit: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    all_left, calls_of_models, compute = threading.Event(), [], dit.engine._compute

    def held(batch: list[Output]) -> list[Any]:
        calls_of_models.append(batch)
        assert all_left.wait(GUARD_S)
        return compute(batch)

    monkeypatch.setattr(dit.engine, "_compute", held)
    calls = [await service.call(num_inference_steps=150) for _ in range(3)]
    await until(lambda: service.admission.in_flight == 3 and bool(calls_of_models))
    error = await service.error()
    assert isinstance(error, QueueFull)
    for call in calls:
        call.cancel()
    await service.idle()
    all_left.set()
    await until(nothing_runs)
    assert len(calls_of_models) == 1
    assert outputs(await service.responses())[0].shape == (64, 64, 3)


async def test_the_timeout_of_a_call_ends_it(service: Service, dit: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    ended, run, calls = threading.Event(), dit.engine.models.run, []

    def held(*arguments: Any) -> Any:
        calls.append(arguments)
        ended.wait(GUARD_S)
        return run(*arguments)

    async def requests() -> AsyncIterator[dit_pb2.DitServiceGenerateRequest]:
        yield dit_pb2.DitServiceGenerateRequest(start=dit_pb2.DitStart(request_id="r", prompt="x"))

    monkeypatch.setattr(dit.engine.models, "run", held)
    call = dit_pb2_grpc.DitServiceStub(CHANNELS.channel(service.address)).Generate(requests(), timeout=0.5)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for _ in call:
            pass
    assert caught.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
    await service.idle()
    ended.set()
    await until(nothing_runs)
    assert len(calls) <= 1  # none, if it ended before it began


def test_masks_of_every_kind() -> None:
    from services.diffusion.images import decode_mask

    of = Image.new("RGB", (8, 8))
    file = io.BytesIO()
    clear = Image.new("RGBA", (8, 8), (0, 0, 0, 0)).quantize(method=Image.Quantize.FASTOCTREE)
    assert clear.mode == "P"
    clear.save(file, "PNG")
    assert np.asarray(decode_mask(file.getvalue(), of, 64)).min() == 255
    for value, wanted in ((0, 0), (20_000, 78), (65_535, 255)):
        file = io.BytesIO()
        Image.fromarray(np.full((8, 8), value, np.uint16)).save(file, "PNG")
        assert np.unique(np.asarray(decode_mask(file.getvalue(), of, 64))).tolist() == [wanted]


async def test_further_arguments_of_the_pipeline(service: Service, dit: Bench) -> None:
    fields: dict[str, Any] = {"arguments": '{"clip_skip": 1}'}
    (wanted,) = dit.make(dit.orders(dit_pb2.DitStart(prompt="a red fox", seed=7, num_inference_steps=4, **fields)))
    without = outputs(await service.responses())[0]
    made = outputs(await service.responses(**fields, pixel_format=dit_pb2.PIXEL_FORMAT_FLOAT32))[0]
    assert torch.equal(made, wanted)
    assert not torch.equal((made * 255).round().to(torch.uint8), without)
    error = await service.error(arguments='{"clip_skp": 1}')
    assert isinstance(error, InvalidInput)
    assert (error.field, "clip_skip" in error.reason) == ("arguments.clip_skp", True)
    assert "clip_skip" in [each.name for each in dit.info.arguments]
