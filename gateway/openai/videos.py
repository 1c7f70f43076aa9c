"""`/v1/videos`: videos made in the background."""

import asyncio
import re
import time
import uuid
from collections.abc import Callable
from contextlib import ExitStack
from copy import deepcopy
from typing import Annotated, Any, Self

from fastapi import APIRouter, Depends, Request
from fastapi.responses import FileResponse
from pydantic import BeforeValidator, Field, model_validator
from starlette.responses import Response

from gateway.errors import ApiError, from_error, invalid
from gateway.gateway import Gateway
from gateway.json_writer import Json
from gateway.media.check import MediaFile, load_media
from gateway.openai.connection import admitted, owner_of
from gateway.openai.diffusion import DiffusionRequest, fill_size, require_info
from gateway.openai.forms import FILE, is_form, page, read_form, read_json
from gateway.strict import Positive, Strict
from gateway.video_jobs import VideoJobs
from gateway.video_store import Video
from quartet.v1 import dit_pb2, server_info_pb2
from services.common.errors import StageError

router = APIRouter(tags=["videos"])

TASKS = (dit_pb2.DIT_TASK_TEXT_TO_VIDEO, dit_pb2.DIT_TASK_IMAGE_TO_VIDEO)
_POLL_AFTER = {"openai-poll-after-ms": "1000"}  # OpenAI's clients wait so long before they ask again
_DEFAULT_LIMIT, _MAX_LIMIT = 20, 100


def _number(value: Any) -> Any:
    """OpenAI's clients send seconds as a text."""
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        return value


class InputReference(Strict):
    """The first frame."""

    image_url: str | None = Field(default=None, min_length=1, description="https, http or data URL of an image")
    file_id: str | None = Field(default=None, description="refused: there are no uploaded files here")

    @model_validator(mode="after")
    def _is_a_url(self) -> Self:
        if self.image_url is None:
            raise ValueError("must be {image_url: an https, http or data URL}, or a file of a form")
        return self


class VideoRequest(DiffusionRequest):
    """A video to be made: OpenAI's members, and those of the diffusion transformer."""

    seconds: Annotated[float, Field(gt=0), BeforeValidator(_number)] | None = None
    num_frames: Positive | None = Field(default=None, description="instead of seconds")
    size: str | None = Field(default=None, description="WIDTHxHEIGHT in pixels; default: the model's")
    input_reference: InputReference | None = None

    def video_start(self, info: server_info_pb2.DitInfo) -> dit_pb2.DitStart:
        """The stage's start message, but for the picture.

        Raises:
            ApiError: 400 naming the member that the model cannot follow.
        """
        start = self.start(info)
        start.pixel_format = dit_pb2.PIXEL_FORMAT_UINT8
        if self.size is not None:
            fill_size(start, self.size, info, "H.264")
        start.num_frames = self._frames(info)
        return start

    def _frames(self, info: server_info_pb2.DitInfo) -> int:
        """Frames to ask for. Seconds become the nearest number of frames that the model can make."""
        multiple = max(1, info.frames_multiple)
        if self.num_frames is not None:
            if self.seconds is not None:
                raise invalid("num_frames", "says the same as seconds; send one of the two")
            if self.num_frames > info.max_frames:
                raise invalid("num_frames", f"must be at most {info.max_frames}")
            if (self.num_frames - 1) % multiple:
                raise invalid("num_frames", f"must be 1 more than a multiple of {multiple}")
            return self.num_frames
        if self.seconds is None:
            return info.default_frames
        frames = round(min(self.seconds, 1e6) * info.frames_per_second / multiple) * multiple + 1
        if frames > max(info.max_frames, 1):
            most_s = info.max_frames / info.frames_per_second
            raise invalid("seconds", f"must be at most {most_s:.4g}: the model makes {info.max_frames} frames at most")
        return frames


def video_object(video: Video) -> dict[str, Any]:
    """OpenAI's Video, with a `quartet` object."""
    as_stored = ("id", "model", "status", "progress", "created_at", "completed_at", "prompt")
    error = {"code": video.error_code, "message": video.error_message} if video.error_code else None
    return {
        "object": "video",
        **{name: getattr(video, name) for name in as_stored},
        "expires_at": None if video.expires_at is None else int(video.expires_at),
        "seconds": f"{video.frames / (video.frames_per_second or 1):.4g}",
        "size": f"{video.width}x{video.height}",
        "remixed_from_video_id": None,
        "error": error,
        "quartet": {
            "seed": None if video.seed is None else int(video.seed),
            "num_frames": video.frames,
            "frames_per_second": video.frames_per_second,
        },
    }


def _openapi() -> dict[str, Any]:
    described = page(VideoRequest, "application/json", "the new Video object", answered=("application/json",))
    content = described["requestBody"]["content"]
    content["multipart/form-data"] = deepcopy(content["application/json"])
    content["multipart/form-data"]["schema"]["properties"]["input_reference"] = FILE
    return described


@router.post("/v1/videos", openapi_extra=_openapi(), response_model=None)
async def create_video(http: Request, gateway: Annotated[Gateway, Depends(admitted)]) -> Response:
    """Takes a video on. Its state is at /v1/videos/{id}, and then its file at /v1/videos/{id}/content."""
    request, picture = await _read(http, gateway)
    gateway.stage_for("video", request.model)
    place: ExitStack = http.state.place.pop_all()  # the video counts among its key's requests until it ends
    try:
        video = await take_on(gateway, request, picture, owner_of(http), place.close, http.state.log)
    except BaseException:
        place.close()
        raise
    return Json(video_object(video), headers=_POLL_AFTER)


async def take_on(
    gateway: Gateway,
    request: VideoRequest,
    picture: MediaFile | None,
    owner: str | None,
    on_end: Callable[[], object],
    log: dict[str, Any],
) -> Video:
    """A new job, which no crash can lose.

    Args:
        gateway: the gateway.
        request: what is to be made.
        picture: the first frame; loaded here.
        owner: whose it is.
        on_end: called when it has ended, however; not if this raises.
        log: fields of the request's log line.

    Raises:
        ApiError: 400 naming the member that the model cannot follow; 429, too many wait; 503, it does not serve.
    """
    stage, jobs = gateway.stage_for("video", request.model), gateway.videos
    assert jobs is not None, "there are jobs where a stage makes videos"
    info = require_info(stage, TASKS, "videos")
    start = request.video_start(info)
    if picture is None and dit_pb2.DIT_TASK_TEXT_TO_VIDEO not in info.tasks:
        raise invalid("input_reference", "required: this model animates a picture", "missing_required_parameter")
    if picture is not None:
        if dit_pb2.DIT_TASK_IMAGE_TO_VIDEO not in info.tasks:
            raise invalid("input_reference", "this model makes videos of a prompt alone; leave it out")
        await load_media(gateway.fetcher, [picture])
        start.images.add(field=picture.field)
    video = Video(
        id=f"video_{uuid.uuid4().hex}",
        model=gateway.model_of(stage) or "",
        prompt=request.prompt,
        status="queued",
        progress=0,
        created_at=int(time.time()),
        width=start.width or info.default_width,
        height=start.height or info.default_height,
        frames=start.num_frames,
        frames_per_second=info.frames_per_second,
        seed=str(request.seed) if request.seed is not None else None,
        owner=owner,
    )
    start.request_id = video.id
    log |= {"video": video.id, "frames": video.frames}
    try:
        await jobs.submit(video, stage, start, picture and picture.content, on_end=on_end)
    except StageError as error:
        raise from_error("gateway", error) from None
    return video


@router.get("/v1/videos")
async def list_videos(http: Request) -> dict[str, Any]:
    """The videos, newest first: `limit` of them (20; at most 100) after the one whose id is `after`; `order` asc or
    desc."""
    query = http.query_params
    limit, order, after = query.get("limit", str(_DEFAULT_LIMIT)), query.get("order", "desc"), query.get("after")
    if not re.fullmatch("[0-9]{1,3}", limit) or not 1 <= int(limit) <= _MAX_LIMIT:
        raise invalid("limit", f"must be 1 to {_MAX_LIMIT}")
    if order not in ("asc", "desc"):
        raise invalid("order", "must be asc or desc")
    found = await _jobs(http).store.page(after, int(limit) + 1, order == "desc", owner_of(http))
    if found is None:
        raise invalid("after", f"no video {after!r}")
    data = [video_object(video) for video in found[: int(limit)]]
    return {
        "object": "list",
        "data": data,
        "first_id": data[0]["id"] if data else None,
        "last_id": data[-1]["id"] if data else None,
        "has_more": len(found) > int(limit),
    }


@router.get("/v1/videos/{video_id}", response_model=None)
async def get_video(http: Request, video_id: str) -> Response:
    """A video's state."""
    return Json(video_object(await _video(http, video_id)), headers=_POLL_AFTER)


@router.delete("/v1/videos/{video_id}")
async def delete_video(http: Request, video_id: str) -> dict[str, Any]:
    """Removes a video and its file; one that is not finished is given up."""
    if not await _jobs(http).delete(video_id, owner_of(http)):
        raise _not_found(video_id)
    return {"id": video_id, "object": "video.deleted", "deleted": True}


@router.get("/v1/videos/{video_id}/content", response_model=None)
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


async def _video(http: Request, video_id: str) -> Video:
    video = await _jobs(http).store.get(video_id, owner_of(http))
    if video is None:
        raise _not_found(video_id)
    return video


def _not_found(video_id: str) -> ApiError:
    message = f"no video {video_id!r}; it was deleted, has expired, or is another gateway's"
    return ApiError(404, message, "video_id", "not_found")


async def _read(http: Request, gateway: Gateway) -> tuple[VideoRequest, MediaFile | None]:
    """The request and its picture: a file of a form, or yet to be fetched."""
    limit_s, files = gateway.settings.request_timeout_s, {}
    if is_form(http):
        request, files = await read_form(http, VideoRequest, limit_s, {"input_reference"}, max_files=1)
    else:
        request = await read_json(http, VideoRequest, limit_s)
    reference = request.input_reference
    if files and reference is not None:
        raise invalid("input_reference", "is in the form twice")
    if reference is not None:
        return request, MediaFile("input_reference", "image", reference.image_url or "")
    return request, MediaFile("input_reference", "image", content=files["input_reference"][0]) if files else None
