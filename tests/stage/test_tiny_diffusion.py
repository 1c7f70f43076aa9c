"""`quartet tiny` of diffusion families: diffusers loads and runs them, and every input shows in what they make."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers.pipelines.pipeline_utils import DiffusionPipeline
from PIL import Image
from transformers import AutoModelForImageTextToText

from cli.tiny import make_checkpoint
from tests.support.families import IN_PROCESS, small_edits
from tests.support.weights.checkpoints import diffusion_checkpoint

__all__ = ["small_edits"]  # the fixture

pytestmark = pytest.mark.usefixtures("small_edits")
PIPELINES = {
    "sd3": "StableDiffusion3Pipeline",
    "flux": "FluxPipeline",
    "flux2-klein": "Flux2KleinPipeline",
    "qwen-image": "QwenImagePipeline",
    "qwen-image-edit": "QwenImageEditPlusPipeline",
    "z-image": "ZImagePipeline",
    "glm-image": "GlmImagePipeline",
    "wan": "WanPipeline",
    "wan-i2v": "WanImageToVideoPipeline",
    "stable-audio": "StableAudioPipeline",
    "cosmos3": "Cosmos3OmniPipeline",
}
SIDE = 64  # pixels
VIDEOS = ("wan", "wan-i2v", "cosmos3")
SHAPES = dict.fromkeys(VIDEOS, (5, SIDE, SIDE, 3)) | {"stable-audio": (2, 22_050)}
GUIDANCE = {"qwen-image": "true_cfg_scale", "qwen-image-edit": "true_cfg_scale"}
WITHOUT_NEGATIVE_PROMPT = ("flux2-klein", "glm-image")
PICTURE = Image.fromarray(np.random.default_rng(0).integers(0, 255, (32, 32, 3), dtype=np.uint8))


@pytest.fixture(scope="module", params=[*IN_PROCESS, "cosmos3"])
def family(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def directory(family: str) -> Path:
    return diffusion_checkpoint(family)


@pytest.fixture(scope="module")
def run(family: str, directory: Path) -> Any:
    """Runs the loaded pipeline: seed, prompt and guidance -> what it made, as an array."""
    pipeline: Any = DiffusionPipeline.from_pretrained(directory)
    pipeline.set_progress_bar_config(disable=True)

    @cache
    def make(seed: int = 0, prompt: str = "a red house by the sea", guidance: float = 4.0) -> np.ndarray:
        arguments: dict[str, Any] = {"prompt": prompt, GUIDANCE.get(family, "guidance_scale"): guidance}
        if family not in WITHOUT_NEGATIVE_PROMPT:
            arguments["negative_prompt"] = "fog"
        if family == "stable-audio":
            arguments["audio_end_in_s"] = 0.5
        else:
            arguments |= {"width": SIDE, "height": SIDE, "output_type": "np"}
        if family in VIDEOS:
            arguments["num_frames"] = 5
        if family in ("wan-i2v", "qwen-image-edit"):
            arguments["image"] = PICTURE
        generator = torch.Generator("cpu").manual_seed(seed)
        made = pipeline(**arguments, generator=generator, num_inference_steps=2, return_dict=False)[0]
        made = made if family == "cosmos3" else made[0]  # of a batch
        return made.numpy() if torch.is_tensor(made) else made

    return make


def test_diffusers_loads_it_as_the_published_pipeline(family: str, directory: Path) -> None:
    assert json.loads((directory / "model_index.json").read_text())["_class_name"] == PIPELINES[family]
    assert sum(file.stat().st_size for file in directory.rglob("*") if file.is_file()) < 12e6


def test_it_makes_something(family: str, run: Any) -> None:
    made = run()
    assert made.shape == SHAPES.get(family, (SIDE, SIDE, 3))
    assert np.isfinite(made).all()
    assert made.std() > 0.02
    if family != "stable-audio":
        assert ((made == 0) | (made == 1)).mean() < 0.2  # clipped values hide differences


def test_a_seed_makes_the_same_again_and_another_seed_something_else(run: Any) -> None:
    first = run()
    assert np.abs(run(seed=1) - first).mean() > 0.02
    assert np.array_equal(run.__wrapped__(), first)


def test_prompt_and_guidance_show(run: Any) -> None:
    assert np.abs(run(prompt="the quiet train leaves at seven") - run()).mean() > 0.002
    assert np.abs(run(guidance=1.5) - run()).mean() > 0.002


def test_the_sizes_differ_in_every_dimension_of_the_denoiser(family: str, directory: Path, tmp_path: Path) -> None:
    small = make_checkpoint(tmp_path, 0, "small", family)
    one, other = (json.loads((path / "transformer/config.json").read_text()) for path in (directory, small))
    of_z_image = ("dim", "n_layers", "n_refiner_layers", "n_heads", "cap_feat_dim")
    of_cosmos3 = ("hidden_size", "num_hidden_layers", "head_dim", "latent_channel")
    keys = ("in_channels", "num_layers", "num_attention_heads", "attention_head_dim", *of_z_image, *of_cosmos3)
    compared = [key for key in keys if key in one]
    assert len(compared) >= 4
    assert not [key for key in compared if one[key] == other[key]]


def test_a_seed_makes_the_same_weights_again_and_another_seed_others(tmp_path: Path) -> None:
    a, b, c = (make_checkpoint(tmp_path / name, seed, "tiny", "flux") for name, seed in (("a", 3), ("b", 3), ("c", 4)))
    for file in ("transformer/diffusion_pytorch_model.safetensors", "text_encoder/model.safetensors"):
        assert (a / file).read_bytes() == (b / file).read_bytes()
        assert (a / file).read_bytes() != (c / file).read_bytes()


@pytest.mark.parametrize(("size", "sounds"), [("tiny", True), ("small", False)])
def test_a_checkpoint_that_understands_too_is_read_whole_by_transformers(size: str, sounds: bool) -> None:
    directory = diffusion_checkpoint("cosmos3", size=size)
    pipeline: Any = DiffusionPipeline.from_pretrained(directory)
    assert (pipeline.sound_tokenizer is not None, pipeline.safety_checker) == (sounds, None)
    loaded: Any = AutoModelForImageTextToText.from_pretrained(directory, output_loading_info=True)
    model, report = loaded
    assert type(model).__name__ == "Cosmos3OmniForConditionalGeneration"
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    mine, theirs = model.model.language_model.layers[1].self_attn, pipeline.transformer.layers[1].self_attn
    assert torch.equal(mine.q_proj.weight, theirs.to_q.weight)


@pytest.mark.parametrize("size", ["tiny", "small"])
def test_qwen_images_fixed_text_has_as_many_tokens_as_published(size: str) -> None:
    # The pipelines drop the states of that many tokens in front of the prompt.
    from cli.tiny.parts import SIZES
    from cli.tiny.vision_language import qwen_image, qwen_image_edit

    for build in (qwen_image, qwen_image_edit):
        pipeline = build(SIZES[size])
        fixed_text = pipeline.prompt_template_encode.split("{}")[0]
        assert len(pipeline.tokenizer(fixed_text).input_ids) == pipeline.prompt_template_encode_start_idx
