"""A request (DitStart) that `checks.check` found good, resolved into a pipeline's calls."""

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from diffusers.pipelines.pipeline_utils import DiffusionPipeline

from quartet.v1 import dit_pb2, server_info_pb2
from services.common.errors import InvalidInput, require
from services.diffusion.arguments import FIELD, parse
from services.diffusion.beside import sound_switch
from services.diffusion.checks import check_frames, check_size
from services.diffusion.conditioning import Conditioning
from services.diffusion.found import (
    CONTEXT,
    LABELS,
    RATES,
    Media,
    continues_video,
    control_of,
    control_video_of,
    default_of,
    mask_of,
    parameters_of,
    picture_of,
    video_of,
)
from services.diffusion.labels import label_of
from services.diffusion.nets import needs_control_modes, takes_several
from services.diffusion.pictures import Pictures, fitted
from services.diffusion.pipelines import Pipelines

if TYPE_CHECKING:
    from PIL.Image import Image

MAX_FRAME_RATE = 240.0
_SEEDS = 1 << 64
_LANCZOS = 1  # PIL's filter, and that of diffusers


@dataclass(frozen=True)
class OutputSpec:
    """What to make.

    Attributes:
        pipeline: shared by all outputs of its kind.
        arguments: of its call, without generator, output type and callbacks.
        seed: of the noise.
        result: the field of the pipeline's result, which has `media`.
        still: whether an image is wanted of a pipeline that makes videos.
        soundtrack: the field of a video's sound; empty: it has none.
        conditioning: what is known of the prompt; the rest will be kept there.
        loras: (adapter, weight), sorted; the others are off.
        preview_steps: after which steps (from 1) a preview is made.
        steps: denoising steps.
        floats: whether the result stays float32; sound always does.
        frames_per_second: of a video.
    """

    pipeline: DiffusionPipeline
    arguments: Mapping[str, Any]
    seed: int
    result: str
    media: Media
    still: bool
    soundtrack: str
    conditioning: Conditioning
    loras: tuple[tuple[str, float], ...]
    preview_steps: frozenset[int]
    steps: int
    floats: bool
    frames_per_second: float


def resolve(
    start: dit_pb2.DitStart,
    pictures: Pictures,
    pipelines: Pipelines,
    info: server_info_pb2.DitInfo,
    given: Sequence[Conditioning] = (),
) -> list[OutputSpec]:
    """The outputs of a request that `check` found good, with all defaults. Tokenizes the prompt: call it in a thread.

    Args:
        pictures: those of `start`, decoded; the mask is white where the first picture is painted anew, and of its size.
        given: what the encoders made, for each output or for all; empty: this process has the encoders.

    Raises:
        InvalidInput: the prompt is too long, or there are too few steps for this model or task.
    """
    _check_prompt(start, pipelines, info)
    images, mask, controls, video, control_video = pictures
    pipeline = pipelines.for_request(edits=bool(images), masked=mask is not None, from_video=bool(video))
    cls = type(pipeline)
    family, further = pipelines.family, parse(start.arguments, cls, info.max_inference_steps)
    still = family.stills and start.task == dit_pb2.DIT_TASK_TEXT_TO_IMAGE
    require(mask is not None or not family.needs_mask, "mask", f"{info.pipeline} needs one")
    arguments = _arguments(start, pipelines, info)
    follows_picture = bool(images) and family.listed and pipeline is pipelines.pipeline
    arguments |= _size(start, info, images or controls, follows_picture)
    if still:
        arguments[family.frames] = 1
    arguments |= _soundtrack(cls, info, still, further)
    arguments |= _videos(cls, family.frames, video, control_video)
    if video or control_video:
        check_size(arguments["width"], arguments["height"], info)  # of a long and narrow video
        frames = arguments.get(family.frames) or len(video)
        check_frames(arguments["width"], arguments["height"], frames, start, info)
    if images:
        several = pipeline is pipelines.pipeline and family.images > 1
        if not family.scales and arguments.get("width"):
            images = [images[0].resize((arguments["width"], arguments["height"]), _LANCZOS)]
        arguments[picture_of(cls)] = list(images) if several else images[0]
    if start.context:
        of_context = [part.image for part in start.context if part.HasField("image")]
        arguments[CONTEXT] = [images[p.image] if p.HasField("image") else p.text for p in start.context]
        arguments[picture_of(cls)] = [each for i, each in enumerate(images) if i not in of_context]
    if mask is not None:
        arguments[mask_of(cls)] = mask
    if controls:
        several = takes_several(pipeline)
        arguments[control_of(cls)] = list(controls) if several else controls[0]
        if several and "adapter_conditioning_scale" in parameters_of(cls):  # a number is not taken for each
            arguments["adapter_conditioning_scale"] = [1.0] * len(controls)
        named = not needs_control_modes(pipeline) or "control_mode" in further
        require(named, "arguments.control_mode", "is required: the kind of control image, by its number in the net")
    taken = parameters_of(cls)
    if start.width and "width" not in taken and not (images or video or control_video):
        raise InvalidInput("width", f"{info.pipeline} takes no size; leave width and height out")
    arguments = {name: value for name, value in arguments.items() if name in taken} | further
    steps = _denoising_steps(start, pipelines, pipeline, arguments)
    seed, count = start.seed if start.HasField("seed") else secrets.randbits(32), start.count or 1
    loras = tuple(sorted((lora.name, lora.weight) for lora in start.loras))
    first, *others = given or [Conditioning(cache=pipelines.encodings, adapters=loras)]
    conditionings = [first, *(others or (first.for_another_seed() for _ in range(1, count)))]
    return [
        OutputSpec(
            pipeline,
            arguments,
            (seed + i) % _SEEDS,
            family.result,
            family.media,
            still,
            family.soundtrack,
            conditionings[i],
            loras=loras,
            preview_steps=_preview_steps(start.previews, steps),
            steps=steps,
            floats=start.pixel_format == dit_pb2.PIXEL_FORMAT_FLOAT32 or bool(info.sample_rate_hz),
            frames_per_second=_rate(further, info),
        )
        for i in range(count)
    ]


def _rate(further: Mapping[str, Any], info: server_info_pb2.DitInfo) -> float:
    """Frames a second of a video: as a further argument says, for which the model makes it, else the model's."""
    for name in (name for name in RATES if info.frames_multiple and name in further):
        require(0 < further[name] <= MAX_FRAME_RATE, f"{FIELD}.{name}", f"must be above 0, at most {MAX_FRAME_RATE:g}")
        return further[name]
    return info.frames_per_second


def _denoising_steps(
    start: dit_pb2.DitStart, pipelines: Pipelines, pipeline: DiffusionPipeline, arguments: Mapping[str, Any]
) -> int:
    """Steps that an output takes, of those requested."""
    requested: int = arguments["num_inference_steps"]
    if requested < pipelines.family.min_steps:
        raise InvalidInput("num_inference_steps", f"must be at least {pipelines.family.min_steps} for this model")
    strength = arguments.get("strength", default_of(type(pipeline), "strength"))
    if strength is None:
        return requested
    steps = min(requested, int(requested * strength))  # an edit noises the picture, and leaves the first steps out
    require(steps > 0, "num_inference_steps", "is too few for an edit; take at least 2")
    require(start.previews < steps, "previews", f"must be fewer than the {steps} steps that this edit takes")
    return steps


def _preview_steps(previews: int, steps: int) -> frozenset[int]:
    """After which of `steps` steps previews are made: evenly, not after the last."""
    return frozenset(round(steps * (i + 1) / (previews + 1)) for i in range(previews)) - {0, steps}


def _check_prompt(start: dit_pb2.DitStart, pipelines: Pipelines, info: server_info_pb2.DitInfo) -> None:
    if not info.max_prompt_tokens:
        return
    for field, text in (("prompt", start.prompt), ("negative_prompt", start.negative_prompt)):
        tokens = pipelines.count_tokens(text)
        if tokens > info.max_prompt_tokens:
            raise InvalidInput(field, f"has {tokens} tokens; at most {info.max_prompt_tokens} are read: shorten it")
    if start.context:
        tokens = sum(map(pipelines.count_tokens, (start.prompt, *(part.text for part in start.context))))
        if tokens > info.max_prompt_tokens:
            most = f"at most {info.max_prompt_tokens} are read: leave out the oldest parts"
            raise InvalidInput("context", f"has {tokens} tokens with the prompt; {most}")


def _arguments(start: dit_pb2.DitStart, pipelines: Pipelines, info: server_info_pb2.DitInfo) -> dict[str, Any]:
    family = pipelines.family
    arguments: dict[str, Any] = {
        "prompt": start.prompt,
        "num_inference_steps": start.num_inference_steps or info.default_inference_steps,
    }
    if info.classes:
        arguments[LABELS] = [label_of(pipelines.pipeline, start.prompt, info.classes)]
    if start.HasField("guidance_scale"):
        require(family.guidance, "guidance_scale", f"{info.pipeline} takes none; leave it out")
        arguments[family.guidance] = start.guidance_scale
    elif info.default_guidance_scale or default_of(type(pipelines.pipeline), family.guidance) is not None:
        arguments[family.guidance] = info.default_guidance_scale
    if start.HasField("negative_prompt") or family.default_negative is not None:
        given = start.HasField("negative_prompt")
        arguments["negative_prompt"] = start.negative_prompt if given else family.default_negative
    if frames := start.num_frames or info.default_frames:
        arguments[family.frames] = frames
    if seconds := start.audio_s or info.default_audio_s:
        arguments[family.seconds] = seconds
    return arguments


def _soundtrack(call: type, info: server_info_pb2.DitInfo, still: bool, further: Mapping[str, Any]) -> dict[str, bool]:
    """The argument that gives a video its sound, wherever the checkpoint makes one and the request has nothing against
    it."""
    switch = sound_switch(call)
    if not switch:
        return {}
    if further.get(switch):
        field = f"{FIELD}.{switch}"
        require(info.soundtrack_rate_hz, field, "this checkpoint makes no sound; leave it out")
        require(not still, field, "an image has no sound; leave it out")
    return {switch: bool(info.soundtrack_rate_hz) and not still}


def _size(
    start: dit_pb2.DitStart, info: server_info_pb2.DitInfo, given: "Sequence[Image]", follows_picture: bool
) -> dict[str, int]:
    """width and height, without a request's own those of the first picture given; empty where the pipeline knows."""
    if info.sample_rate_hz:
        return {}
    if start.width:
        return {"width": start.width, "height": start.height}
    if not given or info.frames_multiple:  # a class whose size is not known takes its own
        return {"width": info.default_width, "height": info.default_height} if info.default_width else {}
    if follows_picture:
        return {}
    width, height = fitted(*given[0].size, info.max_pixels, info.size_multiple)
    check_size(width, height, info)
    return {"width": width, "height": height}


def _videos(call: type, frames: str, video: "Sequence[Image]", control_video: "Sequence[Image]") -> dict[str, Any]:
    """Arguments of a call that reads a video; `frames`: the one for their number, if the call takes it."""
    arguments: dict[str, Any] = {}
    if video:
        arguments[video_of(call)] = list(video)
    if control_video:
        name = control_video_of(call)
        arguments[name] = [list(control_video)] if name == "control_video" else list(control_video)
    if read := video or control_video:
        arguments["width"], arguments["height"] = read[0].size
        if control_video or not continues_video(call):
            arguments[frames] = len(read)
    return arguments
