"""A small request for any class: as the call in diffusers' test says where a request can say it."""

import json
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from PIL import Image

from quartet.v1 import server_info_pb2
from services.common.errors import InvalidInput
from services.diffusion.arguments import offered, parse
from services.diffusion.found import parameters_of
from services.diffusion.pipelines import Pipelines

_MOST_SIDE = 256  # pixels; a tiny model of which no size is known makes no more
_SIDES = 4  # of a picture where no size is known, in multiples of what sizes are multiples of
_MOST_AUDIO_S = 1.0
_STRENGTH = 0.8  # at least one step of two is left
_TWO_STEPS = "intermediate_timesteps"  # an argument of classes that take two steps alone
_VIDEOS = ("video", "control_video", "conditioning_frames")
_PICTURES = ("image", "control_image", *_VIDEOS)
_PROMPTS = ("a red fox", "a house by the sea")
_CLASSES = ("1", "2")

Given = tuple[dict[str, Any], list[Any], Any, list[Any], list[Any], list[Any]]
"""Fields of a DitStart, pictures, a mask, control images, a video and a control video."""


def small_requests(models: Pipelines, info: server_info_pb2.DitInfo, inputs: Mapping[str, Any]) -> list[Given]:
    """Two of different prompts, seeds and, where the class takes any, numbers of steps.

    Args:
        inputs: arguments of a call of the class.
    """
    fields: dict[str, Any] = {}
    family = models.family
    width, height = _size(info, inputs)
    if "width" in parameters_of(type(models.pipeline)):
        fields |= {"width": width, "height": height}
    if family.guidance and isinstance(value := inputs.get(family.guidance), (int, float)):
        fields["guidance_scale"] = float(value)
    if info.frames_multiple:
        frames, multiple = inputs.get(family.frames) or _frames(inputs), info.frames_multiple
        fields["num_frames"] = max(1, math.ceil((frames - 1) / multiple)) * multiple + 1
    if info.sample_rate_hz:
        fields["audio_s"] = min(float(inputs.get(family.seconds) or _MOST_AUDIO_S), _MOST_AUDIO_S, info.max_audio_s)
    fields["arguments"] = json.dumps(_further(models, info, inputs))
    steps = (2, 2) if _TWO_STEPS in parameters_of(type(models.pipeline)) else (2, 4)
    pictures = [_picture(width, height)] if family.needs_image else []
    mask = _mask(width, height) if family.needs_mask else None
    controls = [_picture(width, height).rotate(90 * (1 + i)) for i in range(info.control_images)]
    frames = [_picture(width, height).rotate(90 * i) for i in range(fields.get("num_frames", 0))]
    video = frames if family.needs_video else []
    control_video = frames[::-1] if info.control_video else []
    prompts = _CLASSES if info.classes else _PROMPTS
    files = pictures, mask, controls, video, control_video
    return [
        (fields | {"prompt": prompt, "seed": 1 + i, "num_inference_steps": steps[i]}, *files)
        for i, prompt in enumerate(prompts)
    ]


def _size(info: server_info_pb2.DitInfo, inputs: Mapping[str, Any]) -> tuple[int, int]:
    """(width, height), which the stage takes."""
    multiple = info.size_multiple or 1
    sides: Any = inputs.get("width"), inputs.get("height")
    picture = next((inputs[name] for name in _PICTURES if name in inputs), None)
    if not all(isinstance(side, int) for side in sides):
        sides = _sides(picture[0] if isinstance(picture, list) and picture else picture)
    if not all(sides):
        sides = (info.default_width, info.default_height)
        if not 0 < max(sides) <= _MOST_SIDE:
            sides = (_SIDES * multiple,) * 2
    width, height = (math.ceil(side / multiple) * multiple for side in sides)
    return width, height


def _frames(inputs: Mapping[str, Any]) -> int:
    """Of the call's video; 1: it has none."""
    videos = (inputs[name] for name in _VIDEOS if isinstance(inputs.get(name), list))
    return next((len(video[0] if isinstance(video[0], list) else video) for video in videos), 1)


def _sides(picture: Any) -> tuple[int, int]:
    """(width, height); 0: they are not known."""
    if isinstance(picture, Image.Image):
        return picture.size
    shape = getattr(picture, "shape", ())
    return (int(shape[-1]), int(shape[-2])) if len(shape) >= 3 else (0, 0)


def _further(models: Pipelines, info: server_info_pb2.DitInfo, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments that requests can name."""
    call = type(models.pipeline)
    further: dict[str, Any] = {}
    for name, value in inputs.items():
        if name not in offered(call) or value is None:
            continue
        try:
            parse(json.dumps({name: value}), call, info.max_inference_steps)
        except (InvalidInput, TypeError):
            continue
        further[name] = value
    if "strength" in further:
        further["strength"] = max(_STRENGTH, float(further["strength"]))
    return further


def _picture(width: int, height: int) -> Image.Image:
    pixels = np.random.default_rng(0).integers(0, 256, (4, 4, 3), dtype=np.uint8)
    return Image.fromarray(pixels).resize((width, height), Image.Resampling.BILINEAR)


def _mask(width: int, height: int) -> Image.Image:
    """The left half is painted anew."""
    mask = Image.new("L", (width, height), 0)
    mask.paste(255, (0, 0, width // 2, height))
    return mask
