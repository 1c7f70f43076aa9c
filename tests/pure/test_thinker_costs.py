"""What media cost is known by their headers, limited in sum, and spent one at a time."""

import asyncio
import io
from collections.abc import Callable
from typing import Any

import numpy as np
import psutil
import pytest
from PIL import Image

from services.common.errors import ContextTooLong, InvalidMedia
from services.thinker.config import ThinkerSettings
from services.thinker.conversation import Conversation, MediaFile, Message
from services.thinker.family import load_checkpoint
from services.thinker.media import Spent, decode_audio
from services.thinker.scaling import Scaler
from tests.support.samples.media import mp4, png, wav
from tests.support.scripted.preprocessing import decoders, gone, preprocessor_of, processes
from tests.support.weights.checkpoints import omni_checkpoint

FAMILIES = ("qwen3-omni", "qwen2.5-omni")
NARROW = (100, 1500)  # which the processor would scale twice
SIZES = [(40, 30), (2000, 900), (1000, 700), (300, 600), (28, 28), NARROW]


@pytest.fixture(scope="module")
def checkpoints():
    return {arch: load_checkpoint(str(omni_checkpoint(arch=arch))) for arch in FAMILIES}


def noise(width: int, height: int, count: int = 1) -> np.ndarray:
    return np.random.default_rng(width).integers(0, 256, (count, height, width, 3), np.uint8)


@pytest.mark.parametrize("arch", FAMILIES)
def test_scaled_pictures_are_read_as_whole_ones_are(checkpoints, arch, monkeypatch) -> None:
    """To the bit, and with the tokens that were computed before. The processor of all media has own sizes of videos."""
    processor = checkpoints[arch].processor
    images, videos = processor.image_processor, processor.video_processor
    monkeypatch.setattr(images, "size", {"shortest_edge": 56 * 56, "longest_edge": 200 * 200})
    merge = processor._merge_kwargs

    def of_small_videos(*arguments: Any, **members: Any) -> dict[str, Any]:
        merged = merge(*arguments, **members)
        assert merged["videos_kwargs"]["size"]["shortest_edge"] > videos.size["shortest_edge"]
        merged["videos_kwargs"]["size"] = {"shortest_edge": 60 * 60, "longest_edge": 100 * 100}
        return merged

    monkeypatch.setattr(processor, "_merge_kwargs", of_small_videos)
    scaler = Scaler(checkpoints[arch])
    for size in SIZES:
        image = Image.fromarray(noise(*size)[0])
        scaled = scaler.image(np.array(image))
        assert scaled.width * scaled.height <= min(size[0] * size[1], 200 * 200) or size == NARROW
        whole, read = (
            processor(text=processor.image_token, images=[each], return_tensors="pt") for each in (image, scaled)
        )
        assert (whole["pixel_values"] == read["pixel_values"]).all()
        assert scaler.image_tokens(*size) == whole["image_grid_thw"].prod() // images.merge_size**2
        frames = noise(*size, count=4)
        scaled_frames = np.stack([scaler.frame(frame) for frame in frames])
        assert scaled_frames.nbytes <= min(frames.nbytes, 4 * 3 * 100 * 100) or size == NARROW
        whole, read = (
            processor(text=processor.video_token, videos=[each], return_tensors="pt", fps=2.0)
            for each in (frames, scaled_frames)
        )
        assert (whole["pixel_values_videos"] == read["pixel_values_videos"]).all()
        assert scaler.video_tokens(4, *size) == whole["video_grid_thw"].prod() // videos.merge_size**2


@pytest.fixture
def preprocessor(checkpoints):
    with preprocessor_of(checkpoints["qwen3-omni"], 8000) as preprocessor:
        yield preprocessor


@pytest.fixture
def nothing_decoded(monkeypatch):
    """Whatever decodes fails the test."""
    for name in ("decode_image", "decode_audio", "decode_video"):
        monkeypatch.setattr(f"services.thinker.preprocess.{name}", None)


def asked(*files: tuple[str, bytes]) -> Conversation:
    parts: Any = [MediaFile(kind, data, f"file {i}") for i, (kind, data) in enumerate(files)]  # pyright: ignore
    return Conversation([Message("user", parts)])


def plain(width: int, height: int) -> bytes:
    """A PNG that is small as a file."""
    out = io.BytesIO()
    Image.new("RGB", (width, height)).save(out, "PNG")
    return out.getvalue()


LARGE = plain(3000, 3000)
LIMITS: list[tuple[dict[str, Any], Conversation, str]] = [
    (
        {"max_request_image_pixels": 2 * 3000 * 3000},
        asked(*[("image", LARGE)] * 3),
        "file 2: .*27000000 pixels of images",
    ),
    ({"max_request_sound_s": 2.5}, asked(*[("audio", wav(1.0))] * 3), "file 2: .*3 seconds of sound"),
    ({"max_video_pixels": 20_000}, asked(*[("video", mp4(1.0))] * 2), "file 1: .*pixels of frames of videos"),
    ({"max_request_video_frames": 12}, asked(*[("video", mp4(1.0, fps=8))] * 2), "file 1: .*16 frames of videos"),
]


@pytest.mark.asyncio
@pytest.mark.parametrize(("limits", "conversation", "reason"), LIMITS)
async def test_a_request_has_limits_beside_those_of_a_file(
    preprocessor, limits, conversation, reason, monkeypatch
) -> None:
    monkeypatch.setattr(preprocessor, "_settings", preprocessor._settings.model_copy(update=limits))
    preprocessor._engine.max_context_tokens = 1_000_000
    monkeypatch.setattr("services.thinker.preprocess.decode_image", None)  # nothing is decoded
    monkeypatch.setattr("services.thinker.preprocess.decode_audio", None)
    monkeypatch.setattr("services.thinker.preprocess.decode_video", None)
    with pytest.raises(InvalidMedia, match=reason):
        await preprocessor.prepare(conversation)


@pytest.mark.asyncio
@pytest.mark.usefixtures("nothing_decoded")
async def test_media_that_fill_the_context_are_not_decoded(preprocessor) -> None:
    for conversation in (
        asked(("image", LARGE)),  # 8,836 tokens
        asked(*[("audio", wav(60.0))] * 12),
        asked(("image", png(800, 800)), ("video", mp4(30.0, fps=4, size=(640, 640)))),
    ):
        with pytest.raises(ContextTooLong, match=r"at least \d+ tokens; the limit is 8000"):
            await preprocessor.prepare(conversation)


def test_sound_that_is_longer_than_its_header_says_is_counted_as_it_is() -> None:
    limits = ThinkerSettings(model="unused", max_request_sound_s=1.5)
    spent = Spent(limits)
    sound = MediaFile("audio", wav(1.0), "file")
    decode_audio(sound, 16_000, limits, spent)
    with pytest.raises(InvalidMedia, match="seconds of sound"):
        decode_audio(sound, 16_000, limits, spent)


@pytest.mark.asyncio
async def test_large_pictures_do_not_lie_in_memory_together(preprocessor, monkeypatch) -> None:
    """What waits for the next is as small as the model reads it."""
    monkeypatch.setattr(
        preprocessor._checkpoint.processor.image_processor, "size", {"shortest_edge": 3136, "longest_edge": 40_000}
    )
    monkeypatch.setattr(preprocessor, "_scaler", Scaler(preprocessor._checkpoint))
    decoded: list[int] = []

    async def keep(prompt: Any, _: float) -> Any:
        decoded.extend(image.width * image.height for image in prompt["multi_modal_data"]["image"])
        return prompt

    monkeypatch.setattr(preprocessor._engine.renderer, "process_for_engine_async", keep)
    await preprocessor.prepare(asked(*[("image", plain(1500, 1500))] * 3))
    assert len(decoded) == 3
    assert max(decoded) <= 40_000


@pytest.mark.asyncio
async def test_a_client_that_leaves_ends_the_decoding(preprocessor, monkeypatch) -> None:
    begun: list[float] = []
    original = preprocessor._scaler.image
    monkeypatch.setattr(preprocessor._scaler, "image", lambda image: begun.append(0) or original(image))
    monkeypatch.setattr(preprocessor._scaler, "image_tokens", lambda *_: 1)
    task = asyncio.create_task(preprocessor.prepare(asked(*[("image", LARGE)] * 16)))
    async with asyncio.timeout(30):
        while not begun:
            await asyncio.sleep(0.005)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await preprocessor.prepare(asked(("audio", wav(1.0))))  # by the one thread for media
    assert len(begun) < 16


@pytest.mark.asyncio
async def test_a_decoder_that_crashes_or_is_left(preprocessor, monkeypatch) -> None:
    """The error names the file that was decoded. A client that leaves ends the process."""
    conversation = asked(("image", png(40, 30)), ("audio", wav(60.0)))
    scale = preprocessor._scaler.image

    def between(act: Callable[[psutil.Process], object]) -> None:
        """Calls `act` between the two files."""
        monkeypatch.setattr(
            preprocessor._scaler, "image", lambda pixels: (act(*processes(decoders())), scale(pixels))[1]
        )

    between(psutil.Process.kill)
    with pytest.raises(InvalidMedia, match="file 1: its decoder crashed"):
        await preprocessor.prepare(conversation)
    stopped: list[psutil.Process] = []
    between(lambda process: (process.suspend(), stopped.append(process)))
    task = asyncio.create_task(preprocessor.prepare(conversation))
    async with asyncio.timeout(30):
        while not stopped:
            await asyncio.sleep(0.01)
    task.cancel()
    assert await asyncio.to_thread(gone, stopped[0])
    between(lambda _: None)
    assert (await preprocessor.prepare(conversation)).token_ids
