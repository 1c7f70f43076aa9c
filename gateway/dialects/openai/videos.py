"""`/v1/videos`: videos made in the background."""

import asyncio
import re
from contextlib import ExitStack
from copy import deepcopy
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request
from fastapi.responses import FileResponse
from starlette.responses import Response

from gateway.answers.gateway import Gateway
from gateway.answers.video_jobs import VideoJobs
from gateway.answers.video_store import VideoJob
from gateway.answers.videos import VideoRequest, submit_video, video_object
from gateway.errors import ApiError, invalid
from gateway.http.connection import admitted, owner_of
from gateway.http.forms import FILE, JSON, is_form, page, read_form, read_json
from gateway.http.json_writer import Json, first_page
from gateway.media.check import MediaFile

router = APIRouter(tags=["videos"])

_POLL_AFTER = {"openai-poll-after-ms": "1000"}  # OpenAI's clients wait so long before they ask again
_DEFAULT_LIMIT, _MAX_LIMIT = 20, 100


def _openapi() -> dict[str, Any]:
    described = page(VideoRequest, "the new Video object", answered=JSON)
    content = described["requestBody"]["content"]
    content["multipart/form-data"] = deepcopy(content["application/json"])
    content["multipart/form-data"]["schema"]["properties"]["input_reference"] = FILE
    return described


@router.post("/v1/videos", openapi_extra=_openapi())
async def create_video(http: Request, gateway: Annotated[Gateway, Depends(admitted)]) -> Response:
    """Submits a video. Its state is at /v1/videos/{id}, and then its file at /v1/videos/{id}/content."""
    request, image = await _read(http)
    gateway.catalog.stage_for("video", gateway.catalog.meant(request.model, "video"))
    place: ExitStack = http.state.place.pop_all()  # the video counts among its key's requests until it ends
    try:
        video = await submit_video(gateway, request, image, owner_of(http), place.close, http.state.log)
    except BaseException:
        place.close()
        raise
    return Json(video_object(video), headers=_POLL_AFTER)


@router.get("/v1/videos")
async def list_videos(http: Request) -> dict[str, Any]:
    """The videos, newest first: `limit` of them (20; at most 100) after the id `after`; `order` asc or desc."""
    query = http.query_params
    limit, order, after = query.get("limit", str(_DEFAULT_LIMIT)), query.get("order", "desc"), query.get("after")
    if not re.fullmatch("[0-9]{1,3}", limit) or not 1 <= int(limit) <= _MAX_LIMIT:
        raise invalid("limit", f"must be 1 to {_MAX_LIMIT}")
    if order not in ("asc", "desc"):
        raise invalid("order", "must be asc or desc")
    found = await _jobs(http).store.page(after, int(limit) + 1, order == "desc", owner_of(http))
    if found is None:
        raise invalid("after", f"no video {after!r}")
    return first_page(list(map(video_object, found)), int(limit))


@router.get("/v1/videos/{video_id}")
async def get_video(http: Request, video_id: str) -> Response:
    """A video's state."""
    return Json(video_object(await _video(http, video_id)), headers=_POLL_AFTER)


@router.delete("/v1/videos/{video_id}")
async def delete_video(http: Request, video_id: str) -> dict[str, Any]:
    """Removes a video and its file; an unfinished one is cancelled."""
    if not await _jobs(http).delete(video_id, owner_of(http)):
        raise _not_found(video_id)
    return {"id": video_id, "object": "video.deleted", "deleted": True}


@router.get("/v1/videos/{video_id}/content")
async def download_video(http: Request, video_id: str) -> Response:
    """A finished video's file, or a range of it."""
    variant = http.query_params.get("variant", "video")
    if variant != "video":
        raise invalid("variant", "there is only the video itself")
    video = await _video(http, video_id)
    if video.status != "completed":
        message = f"the video is {video.status}: there is a file only when it is completed"
        raise ApiError(404, message, "video_id", "video_not_completed")
    path = _jobs(http).store.file(video_id)
    if not await asyncio.to_thread(path.is_file):
        raise ApiError(404, "the video's file was removed from the server's directory", "video_id", "not_found")
    return FileResponse(path, media_type="video/mp4", filename=f"{video_id}.mp4")


def _jobs(http: Request) -> VideoJobs:
    gateway: Gateway = http.app.state.gateway
    if (jobs := gateway.videos) is None:
        raise ApiError(404, "this server makes no videos", None, "not_found")
    return jobs


async def _video(http: Request, video_id: str) -> VideoJob:
    video = await _jobs(http).store.get(video_id, owner_of(http))
    if video is None:
        raise _not_found(video_id)
    return video


def _not_found(video_id: str) -> ApiError:
    message = f"no video {video_id!r}; it was deleted, has expired, or is another gateway's"
    return ApiError(404, message, "video_id", "not_found")


async def _read(http: Request) -> tuple[VideoRequest, MediaFile | None]:
    """The request and its image: a form's file, or one to fetch."""
    files = {}
    if is_form(http):
        request, files = await read_form(http, VideoRequest, {"input_reference"}, max_files=1)
    else:
        request = await read_json(http, VideoRequest)
    reference = request.input_reference
    if files and reference is not None:
        raise invalid("input_reference", "is in the form twice")
    if reference is not None:
        return request, MediaFile("input_reference", "image", reference.image_url or "")
    return request, MediaFile("input_reference", "image", content=files["input_reference"][0]) if files else None
