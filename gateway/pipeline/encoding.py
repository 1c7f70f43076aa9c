"""The encoder's part of a request to a dit that has no encoders of its own."""

import asyncio
import secrets
from collections.abc import Callable, Sequence

import grpc

from gateway.pipeline.kinds import KINDS
from gateway.pipeline.replica import Replica
from gateway.pipeline.stage import Stage
from quartet.v1 import dit_pb2, encoder_pb2, server_info_pb2
from services.common.rpc.errors import StageError, Unavailable


class Misfit(Unavailable):
    """A dit and what the pipeline has it read from do not fit together: nothing to wait for."""


class Encoding:
    """A call to an encoder, while the dit pulls what it makes.

    Attributes:
        error: why it failed, once it has.
    """

    def __init__(
        self, replica: Replica, start: encoder_pb2.EncodeStart, media: Sequence[bytes], timeout_s: float
    ) -> None:
        self.error: StageError | None = None
        self._replica = replica
        self._call = KINDS[replica.kind].call(replica.channel, start, media, timeout_s)
        self._done: Callable[[], object] = lambda: None
        self._task = asyncio.create_task(self._run())

    def on_failure(self, act: Callable[[], object]) -> None:
        """What is done, at once, when the encoder fails: the dit may be waiting for a stream that never comes."""
        self._done = act

    async def _run(self) -> None:
        try:
            async for _ in self._call:
                pass
        except grpc.aio.AioRpcError as error:
            self.error = self._replica.failure(error)
            self._done()

    async def close(self) -> None:
        """Cancels it, if it still runs."""
        self._call.cancel()
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)


def encoder_of(stage: Stage) -> Stage | None:
    """The encoder that the dit `stage` reads from; None if it has its own encoders.

    Raises:
        Misfit: the two do not fit together.
        Unavailable: the encoder does not serve.
    """
    source = stage.source
    assert stage.info is not None
    info = stage.info.dit
    if info.needs_source != (source is not None):
        reason = (
            "reads from an encoder: give it a source" if source is None else "has its own encoders: drop its source"
        )
        raise Misfit(f"stage {stage.name} {reason} in the pipeline, or start it otherwise")
    if source is None:
        return None
    source.require_serving()
    assert source.info is not None
    if source.info.encoder.pipeline != info.pipeline:
        theirs = source.info.encoder.pipeline
        raise Misfit(f"stage {source.name} reads prompts for a {theirs}, but {stage.name} is a {info.pipeline}")
    return source


def open_encoding(
    encoder: Replica,
    start: dit_pb2.DitStart,
    info: server_info_pb2.DitInfo,
    media: Sequence[bytes],
    timeout_s: float,
) -> Encoding:
    """Starts the encoder of a dit, and has `start` say where. What `start` leaves to the model is settled here: encoder
    and dit must settle it alike.
    """
    settle(start, info)
    # Not the request's id: an encoder may still be ending the attempt before.
    stream_id = f"{start.request_id}-{secrets.token_hex(4)}"
    start.source.CopyFrom(encoder.source(stream_id))
    request = dit_pb2.DitStart()
    request.CopyFrom(start)
    request.ClearField("source")
    encode = encoder_pb2.EncodeStart(request=request, output_stream_id=stream_id)
    return Encoding(encoder, encode, media, timeout_s)


def settle(start: dit_pb2.DitStart, info: server_info_pb2.DitInfo) -> None:
    """Writes the dit's defaults into `start`, and a seed."""
    if not start.HasField("seed"):
        start.seed = secrets.randbits(32)
    if not start.HasField("num_inference_steps"):
        start.num_inference_steps = info.default_inference_steps
    if not start.HasField("guidance_scale"):
        start.guidance_scale = info.default_guidance_scale
    if not start.width and not start.images:
        start.width, start.height = info.default_width, info.default_height
    start.num_frames = start.num_frames or info.default_frames
    start.audio_s = start.audio_s or info.default_audio_s
