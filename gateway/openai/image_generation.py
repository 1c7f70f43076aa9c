"""A request for pictures on its way through its stage, whichever endpoint it came by."""

import asyncio
import base64
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import numpy as np

from gateway import metrics
from gateway.errors import invalid
from gateway.gateway import Gateway
from gateway.media.check import MediaFile, image_pixels, load_media
from gateway.media.encode import IMAGE_MAX_SIDE_PIXELS, ImageFormat, encode_image
from gateway.openai.answer import timings
from gateway.openai.diffusion import check_side, require_info, told_of
from gateway.pipeline.dit import Pieces, generate, to_numpy
from gateway.pipeline.stage import Stage
from quartet.v1 import dit_pb2, server_info_pb2
from services.common.rpc.errors import InternalError


@dataclass(frozen=True)
class Preview:
    """What an output looks like by now."""

    output: int
    index: int
    pixels: np.ndarray


@dataclass(frozen=True)
class FinishedImage:
    """A finished output, (height, width, 3) uint8."""

    output: int
    pixels: np.ndarray


Event = dit_pb2.DitProgress | Preview | FinishedImage


class ImageGeneration:
    """Makes the pictures of one request.

    Args:
        stage: makes them.
        start: what the stage gets, without files.
        images: the pictures to start from; they have been loaded.
        mask: of the first of them; loaded too.
        deadline: `time.monotonic()` at which the request's time is over.
        log: fields of the request's log line, filled in here.

    Attributes:
        started: what the stage settled; of use after the first event.
        summary: set when the events have ended.
    """

    def __init__(
        self,
        stage: Stage,
        start: dit_pb2.DitStart,
        images: Sequence[MediaFile],
        mask: MediaFile | None,
        deadline: float,
        log: dict[str, Any],
    ) -> None:
        self.started, self.summary = dit_pb2.DitStarted(), dit_pb2.DitSummary()
        self._stage, self._start, self._deadline, self._log = stage, start, deadline, log
        for image in images:
            start.images.add(field=image.field)
        if mask is not None:
            start.mask.field = mask.field
        self._files = [picture.content for picture in (*images, *([mask] if mask else []))]
        log |= {"pictures": start.count, "inputs": len(images)}

    async def events(self) -> AsyncGenerator[Event, None]:
        """What happens, as it does. Closing the generator cancels the stage's call. Raises ApiError."""
        outputs: dict[int, Pieces] = {}
        made = 0
        left_s = max(0.001, self._deadline - time.monotonic())
        with told_of(self._stage):
            async with aclosing(generate(self._stage, self._start, self._files, left_s)) as responses:
                async for response in responses:
                    match response.WhichOneof("message"):
                        case "started":
                            self.started = response.started
                            self._log |= {"seed": self.started.seed, "steps": self.started.num_inference_steps}
                        case "progress":
                            yield response.progress
                        case "preview":
                            preview = response.preview
                            yield Preview(preview.output, preview.index, _picture(to_numpy(preview.pixels)))
                        case "piece":
                            index = response.piece.output
                            pieces = outputs.setdefault(index, Pieces())
                            pieces.add(response.piece)
                            if pieces.complete:
                                yield FinishedImage(index, _picture(await asyncio.to_thread(outputs.pop(index).array)))
                                made += 1
                        case "summary":
                            self.summary = response.summary
            if made != self._start.count:
                raise InternalError(f"the stage made {made} of {self._start.count} pictures")
        metrics.IMAGES.inc(made)

    def quartet(self) -> dict[str, Any]:
        """How the pictures were made, and where the time went."""
        return {
            "seed": self.started.seed,
            "num_inference_steps": self.started.num_inference_steps,
            "mean_batch": round(self.summary.mean_batch, 2),
            "timings": {"dit": timings(self.summary.timings)},
        }


def _picture(pixels: np.ndarray) -> np.ndarray:
    if pixels.dtype != np.uint8 or pixels.ndim != 3 or pixels.shape[2] != 3:
        raise InternalError(f"the stage sent {list(pixels.shape)} of {pixels.dtype}, which is no picture of 8 bit")
    return pixels


def image_facts(stage: Stage, edits: bool) -> server_info_pb2.DitInfo:
    """The facts of the stage's model. Raises ApiError: 503 while it does not serve, 400 if it makes no pictures so."""
    if edits:
        return require_info(stage, (dit_pb2.DIT_TASK_IMAGE_EDIT,), "edits of pictures")
    return require_info(stage, (dit_pb2.DIT_TASK_TEXT_TO_IMAGE,), "pictures of a prompt alone")


async def load_pictures(gateway: Gateway, pictures: Sequence[MediaFile]) -> None:
    """Fetches and checks what a stage is to start from.

    Raises:
        ApiError: 400 naming the first picture that is at fault, or, each being good by itself, that is more than a stage
            is to hold decoded for one request; 504, too slow.
    """
    await load_media(gateway.fetcher, pictures)
    pixels, most = 0, gateway.settings.media_max_image_pixels
    for picture in pictures:
        pixels += await asyncio.to_thread(image_pixels, picture.content)
        if pixels > most:
            reason = f"with it the request's images have {pixels} pixels; together they may have {most}"
            raise invalid(picture.field, reason, "invalid_media")


def to_base64(pixels: np.ndarray, file_format: ImageFormat, quality: int) -> str:
    """A picture's file in base64. Blocking: call it in a thread.

    Raises:
        ApiError: 400, too large for the format; the model chose the size, or it would have been refused before.
    """
    height, width, _ = pixels.shape
    check_side(width, height, file_format, IMAGE_MAX_SIDE_PIXELS[file_format])
    return base64.b64encode(encode_image(pixels, file_format, quality)).decode()
