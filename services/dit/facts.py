"""What the loaded model takes and makes, as ServerInfo states it."""

from typing import Any

from quartet.v1 import dit_pb2, server_info_pb2
from services.dit.config import PipelineSettings
from services.dit.families import default_of
from services.dit.models import Pipelines


def dit_info(models: Pipelines, settings: PipelineSettings) -> server_info_pb2.DitInfo:
    """What requests of these pipelines are checked against; what the engine adds is left out."""
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
        info.frames_per_second = settings.frames_per_second or family.fps
    if family.media == "sound":
        vae = pipe.vae
        info.max_audio_s = pipe.transformer.config.sample_size * vae.hop_length / vae.config.sampling_rate
        info.default_audio_s = min(settings.default_audio_s, info.max_audio_s)
        info.sample_rate_hz = vae.config.sampling_rate
    return info


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
