"""The tools video_generation and sound_generation, Quartet's own."""

from abc import abstractmethod
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any

import pybase64

from gateway.answers import audio, videos
from gateway.answers.diffusion import require_info
from gateway.answers.gateway import Gateway
from gateway.answers.tools.calls import HostedCall, HostedTool
from gateway.answers.tools.events import ToolEvent, ToolProgress, ToolResult
from gateway.answers.tools.schema import SOUND_TOOL, VIDEO_TOOL, SoundTool, VideoTool
from gateway.media.check import MediaFile
from gateway.pipeline.stage import Stage
from gateway.validation import validated
from quartet.v1 import dit_pb2


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
        stage = gateway.stage_for("video", None)
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
        stage, request, meter = gateway.stage_for("audio", None), self._request(prompt), call.meter
        made = await audio.make(stage, request, meter.request_id, max(meter.left_s, 0.001))
        return {
            "result": pybase64.b64encode_as_string(made.file),
            "seconds": round(made.seconds, 3),
            "output_format": request.response_format,
            "sample_rate_hz": made.sample_rate_hz,
            "seed": made.seed,
        }
