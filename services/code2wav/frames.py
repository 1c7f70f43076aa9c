"""A request's codec frames on their way into the engine: inline or from a talker, checked, no more than a window."""

import asyncio
from collections.abc import AsyncIterator

import torch

from quartet.v1 import code2wav_pb2, stream_pb2
from services.code2wav.family import DecoderSpec
from services.common.rpc.errors import InternalError, InvalidInput
from services.common.stream.consumer import StreamConsumer
from services.common.stream.rows import Chunk
from services.common.stream.tensors import to_torch

CODES = stream_pb2.RowSelection(name="codes")
# The first frames come one by one: the listener has little sound yet. Then half a frame's time is a wait that nobody
# hears, and of a talker that is faster than speech it brings several frames in a message.
UNGATHERED_S = 0.64


def gathering(spec: DecoderSpec) -> stream_pb2.Gathering:
    """How a talker's frames are gathered into messages."""
    return stream_pb2.Gathering(
        from_position=round(UNGATHERED_S * spec.frames_per_second), delay_ms=round(500 / spec.frames_per_second)
    )


def check_codes(spec: DecoderSpec, codes: torch.Tensor, field: str) -> torch.Tensor:
    """`codes` as the engine takes them: (frames, groups) int64.

    Raises:
        InvalidInput: names `field`; another shape, a floating dtype, or a code that no codebook has.
    """
    if codes.dtype.is_floating_point:
        raise InvalidInput(f"{field}.dtype", f"must be an integer type, not {codes.dtype}")
    if codes.dim() != 2 or codes.shape[1] != spec.num_code_groups:
        raise InvalidInput(f"{field}.shape", f"must be (frames, {spec.num_code_groups}), not {tuple(codes.shape)}")
    codes = codes.to(torch.int64, copy=True)  # the talker may use its memory again: what was checked must stay so
    wrong = ((codes < 0) | (codes >= torch.tensor(spec.codebook_sizes))).nonzero()
    if len(wrong):
        frame, group = wrong[0].tolist()
        value, most = int(codes[frame, group]), spec.codebook_sizes[group] - 1
        raise InvalidInput(field, f"code {value} of frame {frame}, group {group}, must be 0 to {most}")
    return codes


class FrameWindow:
    """Counts the frames that may still be taken in."""

    def __init__(self, frames: int) -> None:
        self._free = frames
        self._freed = asyncio.Event()

    async def acquire(self, most: int) -> int:
        """Waits until there is room, takes room for up to `most` frames and returns for how many."""
        while not self._free:
            self._freed.clear()
            await self._freed.wait()
        frames = min(self._free, most)
        self._free -= frames
        return frames

    def release(self, frames: int) -> None:
        """Gives room for `frames` back."""
        self._free += frames
        self._freed.set()


def frames_of(
    spec: DecoderSpec, consumer: StreamConsumer, request: code2wav_pb2.DecodeRequest
) -> AsyncIterator[torch.Tensor]:
    """The request's frames, checked, as (n, groups) int64 tensors. Inline ones are checked here and now.

    Raises:
        InvalidInput: no input, or inline codes that are not frames.
    """
    match request.WhichOneof("input"):
        case "codes":
            return _inline(check_codes(spec, to_torch(request.codes, "codes"), "codes"))
        case "source":
            return _subscribed(spec, consumer, request.source, request.request_id)
        case _:
            raise InvalidInput("input", "is required: set source, or codes")


async def _inline(codes: torch.Tensor) -> AsyncIterator[torch.Tensor]:
    yield codes


async def _subscribed(
    spec: DecoderSpec, consumer: StreamConsumer, source: stream_pb2.StreamSource, request_id: str
) -> AsyncIterator[torch.Tensor]:
    """The rows "codes" of a talker's stream.

    Raises:
        InvalidInput: rows that are not frames.
        InternalError: the producer skipped or repeated a frame.
        StageError: whatever ended the producer's stream.
    """
    due = 0
    async with consumer.subscribe(source, request_id, [CODES], gathering(spec), producer="talker") as messages:
        async for message in messages:
            if isinstance(message, stream_pb2.StreamEnd):
                _expect(message.end_position, due, "the stream's end")
            elif isinstance(message, Chunk):
                for rows in message.rows:
                    _expect(rows.first_position, due, "the next frame")
                    codes = check_codes(spec, rows.tensor, "source.codes")
                    due += len(codes)
                    yield codes


def _expect(position: int, due: int, what: str) -> None:
    if position != due:
        raise InternalError(f"the talker's stream says {what} is at {position} after {due} frames")
