"""Tools that make images, videos and sounds: OpenAI's image_generation, and two of Quartet's own."""

import asyncio
import json
from abc import abstractmethod
from collections.abc import AsyncGenerator, Mapping
from contextlib import ExitStack, aclosing
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import pybase64
from pydantic import Field

from gateway.answers import audio, videos
from gateway.answers.diffusion import ImageRequest, require_info
from gateway.answers.gateway import Gateway
from gateway.answers.images import GeneratedImage, ImageGeneration, InputImages, begin, image_facts
from gateway.answers.tools.calls import HostedCall, HostedTool
from gateway.answers.tools.events import ToolEvent, ToolPreview, ToolProgress, ToolResult
from gateway.errors import in_own_terms, invalid
from gateway.media.check import MediaFile
from gateway.media.encode import ImageFormat
from gateway.pipeline.kinds import Output
from gateway.pipeline.stage import Stage
from gateway.validation import Lenient, Strict, validated
from quartet.v1 import dit_pb2

_MAX_PROMPT_CHARACTERS = 1000  # that a model is to write: text encoders read some hundred tokens


class ImageTool(Lenient):
    """OpenAI's image_generation. Settings that say nothing to a model here are accepted: background, input_fidelity,
    moderation, quality.
    """

    type: Literal["image_generation"] = "image_generation"
    action: Literal["generate", "edit", "auto"] | None = Field(default=None, description="default: the model decides")
    model: str | None = Field(default=None, description="accepted; the pipeline's own makes them")
    size: str | None = Field(default=None, description='"WIDTHxHEIGHT" or "auto", the model\'s own')
    output_format: ImageFormat | None = Field(default=None, description="default: png")
    output_compression: int | None = Field(default=None, ge=0, le=100)
    partial_images: int | None = Field(default=None, ge=0, le=3, description="previews; only with stream")
    input_image_mask: dict[str, Any] | None = None


class VideoTool(Strict):
    """Quartet's own."""

    type: Literal["video_generation"] = "video_generation"
    seconds: float | None = Field(default=None, gt=0, description="default: the model's")
    size: str | None = Field(default=None, description='"WIDTHxHEIGHT"; default: the model\'s')


class SoundTool(Strict):
    """Quartet's own."""

    type: Literal["sound_generation"] = "sound_generation"
    seconds: float | None = Field(default=None, gt=0, description="default: the model's")
    output_format: Literal["wav", "flac", "mp3", "opus", "aac"] | None = Field(default=None, description="default: wav")


class _Generator(HostedTool):
    """A tool that makes its output of a prompt.

    Attributes:
        prompt: describes the argument `prompt`.
        choice: the setting at fault where the stage's model does not make what it asks for.
    """

    output: ClassVar[Output]
    prompt: ClassVar[str]
    choice: ClassVar[str] = "type"
    failed = "It could not be made: "

    def parameters(self) -> dict[str, Any]:
        prompt = {"type": "string", "maxLength": _MAX_PROMPT_CHARACTERS, "description": self.prompt}
        arguments = {"prompt": prompt, **self.more_arguments()}
        return {"type": "object", "properties": arguments, "required": list(arguments), "additionalProperties": False}

    def more_arguments(self) -> dict[str, dict[str, Any]]:
        """Schemas of the arguments beside `prompt`."""
        return {}

    @classmethod
    def arguments(cls, item: Mapping[str, Any]) -> str:
        return json.dumps({"prompt": item.get("revised_prompt") or item.get("prompt") or ""}, ensure_ascii=False)

    def check(self, gateway: Gateway, place: str) -> None:
        stage = gateway.pipeline.output(self.output)
        if stage is not None and stage.serving and stage.info is not None:
            with in_own_terms(lambda member: f"{place}.{self.choice if member == 'model' else member}"):
                self.check_with(stage)

    @abstractmethod
    def check_with(self, stage: Stage) -> None:
        """Raises ApiError: 400 naming a member of a request to the serving `stage`."""


def _prompt(call: HostedCall) -> str:
    """Raises ApiError: the model wrote none."""
    prompt = call.read().get("prompt")
    if not isinstance(prompt, str) or not prompt.strip():
        raise invalid("prompt", "the call has none")
    return prompt


@dataclass(frozen=True)
class ImageGenerator(_Generator):
    settings: ImageTool
    name = "image_generation"
    description = (
        "Makes a picture, which the user sees. Call it when the user asks for a picture, or for a change of one."
    )
    prompt = "what the picture shows, or what is to be changed in the conversation's last picture"
    output = "image"
    schema = ImageTool
    choice = "action"
    done = "The picture was made, and the user sees it."
    failed = "The picture could not be made: "

    def more_arguments(self) -> dict[str, dict[str, Any]]:
        if self.settings.action not in (None, "auto"):
            return {}
        why = "edit: change the conversation's last picture; generate: make a new one"
        return {"action": {"type": "string", "enum": ["generate", "edit"], "description": why}}

    def check_with(self, stage: Stage) -> None:
        assert stage.info is not None
        if self.settings.action == "edit":
            image_facts(stage, edits=True)
        if self.settings.input_image_mask is not None and not stage.info.dit.mask:
            raise invalid("input_image_mask", "this model takes none; leave it out")
        if stage.info.dit.control_images:
            raise invalid("type", "this server's model needs control images, which no call of a tool has")
        self._request("a picture", previews=True).image_start(stage.info.dit)

    async def events(self, gateway: Gateway, call: HostedCall) -> AsyncGenerator[ToolEvent, None]:
        stage = gateway.pipeline.output("image")
        assert stage is not None, "the tool is offered where images are made"
        generation, request = await self._prepare(gateway, stage, call)
        yield ToolProgress()
        async with aclosing(generation.events()) as events:
            async for event in events:
                if not isinstance(event, GeneratedImage):
                    continue
                file = await asyncio.to_thread(request.to_base64, event.pixels)
                facts = request.file_facts(event.pixels)
                if event.preview is None:
                    how = {"action": "edit" if generation.files else "generate", "revised_prompt": request.prompt}
                    yield ToolResult({"result": file, **facts, **how}, self.output)
                else:
                    yield ToolPreview({"partial_image_index": event.preview, "partial_image_b64": file, **facts})

    def _request(self, prompt: str, previews: bool) -> ImageRequest:
        members = self.settings.model_dump(include={"size", "output_format", "output_compression"})
        shown = {"stream": True, "partial_images": self.settings.partial_images} if previews else {}
        return validated(ImageRequest, {"prompt": prompt, **members, **shown})

    async def _prepare(self, gateway: Gateway, stage: Stage, call: HostedCall) -> tuple[ImageGeneration, ImageRequest]:
        prompt = _prompt(call)
        action = self.settings.action
        if action in (None, "auto"):
            action = call.read().get("action")
        base = None
        can_edit = stage.info is not None and dit_pb2.DIT_TASK_IMAGE_EDIT in stage.info.dit.tasks
        if action != "generate" and can_edit and call.last_image is not None:
            base = MediaFile("image", "image", call.last_image)
        if self.settings.action == "edit" and base is None:  # a model that says so without an image means a new one
            raise invalid("action", "there is no picture to change, or this model does not change pictures")
        info = image_facts(stage, edits=base is not None)
        url = (self.settings.input_image_mask or {}).get("image_url")
        mask = MediaFile("input_image_mask", "image", url) if base and isinstance(url, str) and url else None
        request = self._request(prompt, call.rules.previews)
        images = [] if base is None else [base]
        inputs = InputImages(images, mask)
        return await begin(gateway, stage, request.image_start(info), inputs, call.meter), request


@dataclass(frozen=True)
class VideoGenerator(_Generator):
    """Its result is a job, which goes on when the answer has ended."""

    settings: VideoTool
    name = "video_generation"
    description = "Makes a video, which the user gets. Call it when the user asks for a video."
    prompt = "what the video is of"
    output = "video"
    schema = VideoTool
    done = "The video is being made. The user sees it when it is finished, in some minutes."

    def check_with(self, stage: Stage) -> None:
        self._request("a video").video_start(require_info(stage, videos.TASKS, "videos"))

    def _request(self, prompt: str) -> videos.VideoRequest:
        return validated(videos.VideoRequest, {"prompt": prompt, **self.settings.model_dump(exclude={"type"})})

    async def events(self, gateway: Gateway, call: HostedCall) -> AsyncGenerator[ToolEvent, None]:
        prompt = _prompt(call)
        yield ToolProgress()
        stage = gateway.catalog.stage_for("video", None)
        tasks = () if stage.info is None else stage.info.dit.tasks
        image = None
        if dit_pb2.DIT_TASK_TEXT_TO_VIDEO not in tasks and call.last_image is not None:
            image = MediaFile("input_reference", "image", call.last_image)
        request, key, place = self._request(prompt), call.rules.key, ExitStack()
        if key is not None:
            place.callback(key.hold())
        try:
            inputs = videos.VideoInputs(image)
            video = await videos.submit_video(gateway, request, inputs, key and key.name, place.close, call.meter.log)
        except BaseException:
            place.close()
            raise
        yield ToolResult({"prompt": prompt, "video": videos.video_object(video)}, self.output)


@dataclass(frozen=True)
class SoundGenerator(_Generator):
    settings: SoundTool
    name = "sound_generation"
    description = "Makes a sound, which the user gets. Call it when the user asks for a sound."
    prompt = "what the sound is of"
    output = "audio"
    schema = SoundTool
    done = "The sound was made, and the user hears it."

    def check_with(self, stage: Stage) -> None:
        self._request("a sound").audio_start(require_info(stage, audio.TASKS, "sound"))

    def _request(self, prompt: str) -> audio.AudioRequest:
        members = {"seconds": self.settings.seconds, "response_format": self.settings.output_format or "wav"}
        return validated(audio.AudioRequest, {"prompt": prompt, **members})

    async def events(self, gateway: Gateway, call: HostedCall) -> AsyncGenerator[ToolEvent, None]:
        prompt = _prompt(call)
        yield ToolProgress()
        stage, request, meter = gateway.catalog.stage_for("audio", None), self._request(prompt), call.meter
        made = await audio.make(stage, request, meter.request_id, max(meter.left_s, 0.001))
        members = {
            "prompt": prompt,
            "result": pybase64.b64encode_as_string(made.file),
            "seconds": round(made.seconds, 3),
            "output_format": request.response_format,
            "sample_rate_hz": made.sample_rate_hz,
            "seed": made.seed,
        }
        yield ToolResult(members, self.output)
