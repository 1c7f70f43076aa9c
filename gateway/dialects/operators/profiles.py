"""`POST /start_profile` and `/stop_profile`, for administrators; `GET /v1/quartet/trace/ID`."""

import asyncio
import json
import shutil
import tarfile
import tempfile
from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
from fastapi import APIRouter, Request
from pydantic import Field
from starlette.responses import Response

from gateway.answers.gateway import Gateway
from gateway.errors import ApiError, in_own_terms
from gateway.http.connection import StreamedResponse, key_of, require_admin
from gateway.http.forms import page, parsed
from gateway.http.json_writer import Json
from gateway.pipeline.replica import Replica
from gateway.profiling.clocks import spans_of
from gateway.profiling.fan_out import CLOCK_TIMEOUT_S, GATEWAY, as_json, manifest
from gateway.validation import Listed, Strict
from services.common.errors import AlreadyExists, NotFound, StageError
from services.common.telemetry.spans import monotonic_to_unix_ns

PIECE_BYTES = 256 * 1024
MANIFEST = "profile.json"
_COMPLETION = "chatcmpl-"

router = APIRouter(tags=["operations"])


class StartRequest(Strict):
    """Stages and duration of a profile; all members are optional."""

    stages: Listed[str] | None = Field(default=None, min_length=1, description="names of stages; default: all of them")
    seconds: float | None = Field(default=None, gt=0, description="after which it ends by itself; default: 60")


@router.post("/start_profile", openapi_extra=page(StartRequest, "what records", answered=()))
async def start_profile(http: Request) -> Json:
    """Starts a profile of every replica that can be reached."""
    gateway = require_admin(http, "profiles are")
    body = await http.body()
    request = await parsed(StartRequest, body) if body.strip() else StartRequest()
    profiling = gateway.profiling
    with _profile_errors():
        answers = await profiling.start(profiling.replicas(request.stages), request.seconds or 0.0)
    stages: dict[str, dict[str, str]] = {}
    for replica, answer in answers.items():
        state = f"not recorded: {answer}" if isinstance(answer, StageError) else "recording"
        stages.setdefault(replica.stage, {})[replica.address] = state
    seconds = max(answer for answer in answers.values() if not isinstance(answer, StageError))
    return Json({"seconds": seconds, "stages": stages})


@router.post(
    "/stop_profile",
    response_class=Response,
    responses={200: {"content": {"application/x-tar": {}}}, 409: {"description": "no stage has a profile"}},
)
async def stop_profile(http: Request) -> Response:
    """Stops the profile, and sends a tar; its profile.json describes the other files."""
    gateway = require_admin(http, "profiles are")
    headers = {"content-disposition": 'attachment; filename="profile.tar"'}
    return StreamedResponse(_archive(gateway), gateway.settings.request_timeout_s, "application/x-tar", headers)


async def _archive(gateway: Gateway) -> AsyncGenerator[bytes, None]:
    directory = Path(await asyncio.to_thread(tempfile.mkdtemp, prefix="quartet-profile-"))
    try:
        with _profile_errors():
            fetched, own = await gateway.profiling.stop(directory)
        description = await asyncio.to_thread(lambda: json.dumps(manifest(fetched, own)).encode())
        yield _header(MANIFEST, len(description)) + description + _padding(len(description))
        for path in [path for each in fetched if each.failure is None for _, path in each.files]:
            size_bytes = path.stat().st_size
            yield _header(path.name, size_bytes)
            with path.open("rb") as opened:
                while piece := await asyncio.to_thread(opened.read, PIECE_BYTES):
                    yield piece
            yield _padding(size_bytes)
        yield bytes(2 * tarfile.BLOCKSIZE)
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def _header(name: str, size_bytes: int) -> bytes:
    member = tarfile.TarInfo(name)
    member.size = size_bytes
    return member.tobuf()


def _padding(size_bytes: int) -> bytes:
    return bytes(-size_bytes % tarfile.BLOCKSIZE)


@contextmanager
def _profile_errors() -> Iterator[None]:
    """Raises ApiError: a 409 for a profile that runs already, or does not exist."""
    with in_own_terms():
        try:
            yield
        except AlreadyExists as error:
            raise ApiError(409, str(error), None, "profile_running") from error
        except NotFound as error:
            raise ApiError(409, str(error), None, "no_profile") from error


@router.get("/v1/quartet/trace/{request_id}")
async def trace(http: Request, request_id: str) -> Json:
    """Where a request's time went, stage by stage: one of the last 1,000 that each process has served.

    The id is that of the response's x-request-id header, or of the completion. With API keys, an administrator's sees
    every request, another one its own."""
    gateway: Gateway = http.app.state.gateway
    for known_id in dict.fromkeys([request_id, request_id.removeprefix(_COMPLETION)]):
        spans, unreachable = await _spans(http, gateway, known_id)
        if spans:
            return Json({"request_id": known_id, "spans": spans, "unreachable": unreachable})
    message = f"no process has a span of {request_id!r}: it was not among the last 1,000 requests, or is another key's"
    raise ApiError(404, message, "request_id", "request_not_found")


async def _spans(http: Request, gateway: Gateway, request_id: str) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """(visible spans of the request and its parts; unreachable replicas)."""
    key = key_of(http)
    found = gateway.spans.find(request_id)
    if key is not None and not key.entry.admin:
        if not any(span.request_id == request_id and span.owner == key.name for span in found):
            return [], []
        # several requests may have had this id, one after the other
        found = [span for span in found if span.request_id != request_id or span.owner == key.name]
    # "ID-1" may be a part of this request, or another request with that id
    others = {span.request_id for span in found if span.request_id != request_id}
    to_unix_ns = monotonic_to_unix_ns()
    own = [as_json(span.to_message(to_unix_ns)) | {"address": ""} for span in found]
    replicas = gateway.profiling.replicas()
    answers = await asyncio.gather(*(_ask(replica, request_id) for replica in replicas))
    spans = [*own, *(span for answer in answers if isinstance(answer, list) for span in answer)]
    unreachable = [
        {"stage": replica.stage, "address": replica.address, "reason": str(answer)}
        for replica, answer in zip(replicas, answers, strict=True)
        if isinstance(answer, StageError)
    ]
    return sorted((span for span in spans if span["request_id"] not in others), key=_order), unreachable


def _order(span: dict[str, Any]) -> tuple[bool, float]:
    """The gateway first, then by first output: all stages of an answer start at once."""
    return span["stage"] != GATEWAY, span["first_output_us"] or span["start_us"]


async def _ask(replica: Replica, request_id: str) -> list[dict[str, Any]] | StageError:
    try:
        answer, clock = await spans_of(replica, request_id, CLOCK_TIMEOUT_S)
    except grpc.aio.AioRpcError as error:
        return replica.failure(error)
    return [as_json(span, clock.offset_ns) | {"address": replica.address} for span in answer.spans]
