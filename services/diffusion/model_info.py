"""What the loaded model takes and makes, as ServerInfo states it."""

from typing import Any

from quartet.v1 import dit_pb2, server_info_pb2
from services.diffusion.config import PipelineSettings
from services.diffusion.families import default_of
from services.diffusion.pipelines import Pipelines
from services.diffusion.request import OutputSpec, resolve

_WARM_UP_SIDES = 4  # of the warm-up's output, in multiples of what sizes are multiples of
_WARM_UP_STEPS = 2

_OWN_TASKS = {
    ("image", False): dit_pb2.DIT_TASK_TEXT_TO_IMAGE,
    ("image", True): dit_pb2.DIT_TASK_IMAGE_EDIT,
    ("video", False): dit_pb2.DIT_TASK_TEXT_TO_VIDEO,
    ("video", True): dit_pb2.DIT_TASK_IMAGE_TO_VIDEO,
    ("sound", False): dit_pb2.DIT_TASK_TEXT_TO_AUDIO,
}
"""Family's (media, needs_image) -> what its pipelines do."""


def dit_info(models: Pipelines, settings: PipelineSettings) -> server_info_pb2.DitInfo:
    """What requests of these pipelines are checked against; what the engine adds is left out.

    Raises:
        ValueError: settings that contradict each other or the model; names the one at fault.
    """
    family, pipe = models.family, models.pipeline
    call, size, guidance = type(pipe), settings.default_size, settings.default_guidance_scale
    width, height = map(int, size.split("x")) if size else _own_size(pipe, family.size)
    info = server_info_pb2.DitInfo(
        tasks=_tasks(models),
        pipeline=call.__name__,
        default_width=width,
        default_height=height,
        size_multiple=family.size_multiple(pipe),
        max_pixels=settings.max_pixels,
        max_side=min(settings.max_side, family.max_side(pipe)),
        default_inference_steps=settings.default_inference_steps
        or min(default_of(call, "num_inference_steps"), settings.max_inference_steps),
        max_inference_steps=settings.max_inference_steps,
        default_guidance_scale=default_of(call, family.guidance) if guidance is None else guidance,
        negative_prompt=family.negative,
        max_prompt_tokens=default_of(call, "max_sequence_length") or family.max_prompt_tokens,
        max_images=family.images or int(bool(models.pipelines)),
        mask="inpaint" in models.pipelines,
        max_count=settings.max_count,
    )
    if family.media == "video":
        multiple = pipe.vae_scale_factor_temporal
        info.default_frames = settings.default_frames or default_of(call, "num_frames")
        info.frames_multiple, info.max_frames = multiple, (settings.max_frames - 1) // multiple * multiple + 1
        info.max_video_pixels = settings.max_video_pixels
        info.frames_per_second = settings.frames_per_second or family.fps
    if family.media == "sound":
        vae = pipe.vae
        info.max_audio_s = pipe.transformer.config.sample_size * vae.hop_length / vae.config.sampling_rate
        info.default_audio_s = min(settings.default_audio_s, info.max_audio_s)
        info.sample_rate_hz = vae.config.sampling_rate
    _check_settings(info)
    return info


def _check_settings(info: server_info_pb2.DitInfo) -> None:
    """Defaults and the warm-up have to be within the limits."""
    if info.default_inference_steps > info.max_inference_steps:
        raise ValueError(f"default_inference_steps: must be at most max_inference_steps, {info.max_inference_steps}")
    if info.sample_rate_hz:
        return
    width, height, multiple = info.default_width, info.default_height, info.size_multiple
    most, side = info.max_pixels, info.max_side
    if width % multiple or height % multiple:
        raise ValueError(f"default_size: {width}x{height} must be multiples of {multiple}, as this model's sizes are")
    least = _warm_up_side(info) ** 2
    if most < least:
        raise ValueError(f"max_pixels: must be at least {least}, which the warm-up makes")
    if width * height > most or max(width, height) > side:
        raise ValueError(f"default_size: {width}x{height} is over max_pixels, {most}, or max_side, {side}")
    if info.frames_multiple:
        if info.max_frames <= info.frames_multiple:
            raise ValueError(f"max_frames: must be at least {info.frames_multiple + 1} for this model")
        if info.default_frames > info.max_frames or (info.default_frames - 1) % info.frames_multiple:
            raise ValueError(
                f"default_frames: {info.default_frames} must be 1 more than a multiple of {info.frames_multiple}, "
                f"at most {info.max_frames}"
            )


def _tasks(models: Pipelines) -> list[dit_pb2.DitTask]:
    """The checkpoint's own task first."""
    own = _OWN_TASKS[models.family.media, models.family.needs_image]
    return [own, dit_pb2.DIT_TASK_IMAGE_EDIT] if "edit" in models.pipelines else [own]


def _own_size(pipe: Any, size: tuple[int, int]) -> tuple[int, int]:
    """What the pipeline itself would take, where it says so: a checkpoint may be smaller than its family."""
    side = getattr(pipe, "default_sample_size", None)
    return (side * pipe.vae_scale_factor,) * 2 if isinstance(side, int) else size


def warm_up_output(models: Pipelines, info: server_info_pb2.DitInfo) -> OutputSpec:
    """A small output of few steps, from a grey picture where the family needs one."""
    from PIL import Image

    side = _warm_up_side(info)
    start = dit_pb2.DitStart(prompt="warm-up", seed=0, width=side, height=side, num_inference_steps=_WARM_UP_STEPS)
    if info.frames_multiple:
        start.num_frames = info.frames_multiple + 1
    images = [Image.new("RGB", (side, side), "gray")] if models.family.needs_image else []
    return resolve(start, images, None, models, info)[0]


def _warm_up_side(info: server_info_pb2.DitInfo) -> int:
    """Width and height, in pixels; 0 for sound."""
    return 0 if info.sample_rate_hz else _WARM_UP_SIDES * info.size_multiple
