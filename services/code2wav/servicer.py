"""gRPC side of code2wav: frames in from a talker or inline, samples out. No model code."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing

import grpc

from quartet.v1 import code2wav_pb2, code2wav_pb2_grpc, stream_pb2
from services.code2wav.engine import DecodeEngine
from services.code2wav.stream import Event, Failed, Samples, Stream
from services.common.rpc.call import Admission, Call, serve_call
from services.common.rpc.errors import InternalError, InvalidInput, Unavailable
from services.common.stream.consumer import StreamConsumer
from services.common.stream.rows import Chunk
from services.common.stream.tensors import to_message, to_torch

CODES = stream_pb2.RowSelection(name="codes")
# The first frames come one by one: the listener has little sound yet. Then half a frame's time (40 ms of 80) is a wait
# that nobody hears, and of a talker that is faster than speech it brings several frames in a message.
GATHERING = stream_pb2.Gathering(from_position=8, delay_ms=40)


class Code2WavServicer(code2wav_pb2_grpc.Code2WavServiceServicer):
    """`quartet.v1.Code2WavService` on an engine, which `bind` sets once it is loaded.

    Args:
        admission: refuses calls while there is no engine, and those beyond the stage's limits.
        consumer: reads talkers' streams.
        max_frames_ahead: frames of one call taken in before their samples have left. A client that does not read, or
            reads slowly, thereby slows the talker's stream instead of filling memory.
    """

    def __init__(self, admission: Admission, consumer: StreamConsumer, max_frames_ahead: int) -> None:
        self._admission, self._consumer = admission, consumer
        self._max_frames_ahead = max_frames_ahead
        self._engine: DecodeEngine | None = None
        self._sample_rate_hz = 0

    def bind(self, engine: DecodeEngine, sample_rate_hz: int) -> None:
        """Serves with `engine` from now on."""
        self._engine, self._sample_rate_hz = engine, sample_rate_hz

    async def Decode(
        self, request: code2wav_pb2.DecodeRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[code2wav_pb2.DecodeResponse]:
        async with serve_call("code2wav", request.request_id, context, self._admission) as call:
            if self._engine is None:
                raise Unavailable("code2wav is loading its model; retry later")
            async with aclosing(self._decode(self._engine, request, call)) as responses:
                async for response in responses:
                    yield response

    async def _decode(
        self, engine: DecodeEngine, request: code2wav_pb2.DecodeRequest, call: Call
    ) -> AsyncGenerator[code2wav_pb2.DecodeResponse]:
        if request.sample_format not in code2wav_pb2.SampleFormat.values():
            raise InvalidInput("sample_format", f"{request.sample_format} is not a SampleFormat")
        frames_in = _frames(engine, self._consumer, request)
        window = FrameWindow(self._max_frames_ahead)
        events: asyncio.Queue[Event] = asyncio.Queue()
        loop = asyncio.get_running_loop()
        stream = engine.open(
            emit=lambda event: loop.call_soon_threadsafe(events.put_nowait, event),
            on_started=call.timings.mark_started,
            pcm16=request.sample_format == code2wav_pb2.SAMPLE_FORMAT_PCM16,
        )
        feeding = asyncio.create_task(_feed(engine, stream, frames_in, window, events))
        frames_sent = 0
        try:
            while isinstance(event := await events.get(), Samples):
                if len(event.samples):
                    call.timings.mark_output()
                    audio = code2wav_pb2.AudioChunk(
                        first_sample=event.first_sample, samples=to_message(event.samples), frames=event.frames
                    )
                    yield code2wav_pb2.DecodeResponse(audio=audio)
                window.release(event.frames - frames_sent)
                frames_sent = event.frames
            if isinstance(event, Failed):
                raise event.error
            call.set(frames=event.frames, samples=event.samples)
            summary = code2wav_pb2.DecodeSummary(
                frames=event.frames,
                samples=event.samples,
                sample_rate_hz=self._sample_rate_hz,
                timings=call.timings.to_message(),
                waited_for_frames_ms=event.waited_ms,
            )
            yield code2wav_pb2.DecodeResponse(summary=summary)
        finally:
            engine.cancel(stream)
            feeding.cancel()


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


async def _feed(
    engine: DecodeEngine,
    stream: Stream,
    frames_in: AsyncIterator,
    window: FrameWindow,
    events: asyncio.Queue[Event],
) -> None:
    """Moves checked frames into the engine as the window allows; an error goes the way of the engine's events."""
    try:
        async for codes in frames_in:
            while len(codes):
                count = await window.acquire(len(codes))
                engine.put(stream, codes[:count])
                codes = codes[count:]
        engine.finish(stream)
    except Exception as error:
        events.put_nowait(Failed(error))


def _frames(engine: DecodeEngine, consumer: StreamConsumer, request: code2wav_pb2.DecodeRequest) -> AsyncIterator:
    """The request's frames, checked, as (n, groups) int64 tensors. Inline ones are checked here and now.

    Raises:
        InvalidInput: no input, or inline codes that are not frames.
    """
    match request.WhichOneof("input"):
        case "codes":
            return _inline(engine.check(to_torch(request.codes, "codes"), "codes"))
        case "source":
            return _subscribed(engine, consumer, request.source, request.request_id)
        case _:
            raise InvalidInput("input", "is required: set source, or codes")


async def _inline(codes) -> AsyncIterator:
    yield codes


async def _subscribed(
    engine: DecodeEngine, consumer: StreamConsumer, source: stream_pb2.StreamSource, request_id: str
) -> AsyncIterator:
    """The rows "codes" of a talker's stream.

    Raises:
        InvalidInput: rows that are not frames.
        InternalError: the producer skipped or repeated a frame.
        StageError: whatever ended the producer's stream.
    """
    due = 0
    async with consumer.subscribe(source, request_id, [CODES], GATHERING, producer="talker") as messages:
        async for message in messages:
            if isinstance(message, stream_pb2.StreamEnd):
                _expect(message.end_position, due, "the stream's end")
            elif isinstance(message, Chunk):
                for rows in message.rows:
                    _expect(rows.first_position, due, "the next frame")
                    codes = engine.check(rows.tensor, "source.codes")
                    due += len(codes)
                    yield codes


def _expect(position: int, due: int, what: str) -> None:
    if position != due:
        raise InternalError(f"the talker's stream says {what} is at {position} after {due} frames")
