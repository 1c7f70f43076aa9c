"""`POST /v1/images/generations` and `POST /v1/images/edits`."""

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request
from pydantic import Field
from starlette.responses import Response

from gateway.answers.diffusion import ImageRequest
from gateway.answers.files.images import ImageReference, named_images
from gateway.answers.gateway import Gateway
from gateway.answers.images import GeneratedImage, ImageGeneration, InputImages, to_generation
from gateway.answers.meter import Meter
from gateway.errors import invalid
from gateway.http.connection import admitted, named_sse, owner_of, respond
from gateway.http.forms import FILE, is_json, page, read_form, read_json
from gateway.http.json_writer import Json
from gateway.media.check import MediaFile
from gateway.validation import Listed
from quartet.v1.dit_pb2 import DitProgress

router = APIRouter(tags=["images"])

_ANSWER = "ImagesResponse, or with stream: true {0}.partial_image and {0}.completed events"
_OPENAPI = page(ImageRequest, _ANSWER.format("image_generation"))
_EDIT_OPENAPI = page(
    ImageRequest,
    _ANSWER.format("image_edit"),
    {
        "image": {"type": "array", "items": FILE, "description": "also as image[]"},
        "mask": FILE,
        "control_image": {"type": "array", "items": FILE, "description": "as quartet.dit.control_images"},
    },
    needed="image",
    media_type="multipart/form-data",
)


class _EditInJson(ImageRequest):
    """An edit whose images are named."""

    images: Listed[ImageReference] = Field(min_length=1, description="each {image_url} or {file_id}")
    mask: ImageReference | None = None


_EDIT_OPENAPI["requestBody"]["content"] |= page(_EditInJson, "")["requestBody"]["content"]


@router.post("/v1/images/generations", openapi_extra=_OPENAPI)
async def generate_images(http: Request, gateway: Annotated[Gateway, Depends(admitted)]) -> Response:
    """Makes images from a prompt."""
    request = await read_json(http, ImageRequest)
    return await _respond(http, gateway, request, InputImages(controls=request.control_images))


@router.post("/v1/images/edits", openapi_extra=_EDIT_OPENAPI)
async def edit_images(http: Request, gateway: Annotated[Gateway, Depends(admitted)]) -> Response:
    """Makes images from a prompt and other images; the body is a form, or JSON that names the images."""
    if is_json(http):
        in_json = await read_json(http, _EditInJson)
        return await _respond(http, gateway, in_json, await _named(http, gateway, in_json))
    most = gateway.fetcher.limits.media_max_parts + 1
    request, files = await read_form(http, ImageRequest, {"image", "mask", "control_image"}, most)
    images, masks, controls = (files.get(name, []) for name in ("image", "mask", "control_image"))
    if not images:
        raise invalid("image", "required, but missing: send it as a file", "missing_required_parameter")
    if len(masks) > 1:
        raise invalid("mask", "is in the form twice")
    mask = MediaFile("mask", "image", content=masks[0]) if masks else None
    inputs = InputImages(_sent("image", images), mask, [*request.control_images, *_sent("control_image", controls)])
    return await _respond(http, gateway, request, inputs)


async def _named(http: Request, gateway: Gateway, request: _EditInJson) -> InputImages:
    """Raises ApiError: 400, a file is not there."""
    named = {f"images[{i}]": image for i, image in enumerate(request.images)}
    if request.mask is not None:
        named["mask"] = request.mask
    files = await named_images(gateway, named, owner_of(http))
    mask = None if request.mask is None else files.pop()
    return InputImages(files, mask, request.control_images)


def _sent(name: str, files: Sequence[bytes]) -> list[MediaFile]:
    """Files of a form."""
    fields = [name] if len(files) == 1 else [f"{name}[{i}]" for i in range(len(files))]
    return [MediaFile(field, "image", content=file) for field, file in zip(fields, files, strict=True)]


async def _respond(http: Request, gateway: Gateway, request: ImageRequest, inputs: InputImages) -> Response:
    meter = Meter.of(http.state, gateway.settings.request_timeout_s)
    generation = await to_generation(gateway, request, inputs, meter)
    answer = ImageAnswer(generation, request, "image_edit" if inputs.images else "image_generation")
    return await respond(http, answer, request.stream)


class ImageAnswer:
    """The response to one request; `kind` begins the names of its events."""

    def __init__(self, generation: ImageGeneration, request: ImageRequest, kind: str) -> None:
        self._generation, self._request, self._kind = generation, request, kind
        self._created = int(time.time())

    async def whole(self) -> Response:
        async with aclosing(self._generation.finished()) as images:
            made = {image.output: image.pixels async for image in images}
        pixels = [made[i] for i in sorted(made)]
        files = await asyncio.gather(*(asyncio.to_thread(self._request.to_base64, each) for each in pixels))
        body = {
            "created": self._created,
            "data": [{"b64_json": file} for file in files],
            **self._request.file_facts(pixels[0]),
            "quartet": self._generation.quartet(),
        }
        return await asyncio.to_thread(Json, body)  # megabytes of text

    async def stream(self) -> AsyncGenerator[bytes, None]:
        wants_progress = bool(self._request.quartet and self._request.quartet.progress)
        left = self._request.n or 1
        last: dict[str, Any] = {}  # waits for the summary
        async with aclosing(self._generation.events()) as events:
            async for event in events:
                if isinstance(event, GeneratedImage) and event.preview is not None:
                    body = await self._event("partial_image", event) | {"partial_image_index": event.preview}
                    yield named_sse(body)
                elif isinstance(event, GeneratedImage):
                    left -= 1
                    last = await self._event("completed", event)
                    if left:
                        yield await asyncio.to_thread(named_sse, last)
                elif wants_progress and isinstance(event, DitProgress):
                    steps = {"step": event.step, "num_inference_steps": event.num_inference_steps}
                    yield named_sse({"type": "quartet.progress", "output": event.output, **steps})
        last["quartet"] = self._generation.quartet() | last["quartet"]
        yield await asyncio.to_thread(named_sse, last)

    async def _event(self, what: str, event: GeneratedImage) -> dict[str, Any]:
        seed = self._generation.started.seed + event.output
        return {
            "type": f"{self._kind}.{what}",
            "created_at": self._created,
            "b64_json": await asyncio.to_thread(self._request.to_base64, event.pixels),
            **self._request.file_facts(event.pixels),
            "quartet": {"output": event.output, "seed": seed},
        }
