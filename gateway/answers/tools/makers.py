"""The tools video_generation and sound_generation, Quartet's own."""

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any, ClassVar

import pybase64
from pydantic import BaseModel

from gateway import metrics
from gateway.answers import audio, videos
from gateway.answers.diffusion import require_info, stage_errors
from gateway.answers.gateway import Gateway
from gateway.answers.request import Tool
from gateway.answers.tools import calls
from gateway.answers.tools.calls import HostedCall
from gateway.answers.tools.events import ToolEvent, ToolProgress, ToolResult
from gateway.answers.tools.schema import SOUND_TOOL, VIDEO_TOOL, SoundTool, VideoTool
from gateway.media.check import MediaFile
from gateway.pipeline.kinds import Output
from gateway.validation import validated
from quartet.v1 import dit_pb2

NOT_MADE = "It could not be made: "


@dataclass(frozen=True)
class VideoGenerator:
    """The tool video_generation with a request's settings: a job, which goes on when the answer has ended."""

    settings: VideoTool
    name: ClassVar[str] = VIDEO_TOOL
    output: ClassVar[Output] = "video"
    schema: ClassVar[type[BaseModel]] = VideoTool
    done: ClassVar[str] = "The video is being made. The user sees it when it is finished, in some minutes."
    failed: ClassVar[str] = NOT_MADE

    def function(self) -> Tool:
        """The tool as the model sees it: a function."""
        return _function(self.name, "video")

    def check(self, gateway: Gateway, place: str) -> None:
        """Refuses settings that the model here cannot follow, if its stage serves. Raises ApiError: 400."""
        if (stage := calls.serving_stage(gateway, self.output)) is not None:
            with calls.settings_at(place, {"model": "type"}):
                self._request("a video").video_start(require_info(stage, videos.TASKS, "videos"))

    async def events(self, gateway: Gateway, call: HostedCall) -> AsyncGenerator[ToolEvent, None]:
        """Starts the video as a job, which can be deleted later. Raises ApiError."""
        prompt, _ = calls.read(call.arguments)
        yield ToolProgress()
        yield ToolResult({"prompt": prompt, "video": await self._job(gateway, call, prompt)})

    def _request(self, prompt: str) -> videos.VideoRequest:
        members = {"prompt": prompt, "seconds": self.settings.seconds, "size": self.settings.size}
        return validated(videos.VideoRequest, members)

    async def _job(self, gateway: Gateway, call: HostedCall, prompt: str) -> dict[str, Any]:
        stage = gateway.stage_for("video", None)
        tasks = () if stage.info is None else stage.info.dit.tasks
        image = None
        if dit_pb2.DIT_TASK_TEXT_TO_VIDEO not in tasks and call.last_image is not None:
            image = MediaFile("input_reference", "image", call.last_image)
        release = call.rules.hold()
        try:
            video = await videos.submit_video(
                gateway, self._request(prompt), image, call.rules.owner, release, call.meter.log
            )
        except BaseException:
            release()
            raise
        return videos.video_object(video)


@dataclass(frozen=True)
class SoundGenerator:
    """The tool sound_generation with a request's settings."""

    settings: SoundTool
    name: ClassVar[str] = SOUND_TOOL
    output: ClassVar[Output] = "audio"
    schema: ClassVar[type[BaseModel]] = SoundTool
    done: ClassVar[str] = "The sound was made, and the user hears it."
    failed: ClassVar[str] = NOT_MADE

    def function(self) -> Tool:
        """The tool as the model sees it: a function."""
        return _function(self.name, "sound")

    def check(self, gateway: Gateway, place: str) -> None:
        """Refuses settings that the model here cannot follow, if its stage serves. Raises ApiError: 400."""
        if (stage := calls.serving_stage(gateway, self.output)) is not None:
            with calls.settings_at(place, {"model": "type"}):
                self._request("a sound").audio_start(require_info(stage, audio.TASKS, "sound"))

    async def events(self, gateway: Gateway, call: HostedCall) -> AsyncGenerator[ToolEvent, None]:
        """Makes the sound. Closing the generator cancels the stage's call. Raises ApiError."""
        prompt, _ = calls.read(call.arguments)
        yield ToolProgress()
        yield ToolResult({"prompt": prompt, **await self._file(gateway, call, prompt)})

    def _request(self, prompt: str) -> audio.AudioRequest:
        settings = self.settings
        members = {"seconds": settings.seconds, "response_format": settings.output_format or "wav"}
        return validated(audio.AudioRequest, {"prompt": prompt, **members})

    async def _file(self, gateway: Gateway, call: HostedCall, prompt: str) -> dict[str, Any]:
        stage = gateway.stage_for("audio", None)
        request = self._request(prompt)
        start = request.audio_start(require_info(stage, audio.TASKS, "sound"))
        start.request_id = call.request_id
        with stage_errors(stage):
            pieces, seed = await audio.make(stage, start, max(call.meter.left_s, 0.001))
        file, audio_s = await asyncio.to_thread(audio.file_of, pieces, request.response_format)
        metrics.AUDIO_SECONDS.inc(audio_s)
        facts = {"output_format": request.response_format, "sample_rate_hz": pieces.sample_rate_hz, "seed": seed}
        return {"result": pybase64.b64encode_as_string(file), "seconds": round(audio_s, 3), **facts}


def _function(name: str, what: str) -> Tool:
    description = f"Makes a {what}, which the user gets. Call it when the user asks for a {what}."
    return calls.function(name, description, f"what the {what} is of")
