"""What the loaded model takes and makes, as ServerInfo states it."""

from typing import Any

from quartet.v1 import dit_pb2, server_info_pb2
from services.diffusion.config import PipelineSettings
from services.diffusion.families import default_of
from services.diffusion.pipelines import Pipelines

_WARM_UP_SIDES = 4  # of the warm-up's output, in multiples of what sizes are multiples of


def warm_up_side(info: server_info_pb2.DitInfo) -> int:
    """Width and height of the warm-up's output, in pixels; 0 for sound."""
    return 0 if info.sample_rate_hz else _WARM_UP_SIDES * info.size_multiple


def dit_info(models: Pipelines, settings: PipelineSettings) -> server_info_pb2.DitInfo:
    """What requests of these pipelines are checked against; what the engine adds is left out.

    Raises:
        ValueError: settings that contradict each other or the model; names the one at fault.
    """
    family, pipe = models.family, models.pipeline
    call = type(pipe)
    width, height = settings.default_width_height or (_default_size(pipe, family.size) if family.size[0] else (0, 0))
    info = server_info_pb2.DitInfo(
        tasks=_tasks(models),
        pipeline=call.__name__,
        default_width=width,
        default_height=height,
        size_multiple=family.size_multiple(pipe),
        max_pixels=settings.max_pixels,
        max_side=min(settings.max_side, family.max_side(pipe)),
        default_inference_steps=settings.default_inference_steps or default_of(call, "num_inference_steps"),
        max_inference_steps=settings.max_inference_steps,
        default_guidance_scale=_guidance(settings, default_of(call, family.guidance)),
        negative_prompt=family.negative,
        max_prompt_tokens=default_of(call, "max_sequence_length") or family.max_prompt_tokens,
        max_images=family.images or int("edit" in models.pipelines or "inpaint" in models.pipelines),
        mask="inpaint" in models.pipelines,
        max_count=settings.max_count,
    )
    if family.media == "video":
        multiple = pipe.vae_scale_factor_temporal
        info.default_frames = settings.default_frames or default_of(call, "num_frames")
        info.frames_multiple, info.max_frames = multiple, settings.frame_limit(multiple)
        info.max_video_pixels = settings.max_video_pixels
        info.frames_per_second = settings.frames_per_second or family.fps
    if family.media == "sound":
        vae = pipe.vae
        info.max_audio_s = pipe.transformer.config.sample_size * vae.hop_length / vae.config.sampling_rate
        info.default_audio_s = min(settings.default_audio_s, info.max_audio_s)
        info.sample_rate_hz = vae.config.sampling_rate
    _check_settings(info, settings)
    return info


def _check_settings(info: server_info_pb2.DitInfo, settings: PipelineSettings) -> None:
    """Defaults and the warm-up have to be within the limits."""
    if info.default_inference_steps > info.max_inference_steps:
        info.default_inference_steps = info.max_inference_steps
        if settings.default_inference_steps is not None:
            raise ValueError(
                f"default_inference_steps: must be at most max_inference_steps, {info.max_inference_steps}"
            )
    if info.sample_rate_hz:
        return
    width, height, multiple = info.default_width, info.default_height, info.size_multiple
    if width % multiple or height % multiple:
        raise ValueError(f"default_size: {width}x{height} must be multiples of {multiple}, as this model's sizes are")
    least = warm_up_side(info) ** 2
    if info.max_pixels < least:
        raise ValueError(f"max_pixels: must be at least {least}, which the warm-up makes")
    if width * height > info.max_pixels or max(width, height) > info.max_side:
        raise ValueError(
            f"default_size: {width}x{height} is over max_pixels, {info.max_pixels}, or max_side, {info.max_side}"
        )
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
    media, needs_image = models.family.media, models.family.needs_image
    if media == "video":
        return [dit_pb2.DIT_TASK_IMAGE_TO_VIDEO if needs_image else dit_pb2.DIT_TASK_TEXT_TO_VIDEO]
    if media == "sound":
        return [dit_pb2.DIT_TASK_TEXT_TO_AUDIO]
    tasks = [] if needs_image else [dit_pb2.DIT_TASK_TEXT_TO_IMAGE]
    if needs_image or "edit" in models.pipelines:
        tasks.append(dit_pb2.DIT_TASK_IMAGE_EDIT)
    return tasks


def _default_size(pipe: Any, size: tuple[int, int]) -> tuple[int, int]:
    """What the pipeline itself would take, where it says so: a checkpoint may be smaller than its family."""
    side = getattr(pipe, "default_sample_size", None)
    return (side * pipe.vae_scale_factor,) * 2 if isinstance(side, int) else size


def _guidance(settings: PipelineSettings, default: float | None) -> float:
    return settings.default_guidance_scale if settings.default_guidance_scale is not None else default or 0.0
