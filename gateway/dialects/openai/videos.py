"""`/v1/videos`: videos made in the background."""

import re
from collections.abc import AsyncGenerator
from contextlib import ExitStack
from copy import deepcopy
from dataclasses import replace
from typing import Annotated, Any, Literal, TypeVar

from fastapi import APIRouter, Depends, Request
from fastapi.responses import FileResponse
from starlette.responses import Response

from gateway.answers.files.images import named_images
from gateway.answers.gateway import Gateway
from gateway.answers.video_jobs import VideoJobs
from gateway.answers.video_store import VideoJob
from gateway.answers.videos import (
    VideoEditRequest,
    VideoInputs,
    VideoRequest,
    submit_video,
    video_object,
)
from gateway.errors import ApiError, invalid
from gateway.http.connection import admitted, owner_of
from gateway.http.forms import FILE, JSON, is_form, page, read_form, read_json
from gateway.http.json_writer import Json, first_page
from gateway.http.ranges import file_response
from gateway.media.check import MediaFile

router = APIRouter(tags=["videos"])

_POLL_AFTER = {"openai-poll-after-ms": "1000"}  # OpenAI's clients wait so long before they ask again
_DEFAULT_LIMIT, _MAX_LIMIT = 20, 100
_FILES: dict[str, Literal["image", "video"]] = {
    "input_reference": "image",
    "video": "video",
    "control_video": "video",
}
"""Files of a form, and what they are."""


def _openapi(model: type[VideoRequest]) -> dict[str, Any]:
    described = page(model, "the new Video object", answered=JSON)
    content = described["requestBody"]["content"]
    content["multipart/form-data"] = deepcopy(content["application/json"])
    content["multipart/form-data"]["schema"]["properties"] |= dict.fromkeys(_FILES, FILE)
    return described


@router.post("/v1/videos", openapi_extra=_openapi(VideoRequest))
async def create_video(http: Request, gateway: Annotated[Gateway, Depends(admitted)]) -> Response:
    """Submits a video. Its state is at /v1/videos/{id}, and then its file at /v1/videos/{id}/content."""
    request, files = await _read(http, VideoRequest)
    return await _submit(http, gateway, request, await _inputs(http, request, files))


@router.post("/v1/videos/edits", openapi_extra=_openapi(VideoEditRequest))
async def edit_video(http: Request, gateway: Annotated[Gateway, Depends(admitted)]) -> Response:
    """Submits a video that is made of another one: of a file, or of a finished video of this server."""
    request, files = await _read(http, VideoEditRequest)
    inputs = await _inputs(http, request, files)
    if request.video is not None:
        inputs = await _of_own(http, request.video.id, "video.id", inputs)
    if inputs.video is None:
        raise invalid("video", "required, but missing: send it as a file, or as {id}", "missing_required_parameter")
    return await _submit(http, gateway, request, inputs)


@router.post("/v1/videos/{video_id}/remix", openapi_extra=page(VideoRequest, "the new Video object", answered=JSON))
async def remix_video(http: Request, video_id: str, gateway: Annotated[Gateway, Depends(admitted)]) -> Response:
    """Submits a video that is made of a finished video of this server."""
    request = await read_json(http, VideoRequest)
    inputs = await _of_own(http, video_id, "video_id", await _inputs(http, request, {}))
    return await _submit(http, gateway, request, inputs)


async def _submit(http: Request, gateway: Gateway, request: VideoRequest, inputs: VideoInputs) -> Response:
    gateway.catalog.stage_for("video", gateway.catalog.meant(request.model, "video"))
    place: ExitStack = http.state.place.pop_all()  # the video counts among its key's requests until it ends
    try:
        video = await submit_video(gateway, request, inputs, owner_of(http), place.close, http.state.log)
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
    video, files = await _finished(http, video_id), _jobs(http).store.files
    if path := await files.here(video_id):
        return FileResponse(path, media_type="video/mp4", filename=f"{video_id}.mp4")
    if (size := await files.size(video_id)) is None:
        raise _gone()

    async def open_range(start: int, end: int) -> AsyncGenerator[bytes, None]:
        if (pieces := await files.open(video_id, start, end)) is None:
            raise _gone()
        return pieces

    headers = {"content-disposition": f'attachment; filename="{video_id}.mp4"'}
    gateway: Gateway = http.app.state.gateway
    limit_s, ended = gateway.settings.request_timeout_s, video.completed_at or 0
    return await file_response(http, size, open_range, video_id, ended, limit_s, "video/mp4", headers)


async def _finished(http: Request, video_id: str) -> VideoJob:
    """A finished video. Raises ApiError: 404."""
    video = await _video(http, video_id)
    if video.status != "completed":
        message = f"the video is {video.status}: there is a file only when it is completed"
        raise ApiError(404, message, "video_id", "video_not_completed")
    return video


def _gone() -> ApiError:
    return ApiError(404, "the video's file was removed from the server's storage", "video_id", "not_found")


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


Asked = TypeVar("Asked", bound=VideoRequest)


async def _read(http: Request, model: type[Asked]) -> tuple[Asked, dict[str, MediaFile]]:
    """The request, and the files of a form by name."""
    if not is_form(http):
        return await read_json(http, model), {}
    request, sent = await read_form(http, model, set(_FILES), max_files=len(_FILES))
    if twice := [name for name, files in sent.items() if len(files) > 1]:
        raise invalid(twice[0], "is in the form twice")
    return request, {name: MediaFile(name, _FILES[name], content=file) for name, (file,) in sent.items()}


async def _inputs(http: Request, request: VideoRequest, files: dict[str, MediaFile]) -> VideoInputs:
    """Those of a form, and those to fetch. Raises ApiError: 400, one is there twice, or a file is not there."""
    named = {} if request.input_reference is None else {"input_reference": request.input_reference}
    images = await named_images(http.app.state.gateway, named, owner_of(http))
    linked = {
        "input_reference": images[0] if images else None,
        "video": request.linked("video"),
        "control_video": request.linked("control_video"),
    }
    if twice := [name for name in files if linked[name] is not None]:
        raise invalid(twice[0], "is in the form twice")
    image, video, control_video = (files.get(name) or linked[name] for name in linked)
    return VideoInputs(image, video, control_video)


async def _of_own(http: Request, video_id: str, field: str, inputs: VideoInputs) -> VideoInputs:
    """With a finished video of this server as the one to start from. Raises ApiError: 400, 404."""
    if inputs.video is not None:
        raise invalid(inputs.video.field, f"is there with {field}; send one of the two")
    try:
        source = await _finished(http, video_id)
        if (content := await _jobs(http).store.files.read(video_id)) is None:
            raise _gone()
    except ApiError as error:
        if error.status == 404:
            error.rename(field)
        raise
    return replace(inputs, video=MediaFile(field, "video", content=content), source=source)
