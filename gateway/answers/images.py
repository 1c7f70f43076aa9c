"""Generation of images from a prompt or from other images."""

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from gateway import metrics
from gateway.answers.answer import timings
from gateway.answers.diffusion import ImageRequest, require_info, stage_errors
from gateway.answers.gateway import Gateway
from gateway.errors import invalid
from gateway.media.check import MediaFile, image_pixels, load_media
from gateway.pipeline.dit import Pieces, generate, to_numpy
from gateway.pipeline.stage import Stage
from quartet.v1 import dit_pb2, server_info_pb2
from services.common.errors import InternalError


@dataclass(frozen=True)
class GeneratedImage:
    """An output, (height, width, 3) uint8. `preview` counts its previews; None: it is finished."""

    output: int
    pixels: np.ndarray
    preview: int | None = None


Event = dit_pb2.DitProgress | GeneratedImage


@dataclass
class ImageGeneration:
    """Generates the images of one request.

    Attributes:
        start: without files.
        images, mask: loaded.
        deadline: in `time.monotonic()`.
        log: fields of the request's log line, filled in here.
        started: set before the first event.
        summary: set after the last event.
    """

    stage: Stage
    start: dit_pb2.DitStart
    images: Sequence[MediaFile]
    mask: MediaFile | None
    deadline: float
    log: dict[str, Any]
    started: dit_pb2.DitStarted = field(default_factory=dit_pb2.DitStarted)
    summary: dit_pb2.DitSummary = field(default_factory=dit_pb2.DitSummary)

    def __post_init__(self) -> None:
        for image in self.images:
            self.start.images.add(field=image.field)
        if self.mask is not None:
            self.start.mask.field = self.mask.field
        self.log |= {"images": self.start.count, "inputs": len(self.images)}

    async def events(self) -> AsyncGenerator[Event, None]:
        """Yields progress, previews and images. Closing the generator cancels the stage's call. Raises ApiError."""
        outputs: dict[int, Pieces] = {}
        made = 0
        files = [image.content for image in (*self.images, *([self.mask] if self.mask else []))]
        left_s = max(0.001, self.deadline - time.monotonic())
        with stage_errors(self.stage):
            async with aclosing(generate(self.stage, self.start, files, left_s)) as responses:
                async for response in responses:
                    match response.WhichOneof("message"):
                        case "started":
                            self.started = response.started
                            self.log |= {"seed": self.started.seed, "steps": self.started.num_inference_steps}
                        case "progress":
                            yield response.progress
                        case "preview":
                            preview = response.preview
                            yield GeneratedImage(preview.output, _checked(to_numpy(preview.pixels)), preview.index)
                        case "piece":
                            index = response.piece.output
                            pieces = outputs.setdefault(index, Pieces())
                            pieces.add(response.piece)
                            if pieces.complete:
                                yield GeneratedImage(index, _checked(await asyncio.to_thread(outputs.pop(index).array)))
                                made += 1
                        case "summary":
                            self.summary = response.summary
            if made != self.start.count:
                raise InternalError(f"the stage made {made} of {self.start.count} images")
        metrics.IMAGES.inc(made)

    async def finished(self) -> AsyncGenerator[GeneratedImage, None]:
        async with aclosing(self.events()) as events:
            async for event in events:
                if isinstance(event, GeneratedImage) and event.preview is None:
                    yield event

    def quartet(self) -> dict[str, Any]:
        return {
            "seed": self.started.seed,
            "num_inference_steps": self.started.num_inference_steps,
            "mean_batch": round(self.summary.mean_batch, 2),
            "timings": {"dit": timings(self.summary.timings)},
        }


def _checked(pixels: np.ndarray) -> np.ndarray:
    if pixels.dtype != np.uint8 or pixels.ndim != 3 or pixels.shape[2] != 3:
        raise InternalError(f"the stage sent {list(pixels.shape)} of {pixels.dtype}, which is no image of 8 bit")
    return pixels


def image_facts(stage: Stage, edits: bool) -> server_info_pb2.DitInfo:
    """The stage's capabilities. Raises ApiError: 503 while it does not serve, 400 if its model does not make images
    so."""
    if edits:
        return require_info(stage, (dit_pb2.DIT_TASK_IMAGE_EDIT,), "edits of images")
    return require_info(stage, (dit_pb2.DIT_TASK_TEXT_TO_IMAGE,), "images of a prompt alone")


async def load_images(gateway: Gateway, images: Sequence[MediaFile]) -> None:
    """Fetches and checks input images.

    Raises:
        ApiError: 400 naming the first image that is at fault, or that exceeds the pixels of one request; 504, too slow.
    """
    await load_media(gateway.fetcher, images)
    pixels, most = 0, gateway.fetcher.limits.media_max_image_pixels
    for image in images:
        pixels += await asyncio.to_thread(image_pixels, image.content)
        if pixels > most:
            reason = f"with it the request's images have {pixels} pixels; together they may have {most}"
            raise invalid(image.field, reason, "invalid_media")


async def to_generation(
    gateway: Gateway,
    request: ImageRequest,
    images: Sequence[MediaFile],
    mask: MediaFile | None,
    request_id: str,
    deadline: float,
    log: dict[str, Any],
) -> ImageGeneration:
    """The generation for a request, with checked files.

    Raises:
        ApiError: 400 naming the member at fault; 404 and 503 as `Gateway.stage_for`.
    """
    stage = gateway.stage_for("image", request.model)
    info = image_facts(stage, edits=bool(images))
    start = request.image_start(info)
    if len(images) > info.max_images:
        raise invalid("image", f"there are {len(images)}; this model takes {info.max_images} at most")
    if mask is not None and not info.mask:
        raise invalid("mask", "this model takes none; leave it out")
    if mask is not None and len(images) > 1:
        raise invalid("mask", "only with one image, which it is a mask of")
    await load_images(gateway, [*images, *([mask] if mask else [])])
    start.request_id = request_id
    return ImageGeneration(stage, start, images, mask, deadline, log)
