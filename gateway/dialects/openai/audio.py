"""`POST /v1/audio/generations`."""

from typing import Annotated

from fastapi import APIRouter, Depends, Request
from starlette.responses import Response

from gateway.answers.audio import AudioRequest, make
from gateway.answers.gateway import Gateway
from gateway.http.connection import admitted, key_of, while_connected
from gateway.http.forms import page, read_json
from gateway.media.encode import AUDIO_MEDIA_TYPES

router = APIRouter(tags=["audio"])

_OPENAPI = page(AudioRequest, "the file", answered=AUDIO_MEDIA_TYPES.values())


@router.post("/v1/audio/generations", openapi_extra=_OPENAPI)
async def generate_audio(http: Request, gateway: Annotated[Gateway, Depends(admitted)]) -> Response:
    """Makes audio from a prompt; the response is its file."""
    request = await read_json(http, AudioRequest)
    stage = gateway.catalog.stage_for("audio", gateway.catalog.meant(request.model, "audio"))
    limit_s = gateway.settings.request_timeout_s
    made = await while_connected(http.receive, make(stage, request, http.state.request_id, limit_s))
    if (key := key_of(http)) is not None:
        key.owe(made.seconds)
    http.state.log |= {"audio_s": round(made.seconds, 3), "seed": made.seed}
    headers = {"x-quartet-seed": str(made.seed), "x-quartet-sample-rate-hz": str(made.sample_rate_hz)}
    return Response(made.file, media_type=AUDIO_MEDIA_TYPES[request.response_format], headers=headers)
