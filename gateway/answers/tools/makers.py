"""The tools video_generation and sound_generation, Quartet's own: what the model is told of them, and what they do."""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pybase64

from gateway import metrics
from gateway.answers import audio, videos
from gateway.answers.diffusion import require_info, stage_errors
from gateway.answers.gateway import Gateway
from gateway.answers.request import Tool
from gateway.answers.tools import calls
from gateway.answers.tools.events import Failed, Generating, Made, MakeEvent
from gateway.answers.tools.schema import SOUND_TOOL, VIDEO_TOOL, MakerTool, SoundTool, VideoTool
from gateway.errors import ApiError
from gateway.media.check import MediaFile
from gateway.pipeline.kinds import Output
from gateway.validation import validated
from quartet.v1 import dit_pb2

_WHAT = {VIDEO_TOOL: "video", SOUND_TOOL: "sound"}
_OUTPUTS: Mapping[str, Output] = {VIDEO_TOOL: "video", SOUND_TOOL: "audio"}
# What the model hears of what was made.
MADE = {
    VIDEO_TOOL: "The video is being made. The user sees it when it is finished, in some minutes.",
    SOUND_TOOL: "The sound was made, and the user hears it.",
}
NOT_MADE = "It could not be made: "


def available(gateway: Gateway) -> set[str]:
    """The tools that a stage of the pipeline is there for."""
    return {name for name, output in _OUTPUTS.items() if gateway.pipeline.output(output) is not None}


def function(name: str) -> Tool:
    """The tool as the model knows it: a function."""
    what = _WHAT[name]
    told = f"Makes a {what}, which the user gets. Call it when the user asks for a {what}."
    return calls.function(name, told, f"what the {what} is of")


def check(gateway: Gateway, tool: MakerTool, place: str) -> None:
    """Refuses settings that the model here cannot follow, where it is known. Raises ApiError: 400 naming the member."""
    stage = gateway.pipeline.output(_OUTPUTS[tool.type])
    if stage is None or not stage.serving or stage.info is None:
        return
    with calls.settings_at(place, {"model": "type"}):
        if isinstance(tool, VideoTool):
            _video_request(tool, "a video").video_start(require_info(stage, videos.TASKS, "videos"))
        else:
            _sound_request(tool, "a sound").audio_start(require_info(stage, audio.TASKS, "sound"))


def _video_request(tool: VideoTool, prompt: str) -> videos.VideoRequest:
    return validated(videos.VideoRequest, {"prompt": prompt, "seconds": tool.seconds, "size": tool.size})


def _sound_request(tool: SoundTool, prompt: str) -> audio.AudioRequest:
    members = {"prompt": prompt, "seconds": tool.seconds, "response_format": tool.output_format or "wav"}
    return validated(audio.AudioRequest, members)


@dataclass(frozen=True)
class Making:
    """A video or a sound that the model asked for.

    Attributes:
        tool: the request's settings.
        arguments: of the call, as the model wrote them.
        last_picture: URL of the conversation's last picture, which a model that animates pictures begins with.
        request_id: names it in the stage.
        deadline: `time.monotonic()` at which the request's time is over.
        owner: whose it is.
        hold: a place of the API key's, for a video that is made when the request has ended; returns what gives it back.
        log: fields of the request's log line.
    """

    tool: MakerTool
    arguments: str
    last_picture: str | None
    request_id: str
    deadline: float
    owner: str | None
    hold: Callable[[], Callable[[], None]]
    log: dict[str, Any]

    async def events(self, gateway: Gateway) -> AsyncGenerator[MakeEvent, None]:
        """Makes it: last comes what was made, or Failed. Closing the generator cancels the stage's call; a video that
        was taken on is made all the same, and can be deleted."""
        try:
            prompt, _ = calls.read(self.arguments)
            yield Generating()
            if isinstance(self.tool, VideoTool):
                yield Made(await self._video(gateway, self.tool, prompt))
            else:
                yield Made(await self._sound(gateway, self.tool, prompt))
        except ApiError as error:
            self.log.update(error.log)
            yield Failed(error)

    async def _video(self, gateway: Gateway, tool: VideoTool, prompt: str) -> dict[str, Any]:
        stage = gateway.stage_for("video", None)
        tasks = () if stage.info is None else stage.info.dit.tasks
        picture = None
        if dit_pb2.DIT_TASK_TEXT_TO_VIDEO not in tasks and self.last_picture is not None:
            picture = MediaFile("input_reference", "image", self.last_picture)
        give_back = self.hold()
        try:
            video = await videos.submit_video(
                gateway, _video_request(tool, prompt), picture, self.owner, give_back, self.log
            )
        except BaseException:
            give_back()
            raise
        return {"prompt": prompt, "video": videos.video_object(video)}

    async def _sound(self, gateway: Gateway, tool: SoundTool, prompt: str) -> dict[str, Any]:
        stage = gateway.stage_for("audio", None)
        request = _sound_request(tool, prompt)
        start = request.audio_start(require_info(stage, audio.TASKS, "sound"))
        start.request_id = self.request_id
        with stage_errors(stage):
            pieces, seed = await audio.make(stage, start, max(self.deadline - time.monotonic(), 0.001))
        file, audio_s = await asyncio.to_thread(audio.file_of, pieces, request.response_format)
        metrics.AUDIO_SECONDS.inc(audio_s)
        facts = {"output_format": request.response_format, "sample_rate_hz": pieces.sample_rate_hz, "seed": seed}
        return {"prompt": prompt, "result": pybase64.b64encode_as_string(file), "seconds": round(audio_s, 3), **facts}
