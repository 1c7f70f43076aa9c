"""`POST /v1/audio/generations`."""

import asyncio
from typing import Annotated

from fastapi import APIRouter, Depends, Request
from starlette.responses import Response

from gateway import metrics
from gateway.answers.audio import TASKS, AudioRequest, file_of, make
from gateway.answers.diffusion import require_info, stage_errors
from gateway.answers.gateway import Gateway
from gateway.http.connection import admitted, while_connected
from gateway.http.forms import page, read_json
from gateway.media.encode import AUDIO_MEDIA_TYPES

router = APIRouter(tags=["audio"])

_OPENAPI = page(AudioRequest, "application/json", "the file", answered=AUDIO_MEDIA_TYPES.values())


@router.post("/v1/audio/generations", openapi_extra=_OPENAPI, response_model=None)
async def generate_audio(http: Request, gateway: Annotated[Gateway, Depends(admitted)]) -> Response:
    """Makes audio from a prompt; the response is its file."""
    limit_s = gateway.settings.request_timeout_s
    request = await read_json(http, AudioRequest, limit_s)
    stage = gateway.stage_for("audio", request.model)
    start = request.audio_start(require_info(stage, TASKS, "sound"))
    start.request_id = http.state.request_id
    with stage_errors(stage):
        pieces, seed = await while_connected(http.receive, make(stage, start, limit_s))
    file, audio_s = await asyncio.to_thread(file_of, pieces, request.response_format)
    metrics.AUDIO_SECONDS.inc(audio_s)
    http.state.log |= {"audio_s": round(audio_s, 3), "seed": seed}
    headers = {"x-quartet-seed": str(seed), "x-quartet-sample-rate-hz": str(pieces.sample_rate_hz)}
    return Response(file, media_type=AUDIO_MEDIA_TYPES[request.response_format], headers=headers)
