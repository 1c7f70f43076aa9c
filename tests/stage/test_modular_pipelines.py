"""Modular pipelines: what the dit makes is bit for bit what diffusers' own modular pipeline makes of a checkpoint."""

# diffusers exports its classes lazily, which pyright does not take for an export:
# pyright: reportPrivateImportUsage=false

import json
import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from PIL import Image

from quartet.v1 import dit_pb2
from services.common.engine.device import Accelerator
from services.common.errors import InvalidInput
from services.common.rpc.digest import checkpoint_digest
from services.diffusion import found, modular
from services.diffusion.arguments import described, parse
from services.diffusion.modular_index import is_modular
from services.diffusion.pipelines import checkpoint_dtype, find_checkpoint
from services.dit import models
from services.dit.config import DitSettings
from services.dit.models import load_pipeline, offload_models
from tests.support.classes.modular import Plain
from tests.support.stage.dit_engine import Bench, bench, check_shared_steps
from tests.support.weights.modular import modular_checkpoint

XL = "StableDiffusionXLModularPipeline"
SMALL = {"width": 64, "height": 64}
FEW = {"num_frames": 5}
SHORT: dict[str, Any] = {"max_sequence_length": 16}
PICTURE = Image.radial_gradient("L").resize((64, 64)).convert("RGB")
OTHER = Image.linear_gradient("L").resize((64, 64)).convert("RGB")
MASK = Image.new("L", (64, 64), 0)
MASK.paste(255, (0, 0, 32, 64))
TASKS = {
    "image": [dit_pb2.DIT_TASK_TEXT_TO_IMAGE, dit_pb2.DIT_TASK_IMAGE_EDIT],
    "video": [dit_pb2.DIT_TASK_TEXT_TO_VIDEO, dit_pb2.DIT_TASK_IMAGE_TO_VIDEO],
    "of a picture": [dit_pb2.DIT_TASK_IMAGE_TO_VIDEO],
}
# Class, what is found, its tasks, arguments of small calls, and those of one call only.
CASES: dict[str, tuple[dict[str, Any], str, dict[str, Any], dict[str, Any]]] = {
    XL: (
        {"default_guidance_scale": 7.5, "default_width": 64, "size_multiple": 8, "mask": True, "denoisers": ["unet"]},
        "image",
        SMALL,
        {"target_size": (32, 64), "negative_prompt_2": "fog"},
    ),
    "FluxModularPipeline": (
        {"default_guidance_scale": 3.5, "default_width": 1024, "size_multiple": 16, "mask": False},
        "image",
        SMALL,
        {"max_sequence_length": 4},
    ),
    "LTXModularPipeline": (
        {"default_guidance_scale": 3.0, "default_width": 704, "default_frames": 161, "frames_per_second": 25.0},
        "video",
        SMALL | FEW,
        {"frame_rate": 8},
    ),
    "LTX2ModularPipeline": (
        {"default_frames": 121, "frames_per_second": 24.0, "soundtrack_rate_hz": 16_000, "denoisers": ["transformer"]},
        "video",
        {"width": 32, "height": 32, "num_frames": 3},
        {"audio_guidance_scale": 2.0},
    ),
    "Wan22Image2VideoModularPipeline": (
        {"default_width": 832, "default_frames": 81, "denoisers": ["transformer", "transformer_2"]},
        "of a picture",
        SMALL | FEW,
        {"guidance_scale_2": 6.0},
    ),
}


@pytest.fixture(scope="module")
def dit() -> Iterator[Bench]:
    with bench(modular_checkpoint(XL), default_size=None) as started:
        yield started


def order(dit: Bench, fields: dict[str, Any], *files: Any) -> Any:
    return dit.orders(dit_pb2.DitStart(**fields), *files)


@pytest.mark.parametrize("name", CASES)
def test_it_is_found_and_is_diffusers_own_alone_and_in_turns(name: str) -> None:
    facts, tasks, small, further = CASES[name]
    always: dict[str, Any] = {} if name == XL else SHORT
    further = always | further
    checkpoint = modular_checkpoint(name)
    plain = Plain(checkpoint)
    needs_picture = len(TASKS[tasks]) == 1
    with bench(checkpoint, default_size=None) as dit:
        assert (dit.info.pipeline, list(dit.info.tasks)) == (name, TASKS[tasks])
        assert {fact: getattr(dit.info, fact) for fact in facts} == facts
        one: dict[str, Any] = {"prompt": "a red fox", "seed": 1, "num_inference_steps": 2, **small}
        short = {"arguments": json.dumps(always)}
        other = one | {"prompt": "a house by the sea", "seed": 2, "num_inference_steps": 3, "guidance_scale": 2.0}
        given: dict[str, Any] = {"image": PICTURE} if needs_picture else {}
        files: list[Any] = [[PICTURE]] if needs_picture else []
        orders = [*order(dit, one | short, *files), *order(dit, other | {"arguments": json.dumps(further)}, *files)]
        theirs = [plain(**one, **given, **always), plain(**other, **given, **further)]
        assert all(data.std() > 0.001 for each in theirs for data in each)
        assert not torch.equal(theirs[1][-1], plain(**other, **given, **always)[-1])  # by `further`
        assert not torch.equal(theirs[1][-1], plain(**other | {"guidance_scale": 9.0}, **given, **further)[-1])
        watched = dit.submit_together(orders)
        dit.finish(watched)
        for mine, their in zip(watched, theirs, strict=True):
            assert torch.equal(mine.data, their[0])
            sound = () if mine.soundtrack is None else (mine.soundtrack,)
            assert all(torch.equal(one, other) for one, other in zip(sound, their[1:], strict=True))
        assert {batch for each in watched for batch in each.batches} == {1}


@pytest.mark.parametrize("name", [XL, "FluxModularPipeline", "LTXModularPipeline"])
def test_steps_are_shared_by_rules_that_were_learned(name: str) -> None:
    small = CASES[name][2] | {"arguments": json.dumps({} if name == XL else SHORT)}
    with bench(modular_checkpoint(name), default_size=None) as dit:
        orders = [
            order(dit, small | {"prompt": prompt, "seed": steps, "num_inference_steps": steps})[0]
            for prompt, steps in (("a red fox", 2), ("a house by the sea", 4), ("x", 3))
        ]
        check_shared_steps(dit, orders)


@pytest.mark.parametrize(
    ("name", "given"),
    [
        (XL, {}),
        (XL, {"mask_image": MASK}),
        ("FluxModularPipeline", {}),
        ("QwenImageModularPipeline", {"mask_image": MASK, "output_type": "pil"}),  # nothing else is taken
        ("LTXModularPipeline", {}),
    ],
)
def test_a_request_with_a_picture_takes_the_blocks_for_it(name: str, given: dict[str, Any]) -> None:
    checkpoint = modular_checkpoint(name)
    still = "LTX" not in name
    fields: dict[str, Any] = {"prompt": "a fox", "seed": 3, "num_inference_steps": 4, **SMALL, **({} if still else FEW)}
    further: dict[str, Any] = {"strength": 0.5} if still else {}
    with bench(checkpoint, default_size=None) as dit:
        asked = fields | {"arguments": json.dumps(further)}
        specs = [order(dit, asked, [picture], given.get("mask_image"))[0] for picture in (PICTURE, OTHER)]
        assert {spec.steps for spec in specs} == {2 if still else 4}
        made = dit.make(specs)
    plain = Plain(checkpoint)
    for mine, picture in zip(made, (PICTURE, OTHER), strict=True):
        assert torch.equal(mine, plain(**fields, **further, **given, image=picture)[0])
    assert not torch.equal(made[0], made[1])


def test_a_scale_of_one_call_is_not_that_of_the_next(dit: Bench) -> None:
    fields = {"prompt": "a fox", "seed": 3, "num_inference_steps": 2}
    before, scaled, after = (order(dit, fields | more)[0] for more in ({}, {"guidance_scale": 2.0}, {}))
    first, other, again = (dit.make([each])[0] for each in (before, scaled, after))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert dit.engine.models.pipeline.guider.guidance_scale == 7.5


def test_arguments_have_the_types_that_the_blocks_say(dit: Bench) -> None:
    types = {each.name: (each.type, each.default) for each in dit.info.arguments}
    assert types["eta"] == ("float", "0.0")  # of its default
    assert types["crops_coords_top_left"] == ("tuple[int, ...]", "[0, 0]")
    assert types["original_size"] == ("tuple[int, int] | None", "null")  # of the pipeline class
    assert not {"latents", "timesteps", "generator", "height", "image", "guidance_scale", "dtype"} & types.keys()
    for arguments, field, reason in (
        ({"eta": "x"}, "eta", "must be float"),
        ({"no_such": 1}, "no_such", "takes none; it takes .*clip_skip"),
        ({"num_images_per_prompt": 4}, "num_images_per_prompt", "is not taken here"),
    ):
        with pytest.raises(InvalidInput, match=reason) as caught:
            order(dit, {"prompt": "a fox", "num_inference_steps": 2, "arguments": json.dumps(arguments)})
        assert caught.value.field == f"arguments.{field}"


def test_a_song_has_lyrics_and_is_diffusers_own() -> None:
    checkpoint = modular_checkpoint("MiniMaxMusic3ModularPipeline")
    plain = Plain(checkpoint)
    further: dict[str, Any] = {"lyrics": "[verse]\nby the sea"}
    with bench(checkpoint, default_size=None) as dit:
        assert (dit.info.sample_rate_hz, list(dit.info.tasks)) == (44_100, [dit_pb2.DIT_TASK_TEXT_TO_AUDIO])
        asked = {"audio_s": 0.2, "arguments": json.dumps(further)}
        one: dict[str, Any] = {"prompt": "a waltz", "seed": 1, "num_inference_steps": 2}
        other: dict[str, Any] = {"prompt": "a march", "seed": 2, "num_inference_steps": 3, "guidance_scale": 3.0}
        made = dit.make([order(dit, fields | asked)[0] for fields in (one, other)])
        for mine, fields in zip(made, (one, other), strict=True):
            (their,) = plain(**fields, **further, audio_duration=0.2)
            assert their.shape[1] == 2
            assert torch.equal(mine, their)
        with pytest.raises(InvalidInput) as caught:
            order(dit, one)
        assert caught.value.field == "arguments.lyrics"


def test_a_text_that_blocks_need_is_required() -> None:
    cls = modular.described_class(diffusers.MiniMaxMusic3ModularPipeline)
    assert found.why_not(cls) is None
    assert [each for each in described(cls) if each["name"] == "lyrics"] == [
        {"name": "lyrics", "type": "str", "default": ""}
    ]
    for text in ("", "{}"):
        with pytest.raises(InvalidInput) as caught:
            parse(text, cls, 50)
        assert caught.value.field == "arguments.lyrics"
    assert parse('{"lyrics": "la"}', cls, 50) == {"lyrics": "la"}


def changed(tmp_path: Path, change: Any) -> Path:
    """A copy of a checkpoint whose index is changed, without weights."""
    source = modular_checkpoint(XL)
    copied = tmp_path / "mine"
    shutil.copytree(source, copied, ignore=shutil.ignore_patterns("*.safetensors"))
    index = json.loads((copied / "modular_model_index.json").read_text())
    change(copied, index)
    (copied / "modular_model_index.json").write_text(json.dumps(index))
    return copied


def _named(name: str, value: Any, folder: Path, index: Any) -> None:
    index[name] = value


def _moved(source: Any, folder: Path, index: Any) -> None:
    shutil.rmtree(folder / "unet")
    index["unet"][2]["pretrained_model_name_or_path"] = source


def _of_library(library: str, folder: Path, index: Any) -> None:
    index["unet"][2]["type_hint"] = [library, "Model"]


def _with_code(folder: Path, index: Any) -> None:
    (folder / "modular_config.json").write_text(json.dumps({"auto_map": {"ModularPipelineBlocks": "block.Mine"}}))
    (folder / "block.py").write_text("raise SystemExit('it ran')")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (partial(_named, "_class_name", "NoSuchModularPipeline"), "no such modular pipeline.*is not run"),
        (partial(_named, "_class_name", ["mine", "Pipeline"]), "no such modular pipeline"),
        (partial(_named, "_class_name", "FluxPipeline"), "no such modular pipeline"),
        (partial(_named, "_blocks_class_name", "MyBlocks"), "names the blocks 'MyBlocks', which diffusers"),
        (partial(_of_library, "my_package"), "unet is my_package.Model, of no library that is served"),
        (partial(_moved, None), "names no files for its unet, which StableDiffusionXLModularPipeline needs"),
        (partial(_moved, "no-such/repository"), "its unet is in no-such/repository, which is neither a directory"),
        (_with_code, "names blocks of the checkpoint's own: code that comes with a checkpoint is not run"),
    ],
)
def test_what_is_not_served_is_said_before_weights_are_read(tmp_path: Path, change: Any, reason: str) -> None:
    checkpoint = changed(tmp_path, change)
    with pytest.raises(ValueError, match=reason):
        load_pipeline(DitSettings(model=str(checkpoint)), only_denoisers=False)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("WanAnimate2ModularPipeline", "takes no number of frames"),
        ("EchoModularPipeline", "takes no number of denoising steps"),
        ("QwenImageLayeredModularPipeline", "makes no images, video or sound"),
    ],
)
def test_blocks_that_no_request_can_ask_for_are_named(tmp_path: Path, name: str, reason: str) -> None:
    (tmp_path / "modular_model_index.json").write_text(
        json.dumps({"_class_name": name} | {part: _entry() for part in ("vae", "transformer")})
    )
    with pytest.raises(ValueError, match=f"{name} {reason}"):
        load_pipeline(DitSettings(model=str(tmp_path)), only_denoisers=False)


def _entry() -> list[Any]:
    return [None, None, {"type_hint": None, "pretrained_model_name_or_path": "no-such/repository"}]


def test_settings_that_do_not_fit_are_refused() -> None:
    refused: tuple[tuple[dict[str, Any], str], ...] = (
        ({"encoders": "stream"}, "encoders=stream"),
        ({"cache": "first-block"}, "does not support caches"),
        ({"controlnet": ("no-such/net",)}, "controlnet"),
    )
    for settings, reason in refused:
        with pytest.raises(ValueError, match=reason):
            load_pipeline(DitSettings(model=str(modular_checkpoint(XL)), **settings), only_denoisers=False)


def test_the_index_of_pipeline_classes_goes_first(tmp_path: Path) -> None:
    checkpoint = changed(tmp_path, lambda folder, index: None)
    assert is_modular(checkpoint)
    assert find_checkpoint(str(checkpoint)) == checkpoint
    before = checkpoint_digest(str(checkpoint))
    (checkpoint / "model_index.json").write_text(json.dumps({"_class_name": "StableDiffusionXLPipeline"}))
    assert not is_modular(checkpoint)
    (checkpoint / "model_index.json").write_text(json.dumps({"_class_name": XL}))
    assert is_modular(checkpoint)  # no pipeline class has that name
    assert checkpoint_digest(str(checkpoint)) != before


def test_components_may_lie_elsewhere_and_have_a_dtype_of_their_own(tmp_path: Path) -> None:
    def move(folder: Path, index: Any) -> None:
        (folder / "unet").rename(tmp_path / "unet")
        shutil.copy(modular_checkpoint(XL) / "unet" / "diffusion_pytorch_model.safetensors", tmp_path / "unet")
        index["unet"][2] |= {"pretrained_model_name_or_path": str(tmp_path)}

    assert checkpoint_dtype(changed(tmp_path, move), "auto") == torch.float32


def test_components_can_be_offloaded(dit: Bench) -> None:
    fields = {"prompt": "a fox", "seed": 3, "num_inference_steps": 2}
    (wanted,) = dit.make(order(dit, fields))
    with pytest.MonkeyPatch.context() as patch:
        place = lambda pipeline, device, offload: offload_models(pipeline, torch.device("cpu"))  # noqa: E731
        patch.setattr(models, "_place", place)
        patch.setattr(Accelerator, "of", lambda device: Accelerator("what stands for a device", (9, 0), 0))
        with bench(modular_checkpoint(XL), default_size=None, offload="model") as offloaded:
            hooked = {hook.model for hook in offloaded.engine.models.pipeline._all_hooks}
            assert offloaded.engine.models.pipeline.unet in hooked
            (made,) = offloaded.make(order(offloaded, fields))
    torch.testing.assert_close(made, wanted, rtol=0, atol=1e-5)  # MKL's sums depend on where in memory weights lie
