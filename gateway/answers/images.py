"""Generation of images: from a prompt, or from other images."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from gateway import metrics
from gateway.answers.answer import timings
from gateway.answers.diffusion import ImageRequest, require_info
from gateway.answers.gateway import Gateway
from gateway.answers.meter import Meter
from gateway.errors import in_own_terms, invalid
from gateway.media.check import MediaFile, image_pixels, load_media
from gateway.pipeline.dit import Pieces, generate, to_numpy
from gateway.pipeline.stage import Stage
from quartet.v1 import dit_pb2, server_info_pb2
from quartet.v1.dit_pb2 import DitStart
from services.common.errors import InternalError


@dataclass(frozen=True)
class GeneratedImage:
    """An output, (height, width, 3) uint8. `preview`: number of a preview; None: it is finished."""

    output: int
    pixels: np.ndarray
    preview: int | None = None


Event = dit_pb2.DitProgress | dit_pb2.DitThoughts | GeneratedImage


@dataclass(frozen=True)
class InputImages:
    """Those that come with a request: to start from, the mask of the one, and control images."""

    images: Sequence[MediaFile] = ()
    mask: MediaFile | None = None
    controls: Sequence[MediaFile] = ()

    @property
    def files(self) -> list[MediaFile]:
        """In the stage's order."""
        return [*self.images, *([self.mask] if self.mask else []), *self.controls]


@dataclass
class ImageGeneration:
    """Generates the images of one request; `begin` makes it.

    Attributes:
        files: those of `InputImages.files`.
        started: set before the first event.
        thoughts: what the model wrote before the images, as far as it came.
        summary: set after the last event.
    """

    stage: Stage
    start: DitStart
    files: Sequence[bytes]
    meter: Meter
    started: dit_pb2.DitStarted = field(default_factory=dit_pb2.DitStarted)
    thoughts: str = ""
    summary: dit_pb2.DitSummary = field(default_factory=dit_pb2.DitSummary)

    async def events(self) -> AsyncGenerator[Event, None]:
        """Closing the generator cancels the stage's call. Raises ApiError."""
        outputs: dict[int, Pieces] = {}
        made = 0
        left_s = max(0.001, self.meter.left_s)
        with in_own_terms(kind=self.stage.kind), self.meter.at_once(self.start.count, "n"):
            async with aclosing(generate(self.stage, self.start, self.files, left_s)) as responses:
                async for response in responses:
                    match response.WhichOneof("message"):
                        case "started":
                            self.started = response.started
                            self.meter.log |= {"seed": self.started.seed, "steps": self.started.num_inference_steps}
                        case "thoughts":
                            self.thoughts += response.thoughts.text
                            yield response.thoughts
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
            **({"thoughts": self.thoughts} if self.thoughts else {}),
        }


def _checked(pixels: np.ndarray) -> np.ndarray:
    if pixels.dtype != np.uint8 or pixels.ndim != 3 or pixels.shape[2] != 3:
        raise InternalError(f"the stage sent {list(pixels.shape)} of {pixels.dtype}, which is no image of 8 bit")
    return pixels


def image_facts(stage: Stage, edits: bool) -> server_info_pb2.DitInfo:
    """Raises ApiError: 503, the stage does not serve; 400, its model does not make images so."""
    if edits:
        return require_info(stage, (dit_pb2.DIT_TASK_IMAGE_EDIT,), "edits of images")
    return require_info(stage, (dit_pb2.DIT_TASK_TEXT_TO_IMAGE,), "images of a prompt alone")


async def begin(gateway: Gateway, stage: Stage, start: DitStart, inputs: InputImages, meter: Meter) -> ImageGeneration:
    """Loads the files, and adds them to `start`.

    Raises:
        ApiError: 400 naming the first image at fault, a number of control images that the model does not take, or
            beyond the pixels of one request; 504, too slow.
    """
    assert stage.info is not None, "`image_facts` has looked at it"
    if len(inputs.controls) != (wanted := stage.info.dit.control_images):
        takes = f"this model needs {wanted}" if wanted else "this model takes none; leave it out"
        raise invalid("quartet.dit.control_images", f"there are {len(inputs.controls)}; {takes}")
    files = inputs.files
    await load_media(gateway.fetcher, files)
    pixels, most = 0, gateway.fetcher.limits.media_max_request_image_pixels
    for file in files:
        pixels += await gateway.fetcher.decoding.run(image_pixels, file.content)
        if pixels > most:
            reason = f"with it the request's images have {pixels} pixels; together they may have {most}"
            raise invalid(file.field, reason, "invalid_media")
    start.request_id = meter.request_id
    for image in inputs.images:
        start.images.add(field=image.field)
    if inputs.mask is not None:
        start.mask.field = inputs.mask.field
    for control in inputs.controls:
        start.control_images.add(field=control.field)
    meter.charge(start.count, "n")
    meter.log |= {"images": start.count, "inputs": len(inputs.images)}
    return ImageGeneration(stage, start, [file.content for file in files], meter)


async def to_generation(gateway: Gateway, request: ImageRequest, inputs: InputImages, meter: Meter) -> ImageGeneration:
    """Raises ApiError: 400 naming the member at fault; 404 and 503 as `Catalog.stage_for`."""
    stage = gateway.catalog.stage_for("image", gateway.catalog.meant(request.model, "image"))
    info = image_facts(stage, edits=bool(inputs.images))
    start = request.image_start(info)
    if (count := len(inputs.images)) > info.max_images:
        member = inputs.images[0].field.partition("[")[0]  # image of a form, images of JSON
        raise invalid(member, f"there are {count}; this model takes {info.max_images} at most")
    if inputs.mask is not None and not info.mask:
        raise invalid("mask", "this model takes none; leave it out")
    if inputs.mask is not None and count > 1:
        raise invalid("mask", "only with one image, which it is a mask of")
    return await begin(gateway, stage, start, inputs, meter)
