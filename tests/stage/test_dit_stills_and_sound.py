"""A class that makes images, videos and sound: which is found by looking, and bit for bit what diffusers makes."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from quartet.v1 import dit_pb2
from services.common.errors import InvalidInput
from services.dit.__main__ import warm_up
from services.dit.config import DitSettings
from services.dit.models import load_pipeline
from services.dit.servicer import _pieces
from tests.support.stage.dit_engine import Bench, Watched, bench, fresh
from tests.support.weights.checkpoints import diffusion_checkpoint

IMAGE, FILM = dit_pb2.DIT_TASK_TEXT_TO_IMAGE, dit_pb2.DIT_TASK_TEXT_TO_VIDEO
ANIMATE, CONTINUE = dit_pb2.DIT_TASK_IMAGE_TO_VIDEO, dit_pb2.DIT_TASK_VIDEO_TO_VIDEO
SIZE = {"width": 64, "height": 48}
RATES_HZ = {"tiny": 12_000, "small": 0}
GREY = Image.radial_gradient("L").resize((80, 80)).convert("RGB")
CLIP = [GREY.rotate(90 * i).resize((64, 48)) for i in range(5)]
# Fields of a request, its files, and the arguments of diffusers' call beside prompt, seed, steps and size.
CASES: tuple[tuple[dict[str, Any], dict[str, Any], dict[str, Any]], ...] = (
    ({"task": IMAGE}, {}, {"num_frames": 1}),
    ({"num_frames": 5}, {}, {"num_frames": 5, "enable_sound": True}),
    ({"num_frames": 9}, {"images": [GREY]}, {"num_frames": 9, "enable_sound": True, "image": GREY}),
    ({"num_frames": 9}, {"video": CLIP}, {"num_frames": 9, "enable_sound": True, "video": CLIP}),
    (
        {"num_frames": 5, "arguments": '{"enable_sound": false, "add_resolution_template": false}'},
        {},
        {"num_frames": 5, "add_resolution_template": False},
    ),
)


@pytest.fixture(scope="module", params=RATES_HZ)
def size(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def dit(size: str) -> Iterator[Bench]:
    with bench(diffusion_checkpoint("cosmos3", size=size), default_size=None) as started:
        warm_up(started.engine)
        yield started


def of(dit: Bench, fields: dict[str, Any], **files: Any) -> Any:
    (order,) = dit.orders(
        dit_pb2.DitStart(**{"prompt": "a red fox", "num_inference_steps": 2, **SIZE, **fields}), **files
    )
    return order


def sent(dit: Bench, watched: Watched) -> list[dit_pb2.DitPiece]:
    rate = watched.output.spec.frames_per_second
    return list(_pieces(0, watched.events[-1], dit.info, rate))  # type: ignore[arg-type]


def test_what_it_makes_is_found(dit: Bench, size: str) -> None:
    info = dit.info
    assert list(info.tasks) == [FILM, IMAGE, ANIMATE, CONTINUE]
    assert (info.default_width, info.default_height, info.size_multiple) == (1280, 720, 16)
    assert (info.default_frames, info.frames_multiple, info.frames_per_second) == (161, 4, 24.0)  # 189, cut to the most
    assert (info.soundtrack_rate_hz, info.sample_rate_hz) == (RATES_HZ[size], 0)
    assert (info.one_at_a_time, info.batched, bool(info.not_batched)) == ("", False, True)
    arguments = {each.name: each.default for each in info.arguments}
    assert arguments["enable_sound"] == json.dumps(size == "tiny")
    assert "enable_safety_check" not in arguments  # that is the server's to say


def test_it_is_diffusers_own_alone_and_in_turns(dit: Bench, size: str) -> None:
    plain = fresh(diffusion_checkpoint("cosmos3", size=size))
    plain.set_progress_bar_config(disable=True)
    orders, theirs = [], []
    for seed in (1, 2):
        for number, (fields, files, call) in enumerate(CASES):
            asked: dict[str, Any] = {"prompt": f"fox {number}", "num_inference_steps": 2 + (seed + number) % 3}
            orders.append(of(dit, asked | fields | {"seed": seed}, **files))
            call = call | {"enable_sound": bool(RATES_HZ[size]) and call.get("enable_sound", False)}
            generator = torch.Generator("cpu").manual_seed(seed)
            made = plain(**asked, **SIZE, **call, generator=generator, output_type="np")
            theirs.append((torch.as_tensor(made.video[0] if "task" in fields else made.video), made.sound))
    alone = [dit.submit(order) for order in orders[:2]]
    for each in alone:
        dit.finish([each])
    together = dit.submit_together(orders)
    dit.finish(together)
    for watched, (frames, sound) in zip([*alone, *together], [*theirs[:2], *theirs], strict=True):
        assert torch.equal(watched.data, frames)
        assert (watched.soundtrack is None) == (sound is None)
        assert watched.soundtrack is None or torch.equal(watched.soundtrack, sound.T)
    assert sum(sound is not None for _, sound in theirs) == (6 if size == "tiny" else 0)
    assert all(frames.std() > 0.02 for frames, _ in theirs)


def test_an_image_is_sent_without_a_frame_rate_and_a_videos_sound_before_its_frames(dit: Bench, size: str) -> None:
    image, video = dit.submit_together([of(dit, {"task": IMAGE}), of(dit, {"num_frames": 5})])
    dit.finish([image, video])
    (piece,) = sent(dit, image)
    assert (list(piece.data.shape), piece.frames_per_second, piece.sample_rate_hz) == ([48, 64, 3], 0.0, 0)
    *sound, frames = sent(dit, video)
    assert (list(frames.data.shape), frames.frames_per_second) == ([5, 48, 64, 3], 24.0)
    assert [each.sample_rate_hz for each in sound] == ([12_000] if size == "tiny" else [])


def test_a_video_is_played_at_the_rate_that_it_is_made_for(dit: Bench) -> None:
    watched = dit.submit(of(dit, {"num_frames": 5, "arguments": '{"fps": 10}'}))
    dit.finish([watched])
    *sound, frames = sent(dit, watched)
    assert frames.frames_per_second == 10.0
    assert [each.total for each in sound] == ([6_000] if dit.info.soundtrack_rate_hz else [])  # 5 tenths of a second
    for rate in ("0", "-1", "1000"):
        with pytest.raises(InvalidInput, match="must be above 0, at most 240") as caught:
            of(dit, {"num_frames": 5, "arguments": f'{{"fps": {rate}}}'})
        assert caught.value.field == "arguments.fps"


def test_what_it_does_not_make_names_the_field(dit: Bench, size: str) -> None:
    picture: dict[str, Any] = {"images": [GREY]}
    no_sound = '{"enable_sound": true}'
    cases: list[tuple[dict[str, Any], dict[str, Any], str, str]] = [
        (
            {"task": dit_pb2.DIT_TASK_IMAGE_EDIT},
            picture,
            "task",
            "does not do DIT_TASK_IMAGE_EDIT; it does .*_TO_IMAGE",
        ),
        ({"task": dit_pb2.DIT_TASK_TEXT_TO_AUDIO}, {}, "task", "does not do DIT_TASK_TEXT_TO_AUDIO"),
        ({"task": IMAGE}, picture, "images", "are not taken by this task"),
        ({"task": ANIMATE}, {}, "images", "at least one is required"),
        ({"task": IMAGE, "num_frames": 5}, {}, "num_frames", "an image is one frame"),
        ({"task": IMAGE, "arguments": no_sound}, {}, "arguments.enable_sound", "has no sound|makes no sound"),
        ({"num_frames": 1}, picture, "num_frames", "one frame is made of a prompt alone; ask for 5 or more"),
        ({"num_frames": 1}, {"video": CLIP}, "num_frames", "one frame is made of a prompt alone"),
        ({"num_frames": 6}, {}, "num_frames", "1 more than a multiple of 4, at most 161"),
        ({"num_frames": 165}, {}, "num_frames", "at most 161"),
        ({"width": 72}, {}, "width", "must be a multiple of 16 pixels, not 72"),
        ({"width": 4096, "height": 4096}, {}, "width", "over the .* pixels"),
        ({"width": 2048, "height": 1024}, {}, "width", "all frames together have"),
        ({"task": IMAGE, "previews": 1}, {}, "previews", "has none"),
        ({"previews": 1}, {}, "previews", "only pictures"),
        ({"arguments": '{"enable_safety_check": false}'}, {}, "arguments.enable_safety_check", "is not taken here"),
        ({"audio_s": 1.0}, {}, "audio_s", "makes no sound"),
    ]
    if size == "small":
        cases.append(({"arguments": no_sound}, {}, "arguments.enable_sound", "this checkpoint makes no sound"))
    for fields, files, field, reason in cases:
        with pytest.raises(InvalidInput, match=reason) as caught:
            of(dit, fields, **files)
        assert caught.value.field == field, fields


def test_a_checker_that_is_not_installed_can_be_left_out(tmp_path: Path) -> None:
    folder = tmp_path / "checked"
    shutil.copytree(diffusion_checkpoint("cosmos3"), folder)
    index = json.loads((folder / "model_index.json").read_text())
    (folder / "model_index.json").write_text(json.dumps(index | {"enable_safety_checker": True}))
    settings = DitSettings(model=str(folder))
    with pytest.raises(ValueError, match=r"cosmos_guardrail.* not installed.*; or start it with --safety-checker off$"):
        load_pipeline(settings, only_denoisers=False)
    pipeline: Any = load_pipeline(settings.model_copy(update={"safety_checker": "off"}), only_denoisers=False)
    assert pipeline.safety_checker is None
    without = DitSettings(model=str(diffusion_checkpoint("sd3")), safety_checker="off")
    with pytest.raises(ValueError, match=r"^safety_checker=off: StableDiffusion3Pipeline has none"):
        load_pipeline(without, only_denoisers=False)
