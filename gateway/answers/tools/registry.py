"""The tools that run in the gateway: image_generation, and Quartet's own video_generation and sound_generation.

Responses offer all of them. Chats (`chat_dialog.py`) and realtime sessions (`realtime/output/prompt_dialog.py`) offer
image_generation alone.
"""

import asyncio
from abc import abstractmethod
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import pybase64

from gateway.answers import audio, videos
from gateway.answers.diffusion import ImageRequest, require_info
from gateway.answers.gateway import Gateway
from gateway.answers.images import GeneratedImage, ImageGeneration, begin, image_facts
from gateway.answers.tools.calls import HostedCall, HostedTool
from gateway.answers.tools.events import ToolEvent, ToolImage, ToolProgress, ToolResult
from gateway.answers.tools.schema import IMAGE_TOOL, SOUND_TOOL, VIDEO_TOOL, ImageTool, SoundTool, VideoTool
from gateway.errors import invalid
from gateway.media.check import MediaFile
from gateway.pipeline.stage import Stage
from gateway.validation import validated
from quartet.v1 import dit_pb2


@dataclass(frozen=True)
class ImageGenerator(HostedTool):
    settings: ImageTool
    name = IMAGE_TOOL
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
                    facts["action"] = "edit" if generation.files else "generate"
                    facts["revised_prompt"] = request.prompt
                yield ToolImage(file, facts, event.preview)

    def _request(self, prompt: str, previews: bool) -> ImageRequest:
        members = self.settings.model_dump(include={"size", "output_format", "output_compression"})
        shown = {"stream": True, "partial_images": self.settings.partial_images} if previews else {}
        return validated(ImageRequest, {"prompt": prompt, **members, **shown})

    async def _prepare(self, gateway: Gateway, stage: Stage, call: HostedCall) -> tuple[ImageGeneration, ImageRequest]:
        prompt, arguments = call.read()
        action = self.settings.action
        if action in (None, "auto"):
            action = arguments.get("action")
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
        return await begin(gateway, stage, request.image_start(info), images, mask, call.meter), request


class _Maker(HostedTool):
    choice = "type"
    failed = "It could not be made: "

    async def events(self, gateway: Gateway, call: HostedCall) -> AsyncGenerator[ToolEvent, None]:
        prompt, _ = call.read()
        yield ToolProgress()
        yield ToolResult({"prompt": prompt, **await self._make(gateway, call, prompt)})

    @abstractmethod
    async def _make(self, gateway: Gateway, call: HostedCall, prompt: str) -> dict[str, Any]:
        """Members of the result. Raises ApiError."""


@dataclass(frozen=True)
class VideoGenerator(_Maker):
    """Its result is a job, which goes on when the answer has ended."""

    settings: VideoTool
    name = VIDEO_TOOL
    description = "Makes a video, which the user gets. Call it when the user asks for a video."
    prompt = "what the video is of"
    output = "video"
    schema = VideoTool
    done = "The video is being made. The user sees it when it is finished, in some minutes."

    def check_with(self, stage: Stage) -> None:
        self._request("a video").video_start(require_info(stage, videos.TASKS, "videos"))

    def _request(self, prompt: str) -> videos.VideoRequest:
        members = {"prompt": prompt, "seconds": self.settings.seconds, "size": self.settings.size}
        return validated(videos.VideoRequest, members)

    async def _make(self, gateway: Gateway, call: HostedCall, prompt: str) -> dict[str, Any]:
        stage = gateway.catalog.stage_for("video", None)
        tasks = () if stage.info is None else stage.info.dit.tasks
        image = None
        if dit_pb2.DIT_TASK_TEXT_TO_VIDEO not in tasks and call.last_image is not None:
            image = MediaFile("input_reference", "image", call.last_image)
        request, owner, release = self._request(prompt), call.rules.owner, call.rules.hold()
        try:
            video = await videos.submit_video(gateway, request, image, owner, release, call.meter.log)
        except BaseException:
            release()
            raise
        return {"video": videos.video_object(video)}


@dataclass(frozen=True)
class SoundGenerator(_Maker):
    settings: SoundTool
    name = SOUND_TOOL
    description = "Makes a sound, which the user gets. Call it when the user asks for a sound."
    prompt = "what the sound is of"
    output = "audio"
    schema = SoundTool
    done = "The sound was made, and the user hears it."

    def check_with(self, stage: Stage) -> None:
        self._request("a sound").audio_start(require_info(stage, audio.TASKS, "sound"))

    def _request(self, prompt: str) -> audio.AudioRequest:
        settings = self.settings
        members = {"seconds": settings.seconds, "response_format": settings.output_format or "wav"}
        return validated(audio.AudioRequest, {"prompt": prompt, **members})

    async def _make(self, gateway: Gateway, call: HostedCall, prompt: str) -> dict[str, Any]:
        stage, request, meter = gateway.catalog.stage_for("audio", None), self._request(prompt), call.meter
        made = await audio.make(stage, request, meter.request_id, max(meter.left_s, 0.001))
        return {
            "result": pybase64.b64encode_as_string(made.file),
            "seconds": round(made.seconds, 3),
            "output_format": request.response_format,
            "sample_rate_hz": made.sample_rate_hz,
            "seed": made.seed,
        }


TOOLS = {tool.name: tool for tool in (ImageGenerator, VideoGenerator, SoundGenerator)}


def available(gateway: Gateway) -> set[str]:
    """Names of the tools whose output the pipeline has."""
    return {name for name, tool in TOOLS.items() if gateway.pipeline.output(tool.output) is not None}
