"""`POST /v1/load_lora_adapter` and `/v1/unload_lora_adapter`: vLLM's names and bodies, for administrators."""

import asyncio
from typing import Any

from fastapi import APIRouter, Request
from pydantic import Field
from starlette.responses import PlainTextResponse

from gateway.answers.gateway import Gateway
from gateway.errors import ApiError, in_own_terms, invalid
from gateway.http.connection import require_admin
from gateway.http.forms import page, read_json
from gateway.pipeline.replica import Replica
from gateway.pipeline.stage import Stage
from gateway.validation import Strict
from quartet.v1 import thinker_pb2
from services.common.errors import NotFound

_FIELDS = {"name": "lora_name", "path": "lora_path"}
_TEXT = ("text/plain",)

router = APIRouter(tags=["models"])


class LoadRequest(Strict):
    lora_name: str = Field(min_length=1, description="what requests call it, as `model` or `lora`")
    lora_path: str = Field(min_length=1, description="its directory, in the one that the thinker's --lora-root names")
    load_inplace: bool = Field(default=False, description="not here: unload the other one first")
    is_3d_lora_weight: bool = Field(default=False, description="accepted; the files say it")


class UnloadRequest(Strict):
    lora_name: str = Field(min_length=1)
    lora_int_id: int | None = Field(default=None, description="accepted; the name says it")


@router.post("/v1/load_lora_adapter", openapi_extra=page(LoadRequest, "done", answered=_TEXT))
async def load_lora_adapter(http: Request) -> PlainTextResponse:
    """Loads an adapter in every replica of the thinker, or in none."""
    gateway = require_admin(http, "adapters are")
    request = await read_json(http, LoadRequest)
    if request.load_inplace:
        raise invalid("load_inplace", "adapters are not replaced; unload the other one first")
    stage = _writer(gateway)
    if request.lora_name in gateway.catalog.models and gateway.catalog.parent_of(request.lora_name) is None:
        raise invalid("lora_name", f"{request.lora_name!r} is the name of a model here")
    message = thinker_pb2.LoadLoraRequest(name=request.lora_name, path=request.lora_path)
    async with gateway.siblings.turn():
        replicas = [replica for replica in stage.replicas.values() if replica.serving]
        answers = await _of_all(gateway, replicas, "LoadLora", message)
        failures = [answer for answer in answers if isinstance(answer, Exception)]
        if failures:
            added = [r for r, answer in zip(replicas, answers, strict=True) if getattr(answer, "is_new", False)]
            await _of_all(gateway, added, "UnloadLora", thinker_pb2.UnloadLoraRequest(name=request.lora_name))
        await gateway.check(stage)
    _raise_first(failures)
    return PlainTextResponse(f"Success: LoRA adapter '{request.lora_name}' added successfully.")


@router.post("/v1/unload_lora_adapter", openapi_extra=page(UnloadRequest, "done", answered=_TEXT))
async def unload_lora_adapter(http: Request) -> PlainTextResponse:
    """Unloads an adapter from every replica of the thinker. Running requests keep it."""
    gateway = require_admin(http, "adapters are")
    request = await read_json(http, UnloadRequest)
    stage, message = _writer(gateway), thinker_pb2.UnloadLoraRequest(name=request.lora_name)
    async with gateway.siblings.turn():
        replicas = [replica for replica in stage.replicas.values() if replica.serving]
        answers = await _of_all(gateway, replicas, "UnloadLora", message)
        await gateway.check(stage)
    if all(isinstance(answer, NotFound) for answer in answers):
        reason = f"lora_name: there is no adapter {request.lora_name!r}"
        raise ApiError(404, reason, "lora_name", "model_not_found")
    _raise_first([answer for answer in answers if isinstance(answer, Exception) and not isinstance(answer, NotFound)])
    return PlainTextResponse(f"Success: LoRA adapter '{request.lora_name}' removed successfully.")


def _writer(gateway: Gateway) -> Stage:
    """The thinker. Raises ApiError: 400, there is none; 503, none serves."""
    stage = gateway.pipeline.output("text")
    if stage is None:
        raise invalid("lora_name", "no thinker here: only that takes adapters this way", "unsupported_model")
    with in_own_terms():
        stage.require_serving()
    return stage


async def _of_all(gateway: Gateway, replicas: list[Replica], method: str, message: Any) -> list[Any]:
    """Each replica's response to `message`, or its StageError."""
    calls = (replica.ask(method, message, gateway.settings.request_timeout_s) for replica in replicas)
    return await asyncio.gather(*calls, return_exceptions=True)


def _raise_first(failures: list[Exception]) -> None:
    """Raises ApiError for the first of `failures`, if any."""
    with in_own_terms(lambda member: _FIELDS.get(member, member)):
        for failure in failures:
            raise failure
