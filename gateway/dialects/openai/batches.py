"""`/v1/batches`: many requests in a file, answered while nobody else asks."""

import secrets
import time
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Request
from pydantic import Field
from starlette.responses import Response

from gateway.answers.batches.runner import BatchRunner
from gateway.answers.batches.store import StoredBatch
from gateway.answers.gateway import Gateway
from gateway.dialects.openai.files import FileExpiry
from gateway.errors import ApiError, invalid
from gateway.http.connection import admitted, owner_of
from gateway.http.forms import JSON, page, read_json, read_query
from gateway.http.json_writer import Json, first_page
from gateway.validation import Metadata, Strict

router = APIRouter(tags=["batches"])
PATH = "/v1/batches"
_WINDOW_S = 86_400
_MOST_LISTED = 100
Endpoint = Literal[
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/embeddings",
    "/v1/images/generations",
    "/v1/images/edits",
    "/v1/audio/speech",
    "/v1/audio/transcriptions",
    "/v1/audio/translations",
]


class BatchCreate(Strict):
    """A batch: OpenAI's members."""

    input_file_id: str = Field(description="an uploaded file of JSON lines: `custom_id`, `method`, `url`, `body`")
    endpoint: Endpoint = Field(description="of all lines")
    completion_window: Literal["24h"] = Field(description="24h; what has not begun then is left out")
    metadata: Metadata | None = None
    output_expires_after: FileExpiry | None = Field(
        default=None, description="of the files of results, as `expires_after` of an uploaded file"
    )


class BatchPage(Strict):
    limit: Annotated[int, Field(ge=1, le=_MOST_LISTED)] = 20
    after: str | None = None


@router.post(PATH, openapi_extra=page(BatchCreate, "the Batch object", answered=JSON))
async def create_batch(http: Request, gateway: Annotated[Gateway, Depends(admitted)]) -> dict[str, Any]:
    """Takes on a batch. Its requests are answered one after another, at a low priority."""
    request, runner = await read_json(http, BatchCreate), _runner(http)
    owner = owner_of(http)
    if await gateway.files.get(request.input_file_id, owner) is None:
        reason = f"there is no file {request.input_file_id[:80]!r}; upload it by /v1/files with purpose batch"
        raise invalid("input_file_id", reason, "file_not_found")
    now, expiry = int(time.time()), request.output_expires_after
    body = {
        "id": f"batch_{secrets.token_hex(16)}",
        "object": "batch",
        "endpoint": request.endpoint,
        "errors": None,
        "input_file_id": request.input_file_id,
        "completion_window": request.completion_window,
        "status": "validating",
        "output_file_id": None,
        "error_file_id": None,
        "created_at": now,
        "expires_at": now + _WINDOW_S,
        **dict.fromkeys(f"{end}_at" for end in _ENDS),
        "request_counts": {"total": 0, "completed": 0, "failed": 0},
        "metadata": request.metadata,
        "output_expires_s": None if expiry is None else expiry.seconds,
    }
    batch = StoredBatch(body["id"], owner or "", body, cancels=False)
    await runner.store.add(batch, runner.models)
    runner.wake()
    http.state.log["batch"] = batch.id
    return _public(batch)


_ENDS = ("in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled")


@router.get(PATH)
async def list_batches(http: Request) -> Response:
    """The batches, newest first: `limit` of them (20) after the id `after`."""
    wanted = read_query(http, BatchPage)
    found = await _runner(http).store.page(wanted.after, wanted.limit + 1, owner_of(http))
    if found is None:
        raise invalid("after", f"there is no batch {(wanted.after or '')[:80]!r}")
    return Json(first_page(list(map(_public, found)), wanted.limit))


@router.get(PATH + "/{batch_id}")
async def get_batch(http: Request, batch_id: str) -> dict[str, Any]:
    """How far a batch is."""
    return _public(await _found(http, batch_id))


@router.post(PATH + "/{batch_id}/cancel")
async def cancel_batch(http: Request, batch_id: str) -> dict[str, Any]:
    """Leaves out what has not begun. What is done is in the batch's files."""
    batch = await _found(http, batch_id)
    if not batch.is_unfinished:
        raise ApiError(409, f"{batch.id} has ended: it is {batch.body['status']}", None, "batch_ended")
    await _runner(http).store.request_cancel(batch.id)
    return _public(await _found(http, batch_id))


async def _found(http: Request, batch_id: str) -> StoredBatch:
    """Raises ApiError: 404, there is none, or it is another key's."""
    batch = await _runner(http).store.get(batch_id, owner_of(http))
    if batch is None:
        message = f"there is no batch {batch_id[:80]!r}; it was removed, is another gateway's, or never was"
        raise ApiError(404, message, "batch_id", "not_found")
    return batch


def _runner(http: Request) -> BatchRunner:
    """Raises ApiError: 404, files are kept nowhere."""
    runner: BatchRunner | None = http.app.state.batches
    if runner is None:
        raise ApiError(404, "this gateway keeps no files, and so no batches: it has no files_dir", None, "not_found")
    return runner


def _public(batch: StoredBatch) -> dict[str, Any]:
    return {name: value for name, value in batch.body.items() if name != "output_expires_s"}
