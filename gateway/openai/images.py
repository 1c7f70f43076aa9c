"""`POST /v1/images/generations` and `POST /v1/images/edits`."""

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Annotated, Any, Literal

import numpy as np
from fastapi import APIRouter, Depends, Request
from fastapi.responses import JSONResponse
from starlette.responses import Response

from gateway.errors import ApiError, invalid
from gateway.gateway import Gateway
from gateway.media.check import MediaFile
from gateway.openai.connection import LAST_WORD_S, EventStream, admitted, sse, while_connected
from gateway.openai.diffusion import ImageRequest
from gateway.openai.forms import FILE, is_form, page, read_form, read_json
from gateway.openai.image_generation import (
    FinishedImage,
    ImageGeneration,
    Preview,
    image_facts,
    load_pictures,
    to_base64,
)

router = APIRouter(tags=["images"])

_ANSWER = "ImagesResponse, or with stream: true {0}.partial_image and {0}.completed events"
_OPENAPI = page(ImageRequest, "application/json", _ANSWER.format("image_generation"))
_EDIT_OPENAPI = page(
    ImageRequest,
    "multipart/form-data",
    _ANSWER.format("image_edit"),
    {"image": {"type": "array", "items": FILE, "description": "also as image[]"}, "mask": FILE},
)

Kind = Literal["image_generation", "image_edit"]


@router.post("/v1/images/generations", openapi_extra=_OPENAPI, response_model=None)
async def generate_images(http: Request, gateway: Annotated[Gateway, Depends(admitted)]) -> Response:
    """Makes pictures of a prompt."""
    deadline = time.monotonic() + gateway.settings.request_timeout_s
    request = await read_json(http, ImageRequest, gateway.settings.request_timeout_s)
    return await _respond(http, gateway, request, [], None, deadline)


@router.post("/v1/images/edits", openapi_extra=_EDIT_OPENAPI, response_model=None)
async def edit_images(http: Request, gateway: Annotated[Gateway, Depends(admitted)]) -> Response:
    """Makes pictures of a prompt and others; the body is a form."""
    limit_s = gateway.settings.request_timeout_s
    deadline = time.monotonic() + limit_s
    if not is_form(http):
        raise ApiError(400, "the body must be multipart/form-data: pictures are sent as files", None, "invalid_form")
    most = gateway.settings.media_max_parts + 1
    request, files = await read_form(http, ImageRequest, limit_s, {"image", "mask"}, most)
    images, masks = files.get("image", []), files.get("mask", [])
    if not images:
        raise invalid("image", "required, but missing: send it as a file", "missing_required_parameter")
    if len(masks) > 1:
        raise invalid("mask", "is in the form twice")
    fields = [f"image[{i}]" for i in range(len(images))] if len(images) > 1 else ["image"]
    pictures = [MediaFile(field, "image", content=file) for field, file in zip(fields, images, strict=True)]
    mask = MediaFile("mask", "image", content=masks[0]) if masks else None
    return await _respond(http, gateway, request, pictures, mask, deadline)


async def _respond(
    http: Request,
    gateway: Gateway,
    request: ImageRequest,
    images: Sequence[MediaFile],
    mask: MediaFile | None,
    deadline: float,
) -> Response:
    stage = gateway.stage_for("image", request.model)
    info = image_facts(stage, edits=bool(images))
    start = request.image_start(info)
    if len(images) > info.max_images:
        raise invalid("image", f"there are {len(images)}; this model takes {info.max_images} at most")
    if mask is not None and not info.mask:
        raise invalid("mask", "this model takes none; leave it out")
    if mask is not None and len(images) > 1:
        raise invalid("mask", "only with one image, which it is a mask of")
    await load_pictures(gateway, [*images, *([mask] if mask else [])])
    start.request_id = http.state.request_id
    http.state.log["stream"] = bool(request.stream)
    pictures = ImageGeneration(stage, start, images, mask, deadline, http.state.log)
    answer = ImageAnswer(pictures, request, "image_edit" if images else "image_generation")
    if request.stream:
        return EventStream(answer.stream(), max(0.0, deadline - time.monotonic()) + LAST_WORD_S)
    return await while_connected(http.receive, answer.whole())


class ImageAnswer:
    """The response to one request.

    Args:
        pictures: makes them.
        request: how they are wanted.
        kind: what the events of a stream are called.
    """

    def __init__(self, pictures: ImageGeneration, request: ImageRequest, kind: Kind) -> None:
        self._pictures, self._request, self._kind = pictures, request, kind
        self._created = int(time.time())

    async def whole(self) -> Response:
        """The response in one piece. Raises ApiError."""
        made: dict[int, np.ndarray] = {}
        async with aclosing(self._pictures.events()) as events:
            async for event in events:
                if isinstance(event, FinishedImage):
                    made[event.output] = event.pixels
        pixels = [made[i] for i in sorted(made)]
        files = await asyncio.gather(*map(self._encode, pixels))
        body = {
            "created": self._created,
            "data": [{"b64_json": file} for file in files],
            **self._facts(pixels[0]),
            "quartet": self._pictures.quartet(),
        }
        return await asyncio.to_thread(JSONResponse, body)  # megabytes of text

    async def stream(self) -> AsyncGenerator[bytes, None]:
        """The response as server-sent events. Raises ApiError."""
        wants_progress = bool(self._request.quartet and self._request.quartet.progress)
        left = self._request.n or 1
        last: dict[str, Any] = {}  # waits for the summary
        async with aclosing(self._pictures.events()) as events:
            async for event in events:
                if isinstance(event, Preview):
                    body = await self._event("partial_image", event) | {"partial_image_index": event.index}
                    yield _named(body)
                elif isinstance(event, FinishedImage):
                    left -= 1
                    last = await self._event("completed", event)
                    if left:
                        yield await asyncio.to_thread(_named, last)
                elif wants_progress:
                    steps = {"step": event.step, "num_inference_steps": event.num_inference_steps}
                    yield _named({"type": "quartet.progress", "output": event.output, **steps})
        last["quartet"] = self._pictures.quartet() | last["quartet"]
        yield await asyncio.to_thread(_named, last)

    async def _event(self, what: str, event: Preview | FinishedImage) -> dict[str, Any]:
        seed = self._pictures.started.seed + event.output
        return {
            "type": f"{self._kind}.{what}",
            "created_at": self._created,
            "b64_json": await self._encode(event.pixels),
            **self._facts(event.pixels),
            "quartet": {"output": event.output, "seed": seed},
        }

    async def _encode(self, pixels: np.ndarray) -> str:
        return await asyncio.to_thread(to_base64, pixels, self._request.file_format, self._request.file_quality)

    def _facts(self, pixels: np.ndarray) -> dict[str, str]:
        """What the files are, which is not always what was asked for."""
        return {
            "background": "opaque",
            "output_format": self._request.file_format,
            "quality": "auto",
            "size": f"{pixels.shape[1]}x{pixels.shape[0]}",
        }


def _named(event: dict[str, Any]) -> bytes:
    """A server-sent event that is named by its type, as OpenAI's are."""
    return b"event: " + event["type"].encode() + b"\n" + sse(event)
