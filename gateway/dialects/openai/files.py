"""`/v1/files`: files that clients upload, and name in later requests."""

import asyncio
import time
from contextlib import aclosing
from typing import Annotated, Any, Literal
from urllib.parse import quote

from fastapi import APIRouter, Depends, Request
from pydantic import AfterValidator, Field
from starlette.responses import Response

from gateway.answers.files.store import StoredFile
from gateway.answers.gateway import Gateway
from gateway.errors import ApiError, invalid
from gateway.http.connection import StreamedResponse, admitted, owner_of
from gateway.http.forms import FILE, JSON, page, read_query
from gateway.http.json_writer import Json, first_page
from gateway.http.uploads import Upload
from gateway.validation import Strict

router = APIRouter(tags=["files"])
PATH = "/v1/files"
_MOST_LISTED = 10_000
_PURPOSES = ("user_data", "vision", "assistants", "batch", "evals")


def _purpose(purpose: str) -> str:
    if purpose == "fine-tune":
        raise ValueError("no model is trained here; use user_data for a file that a request names")
    if purpose not in _PURPOSES:
        raise ValueError(f"must be one of {', '.join(_PURPOSES)}")
    return purpose


class FileExpiry(Strict):
    anchor: Literal["created_at"]
    seconds: Annotated[int, Field(ge=3600, le=2_592_000)] = Field(description="3600 to 2592000, which are 30 days")


class FileRequest(Strict):
    """A file: OpenAI's fields."""

    purpose: Annotated[str, AfterValidator(_purpose)] = Field(
        description=f"{', '.join(_PURPOSES)}; lists can be of one. Any file can be named in a request"
    )
    expires_after: FileExpiry | None = Field(
        default=None, description="as expires_after[anchor] and expires_after[seconds]; default: file_ttl_s"
    )


class FilePage(Strict):
    limit: Annotated[int, Field(ge=1, le=_MOST_LISTED)] = _MOST_LISTED
    order: Literal["asc", "desc"] = "desc"
    after: str | None = None
    purpose: str | None = None


_OPENAPI = page(FileRequest, "the File object", {"file": FILE}, "file", JSON, media_type="multipart/form-data")


@router.post(PATH, openapi_extra=_OPENAPI)
async def upload_file(http: Request, gateway: Annotated[Gateway, Depends(admitted)]) -> dict[str, Any]:
    """Keeps a file, which later requests can name by its id."""
    upload = Upload(http, FileRequest, "file", gateway.settings.max_file_bytes)

    def described() -> StoredFile:
        request, now = upload.read(), time.time()
        kept_s = gateway.settings.file_ttl_s if request.expires_after is None else request.expires_after.seconds
        return StoredFile("", "", request.purpose, upload.filename or "", 0, int(now), now + kept_s)

    async with aclosing(upload.pieces()) as pieces:
        file = await gateway.files.create(pieces, owner_of(http), described)
    http.state.log |= {"file": file.id, "file_bytes": file.bytes}
    return _object(file)


@router.get(PATH)
async def list_files(http: Request) -> Response:
    """The files, newest first: `limit` of them (10000) after the id `after`; `order` asc or desc; of one `purpose`."""
    gateway: Gateway = http.app.state.gateway
    wanted = read_query(http, FilePage)
    files = await gateway.files.store.page(wanted.after, wanted.limit + 1, wanted.order, wanted.purpose, owner_of(http))
    if files is None:
        raise invalid("after", f"there is no file {(wanted.after or '')[:80]!r}")
    return await asyncio.to_thread(lambda: Json(first_page(list(map(_object, files)), wanted.limit)))


@router.get(PATH + "/{file_id}")
async def get_file(http: Request, file_id: str) -> dict[str, Any]:
    """What a file is."""
    return _object(await _file(http, file_id))


@router.get(PATH + "/{file_id}/content")
async def download_file(http: Request, file_id: str) -> Response:
    """A file's bytes."""
    gateway: Gateway = http.app.state.gateway
    file = await _file(http, file_id)
    headers = {"content-disposition": f"attachment; filename*=UTF-8''{quote(file.filename, safe='')}"}
    pieces, limit_s = await gateway.files.open(file), gateway.settings.request_timeout_s
    response = StreamedResponse(pieces, limit_s, "application/octet-stream", headers)
    response.headers["content-length"] = str(file.bytes)
    return response


@router.delete(PATH + "/{file_id}")
async def delete_file(http: Request, file_id: str) -> dict[str, Any]:
    """Removes a file."""
    gateway: Gateway = http.app.state.gateway
    file = await _file(http, file_id)
    await gateway.files.delete(file)
    http.state.log["file"] = file.id
    return {"id": file.id, "object": "file", "deleted": True}


async def _file(http: Request, file_id: str) -> StoredFile:
    """Raises ApiError: 404, there is none, or it is another key's."""
    gateway: Gateway = http.app.state.gateway
    file = await gateway.files.get(file_id, owner_of(http))
    if file is None:
        message = f"there is no file {file_id[:80]!r}; it was deleted, has expired, or is another gateway's"
        raise ApiError(404, message, "file_id", "not_found")
    return file


def _object(file: StoredFile) -> dict[str, Any]:
    """OpenAI's File."""
    return {
        "id": file.id,
        "object": "file",
        "bytes": file.bytes,
        "created_at": file.created_at,
        "expires_at": int(file.expires_at),
        "filename": file.filename,
        "purpose": file.purpose,
        "status": "processed",
        "status_details": None,
    }
