"""What the loaded model takes and makes, as ServerInfo says."""

import json
import math
from typing import Any

from quartet.v1 import dit_pb2, server_info_pb2
from services.diffusion import beside, found, loaded, nets
from services.diffusion.arguments import described, needed_texts
from services.diffusion.config import PipelineSettings
from services.diffusion.found import default_of, parameters_of
from services.diffusion.pictures import Pictures
from services.diffusion.pipelines import Pipelines
from services.diffusion.request import OutputSpec, resolve

_MAX_SIDE = 8192  # pixels, where the model takes that many
_WARM_UP_SIDES = 4  # of the warm-up's output, in multiples of what sizes are multiples of
_WARM_UP_STEPS = 2
_WARM_UP_PROMPTS = ("warm", "a cold day by the sea", "cold")
_WARM_UP_CLASSES = ("0", "1", "1")
_USUAL_STEPS = 50  # where a class says none
_DEFAULT_AUDIO_S = 10.0
_WARM_UP_AUDIO_S = 1.0

_OWN_TASKS = {
    ("image", False): dit_pb2.DIT_TASK_TEXT_TO_IMAGE,
    ("image", True): dit_pb2.DIT_TASK_IMAGE_EDIT,
    ("video", False): dit_pb2.DIT_TASK_TEXT_TO_VIDEO,
    ("video", True): dit_pb2.DIT_TASK_IMAGE_TO_VIDEO,
    ("sound", False): dit_pb2.DIT_TASK_TEXT_TO_AUDIO,
}
_FROM_IMAGES = {"image": dit_pb2.DIT_TASK_IMAGE_EDIT, "video": dit_pb2.DIT_TASK_IMAGE_TO_VIDEO}
"""Family's (media, needs_image) -> what its pipelines do."""


def dit_info(models: Pipelines, settings: PipelineSettings) -> server_info_pb2.DitInfo:
    """What requests are checked against. Raises ValueError, which names a setting that does not fit."""
    family, pipe = models.family, models.pipeline
    call, size, guidance = type(pipe), settings.default_size, settings.default_guidance_scale
    width, height = map(int, size.split("x")) if size else family.size(pipe)
    if guidance is None:
        guidance = default_of(call, family.guidance) or 0
    elif not family.guidance:
        raise ValueError(f"default_guidance_scale: {call.__name__} takes no guidance; leave it out")
    info = server_info_pb2.DitInfo(
        tasks=_tasks(models),
        pipeline=call.__name__,
        default_width=width,
        default_height=height,
        size_multiple=family.size_multiple(pipe) if size else math.gcd(family.size_multiple(pipe), width, height),
        max_side=min(_MAX_SIDE, family.max_side(pipe)),
        default_inference_steps=settings.default_inference_steps
        or min(default_of(call, "num_inference_steps") or _USUAL_STEPS, settings.max_inference_steps),
        default_guidance_scale=guidance,
        negative_prompt=family.negative,
        max_prompt_tokens=family.max_prompt_tokens(pipe),
        max_images=family.images or int(not models.pipelines.keys().isdisjoint(("edit", "inpaint"))),
        mask="inpaint" in models.pipelines,
        control_images=nets.control_images(pipe),
        control_video=bool(found.control_video_of(call)),
        continues_video=found.continues_video(type(models.pipelines.get("of_video", pipe))),
        classes=loaded.classes(pipe),
        reads_context=found.reads_context(call),
        denoisers=loaded.denoisers(pipe),
        arguments=[server_info_pb2.DitArgument(**facts) for facts in described(call)],
        without_previews=not family.listed,
        **settings.model_dump(include={"max_pixels", "max_inference_steps", "max_count"}),
    )
    if family.media == "video":
        multiple = loaded.frames_multiple(pipe)
        info.frames_multiple, info.max_frames = multiple, (settings.max_frames - 1) // multiple * multiple + 1
        info.default_frames = min(loaded.own_frames(pipe, family.frames), info.max_frames)
        info.max_video_pixels = settings.max_video_pixels
        info.frames_per_second = getattr(pipe, "fps", None) or family.fps
        info.soundtrack_rate_hz = beside.soundtrack_rate_hz(pipe)
        for argument in info.arguments:
            if argument.name == beside.sound_switch(call):
                argument.default = json.dumps(bool(info.soundtrack_rate_hz))
    if family.media == "sound":
        info.sample_rate_hz = loaded.sample_rate_hz(pipe)
        info.max_audio_s = family.max_audio_s(pipe)
        info.default_audio_s = min(default_of(call, family.seconds) or _DEFAULT_AUDIO_S, info.max_audio_s)
    _check_settings(info)
    return info


def _check_settings(info: server_info_pb2.DitInfo) -> None:
    """Refuses limits that defaults or the warm-up exceed."""
    if info.default_inference_steps > info.max_inference_steps:
        raise ValueError(f"default_inference_steps: must be at most max_inference_steps, {info.max_inference_steps}")
    if info.sample_rate_hz:
        return
    width, height, multiple = info.default_width, info.default_height, info.size_multiple
    if width % multiple or height % multiple:
        raise ValueError(f"default_size: {width}x{height} must be multiples of {multiple}, as this model's sizes are")
    least = _warm_up_side(info) ** 2
    if info.max_pixels < least:
        raise ValueError(f"max_pixels: must be at least {least}, which the warm-up makes")
    if width * height > info.max_pixels or max(width, height) > info.max_side:
        limits = f"max_pixels, {info.max_pixels}, or the longest side, {info.max_side}"
        raise ValueError(f"default_size: {width}x{height} is over {limits}")
    if info.frames_multiple and info.max_frames <= info.frames_multiple:
        raise ValueError(f"max_frames: must be at least {info.frames_multiple + 1} for this model")


def _tasks(models: Pipelines) -> list[dit_pb2.DitTask]:
    """The checkpoint's own task first."""
    family = models.family
    tasks = [] if family.needs_video else [_OWN_TASKS[family.media, family.needs_image]]
    if family.stills:
        tasks.append(dit_pb2.DIT_TASK_TEXT_TO_IMAGE)
    if "edit" in models.pipelines and family.media in _FROM_IMAGES:
        tasks.append(_FROM_IMAGES[family.media])
    if "of_video" in models.pipelines:
        tasks.append(dit_pb2.DIT_TASK_VIDEO_TO_VIDEO)
    return tasks


def warm_up_output(models: Pipelines, info: server_info_pb2.DitInfo, number: int = 0, times: int = 1) -> OutputSpec:
    """A small output of few steps, of pictures where the family needs some.

    Args:
        number: 0; 1 has a longer prompt, other pictures, another seed, and two steps more; 2 has that, but a prompt as
            long as 0's.
        times: of its least sides.
    """
    side, family = times * _warm_up_side(info), models.family
    start = dit_pb2.DitStart(prompt=(_WARM_UP_CLASSES if info.classes else _WARM_UP_PROMPTS)[number], seed=number)
    start.num_inference_steps = _WARM_UP_STEPS * (2 if number else 1)
    if family.needs_image or "width" in parameters_of(type(models.pipeline)):
        start.width = start.height = side
    if info.frames_multiple:
        start.num_frames = info.frames_multiple + 1
    if info.sample_rate_hz and not family.listed:
        start.audio_s = min(_WARM_UP_AUDIO_S, info.max_audio_s)
    pictures = _warm_up_pictures(models, info, side, number) if side else Pictures()
    further: dict[str, Any] = dict.fromkeys(needed_texts(type(models.pipeline)), _WARM_UP_PROMPTS[number])
    if nets.needs_control_modes(models.pipeline):
        further["control_mode"] = [0] * info.control_images if nets.takes_several(models.pipeline) else 0
    start.arguments = json.dumps(further) if further else ""
    return resolve(start, pictures, models, info)[0]


def _warm_up_pictures(models: Pipelines, info: server_info_pb2.DitInfo, side: int, number: int) -> Pictures:
    from PIL import Image

    draw = Image.radial_gradient if number else Image.linear_gradient
    grey = draw("L").resize((side, side))
    mask = grey.point([0] * 128 + [255] * 128) if models.family.needs_mask else None
    picture = grey.convert("RGB")
    video = [picture.rotate(90 * (i % 4)) for i in range(info.frames_multiple + 1)]
    return Pictures(
        [picture] if models.family.needs_image else [],
        mask,
        [picture] * info.control_images,
        video if models.family.needs_video else [],
        video if info.control_video else [],
    )


def _warm_up_side(info: server_info_pb2.DitInfo) -> int:
    """Width and height, in pixels; 0 for sound."""
    return 0 if info.sample_rate_hz else _WARM_UP_SIDES * info.size_multiple
