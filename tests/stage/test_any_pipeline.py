"""Pipeline classes that no row of the table is about: what the dit makes is bit for bit what diffusers makes."""

# diffusers exports its classes lazily, which pyright does not take for an export:
# pyright: reportPrivateImportUsage=false

import json
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from PIL import Image

from quartet.v1 import dit_pb2
from services.common.errors import InvalidInput
from services.diffusion import found
from services.diffusion.families import FAMILIES, OWN, family_of
from services.dit.__main__ import warm_up
from services.dit.config import DitSettings
from services.dit.models import load_pipeline
from services.dit.output import Done, Started
from tests.support.stage.dit_engine import Bench, bench, check_shared_steps, fresh
from tests.support.weights import unlisted
from tests.support.weights.unlisted import unlisted_checkpoint

SMALL = {"width": 64, "height": 64}
PLAIN = {"use_resolution_binning": False}  # else 64 pixels are made as 1024
# Class, what is found, and arguments of small calls: fields of a request, further ones, and those of one call only.
CASES: dict[Callable[[], Any], tuple[dict[str, Any], dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    unlisted.stable_diffusion: (
        {"default_width": 64, "size_multiple": 8, "max_prompt_tokens": 77, "mask": True, "denoisers": ["unet"]},
        {},
        {},
        {"guidance_rescale": 0.5},
    ),
    unlisted.stable_diffusion_xl: (
        {"default_height": 64, "default_guidance_scale": 5.0, "max_images": 1},
        {"width": 80, "height": 48},
        {},
        {"target_size": (32, 64), "negative_prompt_2": "fog"},
    ),
    unlisted.panorama: (
        {"default_width": 2048, "default_height": 512, "size_multiple": 8},
        SMALL,
        {},
        {"circular_padding": True},
    ),
    unlisted.pixart_sigma: (
        {"default_width": 256, "size_multiple": 16, "max_prompt_tokens": 300, "denoisers": ["transformer"]},
        SMALL,
        PLAIN,
        {"max_sequence_length": 4},
    ),
    unlisted.sana: (
        {"default_width": 1024, "size_multiple": 32, "max_images": 0},
        SMALL,
        PLAIN,
        {"complex_human_instruction": []},
    ),
    unlisted.lumina2: (
        {"default_width": 64, "size_multiple": 16, "default_inference_steps": 30},
        {},
        {},
        {"cfg_trunc_ratio": 0.5, "system_prompt": "x"},
    ),
    unlisted.ltx: (
        {"default_width": 704, "default_frames": 161, "size_multiple": 32, "frames_per_second": 25.0},
        SMALL | {"num_frames": 5},
        {},
        {"frame_rate": 8},
    ),
    unlisted.ltx2: (
        {"default_width": 768, "size_multiple": 32, "frames_per_second": 24.0, "soundtrack_rate_hz": 16_000},
        SMALL | {"num_frames": 5},
        {"max_sequence_length": 16},
        {"audio_guidance_scale": 2.0},
    ),
}
WITH_SOUND = (unlisted.ltx2,)


@pytest.fixture(scope="module")
def dit() -> Iterator[Bench]:
    with bench(unlisted_checkpoint(unlisted.stable_diffusion), default_size=None) as started:
        yield started


@pytest.mark.parametrize("build", CASES, ids=lambda build: build.__name__)
def test_it_is_found_and_is_diffusers_own_alone_and_in_turns(build: Callable[[], Any]) -> None:
    facts, small, always, further = CASES[build]
    checkpoint = unlisted_checkpoint(build)
    plain = fresh(checkpoint)
    plain.set_progress_bar_config(disable=True)

    def wanted(prompt: str, seed: int, steps: int, **more: Any) -> tuple[torch.Tensor, ...]:
        """With the sound, if there is some."""
        generator = torch.Generator("cpu").manual_seed(seed)
        made = plain(
            prompt, num_inference_steps=steps, **small, **always, **more, generator=generator, output_type="np"
        )
        sound = made.get("audio")
        return torch.as_tensor(made[0][0]), *(() if sound is None else (sound[0].T,))

    with bench(checkpoint, default_size=None) as dit:
        assert {name: getattr(dit.info, name) for name in facts} == facts
        assert (dit.info.batched, bool(dit.info.not_batched), dit.info.without_previews) == (False, True, True)
        one = {"prompt": "a red fox", "seed": 1, "num_inference_steps": 2, "arguments": json.dumps(always), **small}
        other = one | {"prompt": "a house by the sea", "seed": 2, "num_inference_steps": 4, "guidance_scale": 2.0}
        orders = [*order(dit, one), *order(dit, other | {"arguments": json.dumps(always | further)})]
        theirs = [wanted("a red fox", 1, 2), wanted("a house by the sea", 2, 4, guidance_scale=2.0, **further)]
        assert all(len(each) == 1 + (build in WITH_SOUND) for each in theirs)
        assert all(data.std() > 0.001 for each in theirs for data in each)
        plainer = wanted("a house by the sea", 2, 4, guidance_scale=2.0)
        assert not torch.equal(theirs[1][-1], plainer[-1])  # by `further`
        watched = dit.submit_together(orders)
        dit.finish(watched)
        for mine, their in zip(watched, theirs, strict=True):
            assert torch.equal(mine.data, their[0])
            sound = () if mine.soundtrack is None else (mine.soundtrack,)
            assert all(torch.equal(one, other) for one, other in zip(sound, their[1:], strict=True))
        assert {batch for each in watched for batch in each.batches} == {1}


@pytest.mark.parametrize(
    "build", [unlisted.stable_diffusion, unlisted.stable_diffusion_xl, unlisted.pixart_sigma, unlisted.lumina2]
)
def test_steps_are_shared_by_rules_that_were_learned(build: Callable[[], Any]) -> None:
    _, small, always, _ = CASES[build]
    asked = {"arguments": json.dumps(always), **small}
    with bench(unlisted_checkpoint(build), default_size=None) as dit:
        orders = [
            order(dit, asked | {"prompt": prompt, "seed": steps, "num_inference_steps": steps})[0]
            for prompt, steps in (("a red fox", 2), ("a house by the sea", 4), ("x", 3))
        ]
        check_shared_steps(dit, orders)
    with bench(unlisted_checkpoint(build), default_size=None, max_batch=1) as dit:
        warm_up(dit.engine)
        assert (dit.info.batched, dit.info.not_batched) == (False, "max_batch=1")


def order(dit: Bench, fields: dict[str, Any], *files: Any) -> Any:
    return dit.orders(dit_pb2.DitStart(**fields), *files)


def test_edits_and_masks_of_a_class_without_a_row(dit: Bench) -> None:
    picture = Image.linear_gradient("L").resize((75, 59)).convert("RGB")
    small = picture.resize((72, 56), Image.Resampling.LANCZOS)  # sizes are multiples of 8
    mask = Image.new("L", picture.size, 0)
    mask.paste(255, (0, 0, 32, 59))
    warm_up(dit.engine)
    assert dit.info.one_at_a_time == ""
    tiny = picture.resize((48, 40), Image.Resampling.LANCZOS)
    sizes = {"width": 48, "height": 40}  # diffusers' class takes none, but its picture's
    cases: list[tuple[Any, dict[str, Any], dict[str, Any], dict[str, Any]]] = [
        (diffusers.StableDiffusionImg2ImgPipeline, {"image": tiny}, {"strength": 0.75}, sizes),
        (diffusers.StableDiffusionInpaintPipeline, {"image": small, "mask_image": mask}, {}, {}),
    ]
    for cls, given, further, asked in cases:
        plain = cls.from_pipe(fresh(unlisted_checkpoint(unlisted.stable_diffusion)))
        plain.set_progress_bar_config(disable=True)
        size = {"width": 72, "height": 56} if "mask_image" in given else {}
        generator = torch.Generator("cpu").manual_seed(3)
        steps = {"num_inference_steps": 4}
        their = plain("a fox", **given, **size, **steps, **further, generator=generator, output_type="np")[0][0]
        fields = {"prompt": "a fox", "seed": 3, "arguments": json.dumps(further)} | steps | asked
        (spec,) = order(dit, fields, [picture], given.get("mask_image"))
        assert spec.steps == int(4 * further.get("strength", 1))
        (mine,) = dit.make([spec])
        assert torch.equal(mine, torch.as_tensor(their))


def test_a_class_without_prompts_makes_a_video_of_a_picture() -> None:
    picture = Image.linear_gradient("L").resize((64, 64)).convert("RGB")
    checkpoint = unlisted_checkpoint(unlisted.stable_video_diffusion)
    small: dict[str, Any] = {"num_inference_steps": 2, "num_frames": 3, **SMALL}
    with bench(checkpoint, default_size="64x64") as dit:
        warm_up(dit.engine)
        assert (dit.info.one_at_a_time, list(dit.info.tasks)) == ("", [dit_pb2.DIT_TASK_IMAGE_TO_VIDEO])
        assert (dit.info.default_frames, dit.info.frames_per_second, dit.info.max_prompt_tokens) == (4, 7.0, 0)
        motion = {"arguments": json.dumps({"motion_bucket_id": 60})}
        specs = order(dit, {"prompt": "not read", "seed": 3} | small | motion, [picture])
        (mine,) = dit.make(specs)
    plain = fresh(checkpoint)
    plain.set_progress_bar_config(disable=True)
    generator = torch.Generator("cpu").manual_seed(3)
    their = plain(picture, **small, motion_bucket_id=60, generator=generator, output_type="np").frames[0]
    assert torch.equal(mine, torch.as_tensor(their))


@pytest.mark.parametrize("build", [unlisted.perturbed_attention, unlisted.self_attention_guidance])
def test_a_class_that_changes_its_models_makes_one_output_at_a_time(build: Callable[[], Any]) -> None:
    """Also one whose outputs are no others in turns, but fail, and which cannot make the smallest."""
    with bench(unlisted_checkpoint(build), default_size="128x128") as dit:
        warm_up(dit.engine)
        assert "in turns" in dit.info.one_at_a_time
        assert (dit.info.batched, dit.info.not_batched) == (False, "one output is made at a time")
        orders = order(dit, {"prompt": "x", "seed": 1, "num_inference_steps": 2})
        orders += order(dit, {"prompt": "a fox", "seed": 2, "num_inference_steps": 4})
        alone = [dit.make([each])[0] for each in orders]
        one, other = watched = dit.submit_together(orders)
        assert all(map(torch.equal, alone, dit.finish(watched)))
        course = [(heard, type(event)) for heard, event in dit.log]
        assert course.index((one, Done)) < course.index((other, Started))


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("AnimateDiffSparseControlNetPipeline", "needs something for its controlnet_frame_indices"),
        ("KandinskyV22PriorPipeline", "makes no images, video or sound.*such as KandinskyV22CombinedPipeline"),
        ("KandinskyV22Pipeline", "takes no prompt.*such as KandinskyV22CombinedPipeline"),
        ("EasyAnimateInpaintPipeline", "needs something for its mask_video"),
        ("DDPMPipeline", "takes no prompt"),
        ("EasyAnimateControlPipeline", "needs something for its control_video.*such as EasyAnimatePipeline"),
        ("IFImg2ImgSuperResolutionPipeline", "needs something for its original_image"),
        ("StableAudio3InpaintPipeline", "needs something other than an image"),
        ("VersatileDiffusionPipeline", "makes no images, video or sound"),
        ("NoSuchPipeline", "diffusers .* has no such pipeline.*code that comes with a checkpoint is not run"),
        (["pipeline", "Mine"], "has no such pipeline"),
    ],
)
def test_what_is_not_served_is_said_before_weights_are_read(tmp_path: Path, name: Any, reason: str) -> None:
    (tmp_path / "model_index.json").write_text(json.dumps({"_class_name": name}))  # there are no weights
    with pytest.raises(ValueError, match=reason):
        load_pipeline(DitSettings(model=str(tmp_path)), only_denoisers=False)


def test_an_argument_that_is_not_taken_is_named(dit: Bench) -> None:
    for fields, field, reason in (
        ({"arguments": '{"clip_skp": 1}'}, "arguments.clip_skp", "takes none; it takes .*clip_skip"),
        ({"arguments": '{"clip_skip": "1"}'}, "arguments.clip_skip", r"must be int \| None"),
        ({"arguments": '{"eta": NaN}'}, "arguments.eta", "must be float"),
        ({"arguments": '{"clip_skip": 100000000}'}, "arguments.clip_skip", "must be at most 8192"),
        ({"arguments": '{"latents": [1]}'}, "arguments.latents", "is not taken here"),
        ({"arguments": '{"num_images_per_prompt": 99}'}, "arguments.num_images_per_prompt", "is not taken here"),
        ({"arguments": "[1]"}, "arguments", "must be a JSON object"),
        ({"arguments": " " * 70_000}, "arguments", "at most 65536"),
        ({"previews": 1}, "previews", "has none"),
        ({"width": 60, "height": 64}, "width", "multiple of 8"),
    ):
        with pytest.raises(InvalidInput, match=reason) as caught:
            order(dit, {"prompt": "a fox", "num_inference_steps": 2} | fields)
        assert caught.value.field == field


def test_no_row_says_what_is_found_anyway() -> None:
    ours = {name: getattr(import_module(module), name) for module, name in OWN.values()}
    for name, row in FAMILIES.items():
        cls = ours.get(name) or getattr(diffusers, name)
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(FAMILIES, name, {})  # type: ignore[arg-type]
            without = family_of(cls)
        assert [key for key, value in row.items() if getattr(without, key) == value] == []
        assert found.why_not(cls) is None
