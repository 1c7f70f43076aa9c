"""`POST /v1/audio/generations`: audio of a prompt."""

import asyncio
from contextlib import aclosing
from typing import Annotated, Literal

import numpy as np
from fastapi import APIRouter, Depends, Request
from pydantic import Field
from starlette.responses import Response

from gateway import metrics
from gateway.errors import invalid
from gateway.gateway import Gateway
from gateway.media.encode import encode_audio
from gateway.openai.connection import admitted, while_connected
from gateway.openai.diffusion import DiffusionRequest, require_info, told_of
from gateway.openai.forms import page, read_json
from gateway.pipeline.dit import Pieces, generate
from gateway.pipeline.stage import Stage
from quartet.v1 import dit_pb2, server_info_pb2

router = APIRouter(tags=["audio"])

TASKS = (dit_pb2.DIT_TASK_TEXT_TO_AUDIO,)
MEDIA_TYPES = {
    "wav": "audio/wav",
    "flac": "audio/flac",
    "mp3": "audio/mpeg",
    "opus": "audio/ogg",
    "aac": "audio/aac",
}


class AudioRequest(DiffusionRequest):
    """A sound to be made."""

    seconds: Annotated[float, Field(gt=0)] | None = Field(default=None, description="default: the model's")
    n: Annotated[int, Field(ge=1, le=1)] | None = Field(default=None, description="the response is one file")
    response_format: Literal["wav", "flac", "mp3", "opus", "aac"] = "wav"

    def audio_start(self, info: server_info_pb2.DitInfo) -> dit_pb2.DitStart:
        """The stage's start message. Raises ApiError: 400 naming the member that the model cannot follow."""
        start = self.start(info)
        if self.seconds is not None:
            if self.seconds > info.max_audio_s:
                raise invalid("seconds", f"must be at most {info.max_audio_s:g}")
            start.audio_s = self.seconds
        return start


_OPENAPI = page(AudioRequest, "application/json", "the file", answered=MEDIA_TYPES.values())


@router.post("/v1/audio/generations", openapi_extra=_OPENAPI, response_model=None)
async def generate_audio(http: Request, gateway: Annotated[Gateway, Depends(admitted)]) -> Response:
    """Makes a sound; the response is its file."""
    limit_s = gateway.settings.request_timeout_s
    request = await read_json(http, AudioRequest, limit_s)
    stage = gateway.stage_for("audio", request.model)
    start = request.audio_start(require_info(stage, TASKS, "sound"))
    start.request_id = http.state.request_id
    with told_of(stage):
        pieces, seed = await while_connected(http.receive, make(stage, start, limit_s))
    file, audio_s = await asyncio.to_thread(file_of, pieces, request.response_format)
    metrics.AUDIO_SECONDS.inc(audio_s)
    http.state.log |= {"audio_s": round(audio_s, 3), "seed": seed}
    headers = {"x-quartet-seed": str(seed), "x-quartet-sample-rate-hz": str(pieces.sample_rate_hz)}
    return Response(file, media_type=MEDIA_TYPES[request.response_format], headers=headers)


async def make(stage: Stage, start: dit_pb2.DitStart, timeout_s: float) -> tuple[Pieces, int]:
    """The sound, complete, and its seed. Raises StageError."""
    pieces, seed = Pieces(), 0
    async with aclosing(generate(stage, start, (), timeout_s)) as responses:
        async for response in responses:
            match response.WhichOneof("message"):
                case "started":
                    seed = response.started.seed
                case "piece":
                    pieces.add(response.piece)
    if not pieces.complete or pieces.sample_rate_hz <= 0:
        raise stage.fault("did not send a whole sound")
    return pieces, seed


def file_of(pieces: Pieces, file_format: str) -> tuple[bytes, float]:
    """The file in 16 bit, and its length in seconds. Blocking."""
    samples = pieces.array()  # (samples, channels) float32
    pcm16 = np.rint(np.clip(samples, -1.0, 1.0) * 32767).astype("<i2")
    file = encode_audio(pcm16.tobytes(), pieces.sample_rate_hz, file_format, channels=samples.shape[1])
    return file, len(samples) / pieces.sample_rate_hz
