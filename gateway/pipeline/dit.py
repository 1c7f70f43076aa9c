"""Requests for images, videos and audio, and their outputs in pieces."""

import asyncio
import math
import secrets
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from copy import deepcopy
from typing import Any

import grpc
import numpy as np

from gateway.pipeline.replica import Replica
from gateway.pipeline.route import Lease, Route
from gateway.pipeline.stage import Stage
from quartet.v1 import dit_pb2, encoder_pb2, media_pb2, server_info_pb2, tensor_pb2
from services.common.errors import InternalError, StageError, Unavailable

_DTYPES: dict[int, Any] = {tensor_pb2.DATA_TYPE_UINT8: np.uint8, tensor_pb2.DATA_TYPE_FLOAT32: np.dtype("<f4")}


class Misfit(Unavailable):
    """A dit and its source in the pipeline never fit together."""


def encoder_of(stage: Stage) -> Stage | None:
    """The encoder that a dit reads from; None: it has its own. Raises Misfit, Unavailable."""
    source = next(iter(stage.sources), None)
    assert stage.info is not None
    info = stage.info.dit
    if info.needs_source != (source is not None):
        reason = "has its own encoders: drop its source" if source else "reads from an encoder: give it a source"
        raise Misfit(f"stage {stage.name} {reason} in the pipeline, or start it otherwise")
    if source is None:
        return None
    source.require_serving()
    assert source.info is not None
    if source.info.encoder.pipeline != info.pipeline:
        theirs = source.info.encoder.pipeline
        raise Misfit(f"stage {source.name} reads prompts for a {theirs}, but {stage.name} is a {info.pipeline}")
    return source


def _read_from(encoder: Replica, start: dit_pb2.DitStart, stage: Stage) -> encoder_pb2.EncodeStart:
    """Writes source and defaults into `start`, and returns the encoder's start message with the same defaults."""
    assert stage.info is not None
    settle(start, stage.info.dit)
    # Not the request's id: an encoder may still be ending the attempt before.
    stream_id = f"{start.request_id}-{secrets.token_hex(4)}"
    start.source.CopyFrom(encoder.source(stream_id))
    request = deepcopy(start)
    request.ClearField("source")
    return encoder_pb2.EncodeStart(request=request, output_stream_id=stream_id)


def settle(start: dit_pb2.DitStart, info: server_info_pb2.DitInfo) -> None:
    if not start.HasField("seed"):
        start.seed = secrets.randbits(32)
    if not start.HasField("num_inference_steps"):
        start.num_inference_steps = info.default_inference_steps
    if not start.HasField("guidance_scale"):
        start.guidance_scale = info.default_guidance_scale
    if not start.width and not media_of(start):
        start.width, start.height = info.default_width, info.default_height
    if not (start.HasField("control_video") or (start.HasField("video") and not info.continues_video)):
        start.num_frames = start.num_frames or info.default_frames
    start.audio_s = start.audio_s or info.default_audio_s


def media_of(start: dit_pb2.DitStart) -> list[media_pb2.Media]:
    """The files that come with it, in the order in which they are sent."""
    mask, video, control_video = (
        [getattr(start, name)] if start.HasField(name) else [] for name in ("mask", "video", "control_video")
    )
    return [*start.images, *mask, *start.control_images, *video, *control_video]


async def generate(
    stage: Stage, start: dit_pb2.DitStart, media: Sequence[bytes], timeout_s: float
) -> AsyncGenerator[dit_pb2.DitServiceGenerateResponse, None]:
    """The responses of a dit. Closing the generator cancels the call.

    If a replica is lost before the first preview or piece, another replica's responses follow from the beginning, once.

    Args:
        start: its files have no data.
        media: the files of `media_of(start)`.
        timeout_s: longest that all calls may take.

    Raises:
        StageError: the stage does not serve, refuses, fails or is lost.
    """
    deadline = asyncio.get_running_loop().time() + timeout_s
    stage.require_serving()
    encoder = encoder_of(stage)
    route = Route([stage, *([encoder] if encoder else [])], start.request_id)
    has_output = False
    while True:
        left_s = max(0.001, deadline - asyncio.get_running_loop().time())
        try:
            with route.replicas() as leases:
                async with aclosing(_attempt(route, leases, start, media, left_s)) as responses:
                    async for response in responses:
                        has_output = has_output or response.WhichOneof("message") in ("preview", "piece")
                        yield response
            return
        except StageError as error:
            if has_output or not await route.again(error):
                raise


async def _encode(
    encoder: Replica, start: encoder_pb2.EncodeStart, media: Sequence[bytes], timeout_s: float, dit: Any
) -> StageError | None:
    """Calls the encoder. Returns its failure, after which it cancels the call to the `dit`."""
    call = encoder.call(start, media, timeout_s)
    try:
        async for _ in call:
            pass
    except grpc.aio.AioRpcError as error:
        dit.cancel()
        return encoder.failure(error)
    finally:
        call.cancel()
    return None


async def _attempt(
    route: Route, leases: Sequence[Lease], start: dit_pb2.DitStart, media: Sequence[bytes], timeout_s: float
) -> AsyncGenerator[dit_pb2.DitServiceGenerateResponse, None]:
    """The responses of one try. The leases are of the dit and, maybe, its encoder."""
    dit, *encoders = leases
    announced = deepcopy(start)
    parts = media_of(announced)
    pictures = len(parts) - announced.HasField("video") - announced.HasField("control_video")
    for i, (part, file) in enumerate(zip(parts, media, strict=True)):
        part.kind = media_pb2.MEDIA_KIND_IMAGE if i < pictures else media_pb2.MEDIA_KIND_VIDEO
        part.size_bytes = len(file)
    prompt = _read_from(encoders[0].replica, announced, dit.stage) if encoders else None
    call = dit.replica.call(announced, media, timeout_s)
    encoding = prompt and asyncio.create_task(_encode(encoders[0].replica, prompt, media, timeout_s, call))
    complete = False
    try:
        async for response in call:
            complete = response.HasField("summary")
            yield response
    except (grpc.aio.AioRpcError, asyncio.CancelledError) as error:
        failure = None if isinstance(error, asyncio.CancelledError) else route.failure(dit, error)
        if encoding is not None and encoding.done():
            failure = encoding.result() or failure
        if failure is None:
            raise
        raise failure from error
    finally:
        call.cancel()
        if encoding is not None:
            encoding.cancel()
            await asyncio.gather(encoding, return_exceptions=True)
    if not complete:
        raise dit.stage.fault("ended the call without a summary")


def to_numpy(message: tensor_pb2.Tensor) -> np.ndarray:
    """A read-only view of the data. Raises InternalError: the message contradicts itself."""
    dtype, shape = _DTYPES.get(message.dtype), tuple(message.shape)
    if dtype is None or len(message.inline) != math.prod(shape) * np.dtype(dtype).itemsize:
        kind = tensor_pb2.DataType.Name(message.dtype)
        raise InternalError(f"a stage sent {len(message.inline)} bytes as {kind} of shape {list(shape)}")
    return np.frombuffer(message.inline, dtype).reshape(shape)


class Pieces:
    """An output that arrives in pieces. `sample_rate_hz`, of sound, is 0 before the first one."""

    def __init__(self) -> None:
        self.sample_rate_hz = 0
        self._parts: list[np.ndarray] = []
        self._received, self._total = 0, None

    def add(self, piece: dit_pb2.DitPiece) -> None:
        """Raises InternalError: `piece` does not follow the one before."""
        part = to_numpy(piece.data)
        first = self._parts[0] if self._parts else part
        fits = part.ndim and (part.shape[1:], part.dtype) == (first.shape[1:], first.dtype)
        if not fits or piece.first != self._received or self._total not in (None, piece.total):
            raise InternalError(f"a stage sent a piece at {piece.first} where {self._received} was next")
        self._parts.append(part)
        self._received += len(part)
        self._total = piece.total
        self.sample_rate_hz = piece.sample_rate_hz

    @property
    def complete(self) -> bool:
        return self._received == self._total

    def array(self) -> np.ndarray:
        """Image (height, width, 3), video (frames, height, width, 3) or sound (samples, channels).

        Copies: call it in a thread. Raises InternalError: not complete."""
        if not self.complete:
            raise InternalError(f"a stage sent {self._received} of {self._total or 'any'} rows of an output")
        return self._parts[0] if len(self._parts) == 1 else np.concatenate(self._parts)
