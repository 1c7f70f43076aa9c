"""`GET /v1/models`."""

import time
from typing import Any

from fastapi import APIRouter, Request

from gateway.gateway import Gateway

router = APIRouter(tags=["models"])
_STARTED = int(time.time())


def _model(gateway: Gateway, name: str) -> dict[str, Any]:
    stages = gateway.stages
    thinker = stages.thinker.info.thinker if stages.thinker.info else None
    code2wav = stages.code2wav.info.code2wav if stages.code2wav and stages.code2wav.info else None
    return {
        "id": name,
        "object": "model",
        "created": _STARTED,
        "owned_by": "quartet",
        "quartet": {
            "input_modalities": ["text", *(thinker.input_modalities if thinker else ())],
            "output_modalities": [output for output, _ in gateway.pipeline.outputs if _ is not None],
            "max_context_tokens": thinker.max_context_tokens if thinker else None,
            "voices": stages.voices,
            "sample_rate_hz": stages.sample_rate_hz,
            "samples_per_frame": code2wav.samples_per_frame if code2wav else None,
            "trimmed_samples": code2wav.trimmed_samples if code2wav else None,
        },
    }


@router.get("/v1/models")
async def list_models(http: Request) -> dict[str, Any]:
    """The model served; none while its name is still to be learnt from the thinker."""
    gateway: Gateway = http.app.state.gateway
    name = gateway.model_name
    return {"object": "list", "data": [] if name is None else [_model(gateway, name)]}


@router.get("/v1/models/{name:path}")
async def get_model(http: Request, name: str) -> dict[str, Any]:
    """One model."""
    gateway: Gateway = http.app.state.gateway
    gateway.require_model(name)
    return _model(gateway, name)
