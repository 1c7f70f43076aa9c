"""Generation of audio from a prompt."""

import asyncio
from contextlib import aclosing
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from gateway import metrics
from gateway.answers.diffusion import DiffusionRequest, require_info
from gateway.errors import in_own_terms, invalid
from gateway.media.encode import encode_audio, to_pcm16
from gateway.pipeline.dit import Pieces, generate
from gateway.pipeline.stage import Stage
from quartet.v1 import dit_pb2, server_info_pb2

TASKS = (dit_pb2.DIT_TASK_TEXT_TO_AUDIO,)


class AudioRequest(DiffusionRequest):
    """Audio to be made."""

    seconds: Annotated[float, Field(gt=0)] | None = Field(default=None, description="default: the model's")
    n: Annotated[int, Field(ge=1, le=1)] | None = Field(default=None, description="the response is one file")
    response_format: Literal["wav", "flac", "mp3", "opus", "aac"] = "wav"

    def audio_start(self, info: server_info_pb2.DitInfo) -> dit_pb2.DitStart:
        """Raises ApiError: 400 naming the member that the model cannot follow."""
        start = self.start(info)
        if self.seconds is not None:
            if self.seconds > info.max_audio_s:
                raise invalid("seconds", f"must be at most {info.max_audio_s:g}")
            start.audio_s = self.seconds
        return start


@dataclass(frozen=True)
class GeneratedAudio:
    """A file of 16-bit samples."""

    file: bytes
    seconds: float
    sample_rate_hz: int
    seed: int


async def make(stage: Stage, request: AudioRequest, request_id: str, timeout_s: float) -> GeneratedAudio:
    """Raises ApiError."""
    start = request.audio_start(require_info(stage, TASKS, "sound"))
    start.request_id = request_id
    pieces, seed = Pieces(), 0
    with in_own_terms(kind=stage.kind):
        async with aclosing(generate(stage, start, (), timeout_s)) as responses:
            async for response in responses:
                match response.WhichOneof("message"):
                    case "started":
                        seed = response.started.seed
                    case "piece":
                        pieces.add(response.piece)
        if not pieces.complete or pieces.sample_rate_hz <= 0:
            raise stage.fault("did not send a whole sound")
    file, seconds = await asyncio.to_thread(_file_of, pieces, request.response_format)
    metrics.AUDIO_SECONDS.inc(seconds)
    return GeneratedAudio(file, seconds, pieces.sample_rate_hz, seed)


def _file_of(pieces: Pieces, file_format: str) -> tuple[bytes, float]:
    """(file, seconds). Blocking."""
    samples = pieces.array()  # (samples, channels) float32
    file = encode_audio(to_pcm16(samples), pieces.sample_rate_hz, file_format, channels=samples.shape[1])
    return file, len(samples) / pieces.sample_rate_hz
