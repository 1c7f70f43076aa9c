"""Requests for images, videos and audio, checked against the model's capabilities."""

import json
import re
from typing import Annotated, Any, Literal

import numpy as np
import pybase64
from pydantic import BeforeValidator, Field

from gateway.answers import harmless
from gateway.errors import from_error, invalid
from gateway.media.check import MediaFile
from gateway.media.encode import MAX_SIDE_PIXELS, ImageFormat, encode_image
from gateway.pipeline.sampling import MAX_SEED
from gateway.pipeline.stage import Stage
from gateway.validation import Listed, Positive, Strict, ignoring
from quartet.v1 import dit_pb2, server_info_pb2

PROGRESS_INTERVAL_MS = 100  # as often as a person looks
MAX_PROMPT_CHARACTERS = 100_000  # beyond what any text encoder reads; the stage knows its own limit in tokens
_SIZE = re.compile(r"([1-9][0-9]{0,4})x([1-9][0-9]{0,4})")


def _weights(value: Any) -> Any:
    """Makes {name: weight} of a name, or of a list of names and {name, weight}."""
    if isinstance(value, str):
        return {value: 1.0}
    if not isinstance(value, list):
        return value
    weights: dict[str, Any] = {}
    for item in value:
        lora = {"name": item} if isinstance(item, str) else item
        if not isinstance(lora, dict) or not isinstance(lora.get("name"), str) or lora.keys() - {"name", "weight"}:
            raise ValueError("each must be a name, or {name, weight}")
        if lora["name"] in weights:
            raise ValueError(f"{lora['name']!r} is there twice")
        weights[lora["name"]] = lora.get("weight", 1.0)
    return weights


Loras = Annotated[
    dict[str, Annotated[float, Field(allow_inf_nan=False)]],
    BeforeValidator(_weights),
    Field(description="adapters: a name, {name: weight}, or a list of names and {name, weight}"),
]


class DiffusionMembers(Strict):
    negative_prompt: Annotated[str, Field(max_length=MAX_PROMPT_CHARACTERS)] | None = None
    num_inference_steps: Positive | None = None
    guidance_scale: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    lora: Loras | None = None


class PipelineOptions(Strict):
    arguments: dict[str, Any] | None = Field(
        default=None, description="further arguments of the model's pipeline: /v1/models has them"
    )


class ImagePipelineOptions(PipelineOptions):
    control_images: Listed[Annotated[str, Field(min_length=1)]] | None = Field(
        default=None,
        description="https, http or data URLs of images that say where things are, as many as the model's "
        "`control_images` in /v1/models",
    )


class VideoPipelineOptions(PipelineOptions):
    video: Annotated[str, Field(min_length=1)] | None = Field(
        default=None, description="https, http or data URL of a video to start from, for models that take one"
    )
    control_video: Annotated[str, Field(min_length=1)] | None = Field(
        default=None,
        description="https, http or data URL of a video that says where things are, for models that need one",
    )


class DiffusionExtras(Strict):
    dit: PipelineOptions | None = None


class DiffusionRequest(ignoring(DiffusionMembers, *harmless.DIFFUSION)):
    model: str | None = Field(default=None, description="default: the model that makes what the endpoint is for")
    prompt: Annotated[str, Field(min_length=1, max_length=MAX_PROMPT_CHARACTERS)]
    seed: Annotated[int, Field(ge=0, le=MAX_SEED)] | None = None
    quartet: DiffusionExtras | None = None

    def start(self, info: server_info_pb2.DitInfo) -> dit_pb2.DitStart:
        """The stage's start message, without the endpoint's own members. Raises ApiError: 400."""
        if self.negative_prompt is not None and not info.negative_prompt:
            raise invalid("negative_prompt", "this model takes none; leave it out")
        if self.num_inference_steps is not None and self.num_inference_steps > info.max_inference_steps:
            raise invalid("num_inference_steps", f"must be 1 to {info.max_inference_steps}")
        same = self.model_dump(include={"prompt", "negative_prompt", "num_inference_steps", "guidance_scale", "seed"})
        start = dit_pb2.DitStart(**same, count=1, progress_interval_ms=PROGRESS_INTERVAL_MS)
        if self.quartet is not None and self.quartet.dit is not None and self.quartet.dit.arguments:
            start.arguments = json.dumps(self.quartet.dit.arguments)
        for name, weight in (self.lora or {}).items():
            if name not in info.loras:
                known = ", ".join(info.loras) or "none"
                raise invalid("lora", f"no adapter {name!r}; this model has: {known}")
            start.loras.add(name=name, weight=weight)
        return start


def fill_size(start: dit_pb2.DitStart, size: str, info: server_info_pb2.DitInfo, file_format: str) -> None:
    """Raises ApiError: 400, not possible for the model or for `file_format`, a key of MAX_SIDE_PIXELS."""
    match = _SIZE.fullmatch(size)
    if match is None:
        raise invalid("size", f'{size[:40]!r} is no size; write WIDTHxHEIGHT in pixels, e.g. "1024x768"')
    width, height = int(match[1]), int(match[2])
    multiple = max(1, info.size_multiple)
    if width % multiple or height % multiple:
        raise invalid("size", f"width and height must be multiples of {multiple} pixels")
    if info.max_pixels and width * height > info.max_pixels:
        raise invalid("size", f"{size} is more than the {info.max_pixels} pixels that this model makes")
    _check_side(width, height, file_format)
    start.width, start.height = width, height


def _check_side(width: int, height: int, file_format: str) -> None:
    """Raises ApiError: 400, too large for the format."""
    if max(width, height) > (most := MAX_SIDE_PIXELS[file_format]):
        raise invalid("size", f"{width}x{height}: {file_format} has at most {most} pixels a side")


def require_info(stage: Stage, tasks: tuple[dit_pb2.DitTask, ...], what: str) -> server_info_pb2.DitInfo:
    """The capabilities of the stage's model. Raises ApiError: 503, it does not serve; 400, it does none of `tasks`."""
    if not stage.serving or stage.info is None:
        raise from_error(stage.kind, stage.unavailable())
    if not any(task in stage.info.dit.tasks for task in tasks):
        raise invalid("model", f"{stage.info.model!r} does not make {what}", "unsupported_model")
    return stage.info.dit


class ImageMembers(Strict):
    size: str | None = Field(
        default=None,
        description='"WIDTHxHEIGHT", or "auto": the model\'s size, of an edit about that of the first image',
    )
    output_format: ImageFormat | None = Field(default=None, description="default: png")
    output_compression: Annotated[int, Field(ge=0, le=100)] | None = Field(
        default=None, description="quality of jpeg and webp: 100, the default, is the best"
    )

    @property
    def file_format(self) -> ImageFormat:
        return self.output_format or "png"

    def fill(self, start: dit_pb2.DitStart, info: server_info_pb2.DitInfo) -> None:
        """Sets the size. Raises ApiError: 400 naming a member that contradicts another or the model."""
        if self.output_compression not in (None, 100) and self.file_format == "png":
            raise invalid("output_compression", "below 100 only with output_format jpeg or webp: png loses nothing")
        if self.size not in (None, "auto"):
            fill_size(start, self.size, info, self.file_format)

    def to_base64(self, pixels: np.ndarray) -> str:
        """Encodes (height, width, 3) uint8. Blocking. Raises ApiError: 400, too large for the format."""
        height, width, _ = pixels.shape
        _check_side(width, height, self.file_format)
        quality = 100 if self.output_compression is None else self.output_compression
        return pybase64.b64encode_as_string(encode_image(pixels, self.file_format, quality))

    def file_facts(self, pixels: np.ndarray) -> dict[str, str]:
        """OpenAI's members of the file."""
        size = f"{pixels.shape[1]}x{pixels.shape[0]}"
        return {"background": "opaque", "output_format": self.file_format, "quality": "auto", "size": size}


class ImageOptions(ImageMembers, DiffusionMembers, ImagePipelineOptions):
    """`quartet.dit` of a chat request."""


class VideoExtras(DiffusionExtras):
    dit: VideoPipelineOptions | None = None


class ImageExtras(DiffusionExtras):
    dit: ImagePipelineOptions | None = None
    progress: bool | None = Field(default=None, description="quartet.progress events of denoising, at most 10 a second")


class ImageRequest(ImageMembers, ignoring(DiffusionRequest, *harmless.IMAGES)):
    """A request for images: OpenAI's members and those of diffusion models."""

    n: Positive | None = Field(default=None, description="image i has seed + i")
    quality: Literal["auto", "low", "medium", "high", "xhigh", "max", "standard", "hd"] | None = Field(
        default=None, description="accepted; without effect: num_inference_steps is what changes it"
    )
    response_format: Literal["b64_json", "url"] | None = Field(
        default=None, description="always b64_json: images are not kept here"
    )
    background: Literal["auto", "opaque"] | None = Field(default=None, description="always opaque")
    moderation: Literal["auto", "low"] | None = Field(default=None, description="accepted; nothing is moderated")
    stream: bool | None = None
    partial_images: Annotated[int, Field(ge=0, le=3)] | None = Field(
        default=None, description="previews of each image, at most 256 pixels a side; only with stream"
    )
    quartet: ImageExtras | None = None

    @property
    def control_images(self) -> list[MediaFile]:
        urls = (self.quartet and self.quartet.dit and self.quartet.dit.control_images) or []
        return [MediaFile(f"quartet.dit.control_images[{i}]", "image", url) for i, url in enumerate(urls)]

    def image_start(self, info: server_info_pb2.DitInfo) -> dit_pb2.DitStart:
        """The stage's start message, without files and id. Raises ApiError: 400 naming the member at fault."""
        if self.partial_images and not self.stream:
            raise invalid("partial_images", "only with stream: true")
        if self.quartet is not None and self.quartet.progress and not self.stream:
            raise invalid("quartet.progress", "only with stream: true")
        start = self.start(info)
        self.fill(start, info)
        if info.frames_multiple:  # the model makes videos, too
            start.task = dit_pb2.DIT_TASK_TEXT_TO_IMAGE
        start.count = self.n or 1
        if start.count > info.max_count:
            raise invalid("n", f"at most {info.max_count} images a request")
        steps = self.num_inference_steps or info.default_inference_steps
        start.previews = 0 if info.without_previews else min(self.partial_images or 0, max(0, steps - 1))
        return start
