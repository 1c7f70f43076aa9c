"""The modular pipelines of diffusers: what becomes of each, and diffusers' own calls to compare with."""

# diffusers exports its classes lazily, which pyright does not take for an export:
# pyright: reportPrivateImportUsage=false

import inspect
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import torch
from diffusers.modular_pipelines.modular_pipeline import MODULAR_PIPELINE_MAPPING, ModularPipeline
from PIL import Image

from quartet.v1 import dit_pb2
from services.diffusion import found, modular
from services.diffusion.arguments import needed_texts
from services.dit.__main__ import warm_up
from tests.support.stage.dit_engine import Bench, bench
from tests.support.weights.modular import modular_checkpoint

_OUTPUTS = {"images": "images", "frames": "videos", "audios": "audios"}
_PICTURE = Image.radial_gradient("L").resize((64, 64)).convert("RGB")
_MASK = Image.new("L", (64, 64), 0)
_MASK.paste(255, (0, 0, 32, 64))

HEAD = """# Every modular pipeline of diffusers

What becomes of each [modular pipeline](any-model.md#modular-pipelines) that diffusers {version} exports.
`scripts/modular_pipelines.py` made this page. What a class makes and takes is found from its blocks, without a
checkpoint.

- **served**: tried with a tiny random checkpoint on a CPU, in float32. Two requests of different prompts, seeds and
  numbers of steps give what diffusers' own modular pipeline gives for the same arguments, every value equal: with a
  prompt, and with an image and a mask where the class takes them. Made in turns they give the same. "Steps are shared"
  says that the rules for it were learned.
- **found**: requests can ask for it. It was not tried, as there is no tiny checkpoint of it here.
- Else the reason why no request can ask for it, which the stage says before it reads weights.

| class | models | makes | takes | result |
|---|---|---|---|---|
{rows}
"""


class Plain:
    """diffusers' own modular pipeline of a checkpoint."""

    def __init__(self, checkpoint: Path) -> None:
        self._pipeline: Any = diffusers.ModularPipeline.from_pretrained(str(checkpoint))
        self._pipeline.load_components()
        self._pipeline.set_progress_bar_config(disable=True)
        parts = self._pipeline.components.items()
        self._configs = {name: part.config for name, part in parts if "guider" in name and part is not None}

    def __call__(self, prompt: str, seed: int, **arguments: Any) -> tuple[torch.Tensor, ...]:
        """As an engine's output: floats, with the sound, if there is some. `guidance_scale` and the like are those of
        guiders, as its call has no arguments for them."""
        for name, config in self._configs.items():
            scale = arguments.pop(name.replace("guider", "guidance_scale"), None)
            changed = {} if scale is None else {"guidance_scale": scale}
            guider = type(getattr(self._pipeline, name)).from_config(config, **changed)
            self._pipeline.update_components(**{name: guider})
        generator = torch.Generator("cpu").manual_seed(seed)
        state = self._pipeline(**{"prompt": prompt, "output_type": "np"} | arguments, generator=generator)
        if (audios := state.get("audios")) is not None:
            return (torch.as_tensor(audios[0]).T,)
        data, sound = state.get("images", state.get("videos"))[0], state.get("audio")
        if isinstance(data, Image.Image):
            data = np.asarray(data).astype(np.float32) / 255
        return torch.as_tensor(data), *(() if sound is None else (sound[0].T,))


def names() -> dict[str, list[str]]:
    """Modular class that diffusers exports -> its models, as diffusers maps them."""
    models: dict[str, list[str]] = {}
    for name in sorted(dir(diffusers)):
        cls = getattr(diffusers, name, None)
        if inspect.isclass(cls) and issubclass(cls, ModularPipeline) and cls is not ModularPipeline:
            models[name] = []
    for model, class_of in MODULAR_PIPELINE_MAPPING.items():
        models.setdefault(class_of(None), []).append(model)
    return models


def described(name: str) -> tuple[str, str, str]:
    """What a class makes, what requests bring, and why no request can ask for it (or nothing)."""
    cls = modular.described_class(getattr(diffusers, name))
    result, reason = found.result_of(cls), found.why_not(cls)
    makes = found.RESULTS[result] if result else "-"
    makes += " and sound" if found.soundtrack_of(cls) else ""
    if reason is not None:
        return makes, "-", reason
    takes = ["a prompt", *(f"`{text}`" for text in needed_texts(cls))]
    if found.needs_picture(cls):
        takes.append("an image")
    elif found.picture_of(cls) or "Img2Img" in cls.variants:
        takes.append("an image if there is one")
    if "Inpaint" in cls.variants:
        takes.append("a mask if there is one")
    return makes, ", ".join(takes), ""


def row(name: str, models: list[str], tried: Mapping[str, str]) -> str:
    """A class's line of the table. `tried`: class -> what became of it."""
    makes, takes, reason = described(name)
    result = reason or tried.get(name, "found")
    return f"| {name} | {', '.join(models) or '-'} | {makes} | {takes} | {result} |"


def tried(name: str) -> str:
    """Serves a tiny checkpoint and compares. Returns what the table says. Raises AssertionError: they differ."""
    checkpoint = modular_checkpoint(name)
    plain, also = Plain(checkpoint), []
    with bench(checkpoint, default_size=None) as dit:
        for what, files in _tasks(dit):
            _compare(dit, plain, files)
            also.append(what)
        warm_up(dit.engine)
        assert not dit.info.one_at_a_time
        shared = "steps are shared" if dit.info.batched else f"no steps are shared: {dit.info.not_batched}"
    return f"served ({', '.join(also)}); {shared}"


def _tasks(dit: Bench) -> Iterator[tuple[str, dict[str, Any]]]:
    if not dit.engine.models.family.needs_image:
        yield "a prompt", {}
    if dit.info.max_images:
        yield "an image", {"image": _PICTURE}
    if dit.info.mask:
        yield "a mask", {"image": _PICTURE, "mask_image": _MASK}


def _compare(dit: Bench, plain: Plain, files: dict[str, Any]) -> None:
    info, models = dit.info, dit.engine.models
    cls: Any = type(models.for_request(edits="image" in files, masked="mask_image" in files, from_video=False))
    further: dict[str, Any] = dict.fromkeys(needed_texts(cls), "la")
    if "max_sequence_length" in found.parameters_of(cls):
        further["max_sequence_length"] = 16
    fields: dict[str, Any] = {} if info.sample_rate_hz else {"width": 64, "height": 64}
    if info.frames_multiple:
        fields["num_frames"] = info.frames_multiple + 1
    seconds = {models.family.seconds: 0.2} if info.sample_rate_hz else {}
    pictures: list[Any] = [[files["image"]], files.get("mask_image")] if files else []
    specs, theirs = [], []
    for prompt, seed, steps in (("a red fox", 1, 4), ("a house by the sea", 2, 6)):
        own = {"num_inference_steps": steps, **fields}
        start = dit_pb2.DitStart(prompt=prompt, seed=seed, arguments=json.dumps(further), **own)
        if seconds:
            start.audio_s = 0.2
        specs += dit.orders(start, *pictures)
        kind = {"output_type": "pil"} if cls.only_pil else {}
        theirs.append(plain(prompt, seed, **own, **further, **seconds, **files, **kind))
    watched = dit.submit_together(specs)
    dit.finish(watched)
    for mine, their in zip(watched, theirs, strict=True):
        assert torch.equal(mine.data, their[0])
        assert (mine.soundtrack is None) == (len(their) == 1)
        assert mine.soundtrack is None or torch.equal(mine.soundtrack, their[1])
