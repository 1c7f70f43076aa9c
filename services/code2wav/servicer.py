"""gRPC side of code2wav: checked frames in, inline or from a talker; samples out."""

import asyncio
from collections.abc import AsyncIterator, Callable
from functools import partial

import grpc
import torch

from quartet.v1 import code2wav_pb2, code2wav_pb2_grpc, stream_pb2
from services.code2wav.engine import DecodeEngine
from services.code2wav.family import DecoderSpec
from services.code2wav.stream import Event, Samples, Stream
from services.common.errors import InternalError, InvalidInput, require
from services.common.rpc.call import Admission, serve_call
from services.common.stream.consumer import StreamConsumer, StreamMessage
from services.common.stream.tensors import to_message, to_torch
from services.common.text import match_case

CODES = stream_pb2.RowSelection(name="codes")
# The first frames come one by one, as the listener has little sound yet. A later short wait is inaudible, and a talker
# that is faster than speech then sends several frames in a message.
UNGATHERED_S = 0.64
GATHERED_MS = 40
# Steps of a call's frames in the engine: one that runs, and those that arrive meanwhile.
WINDOW_STEPS = 4


def check_codes(spec: DecoderSpec, codes: torch.Tensor, field: str) -> torch.Tensor:
    """Converts `codes` to (frames, groups) int64.

    Raises InvalidInput, which names `field`: a wrong shape or dtype, or a code outside its codebook.
    """
    if codes.dtype.is_floating_point:
        raise InvalidInput(f"{field}.dtype", f"must be an integer type, not {codes.dtype}")
    if codes.dim() != 2 or codes.shape[1] != spec.num_code_groups:
        raise InvalidInput(f"{field}.shape", f"must be (frames, {spec.num_code_groups}), not {tuple(codes.shape)}")
    codes = codes.to(torch.int64, copy=True)  # the talker may reuse its memory after the check
    wrong = ((codes < 0) | (codes >= torch.tensor(spec.codebook_sizes))).nonzero()
    if len(wrong):
        frame, group = wrong[0].tolist()
        value, most = int(codes[frame, group]), spec.codebook_sizes[group] - 1
        raise InvalidInput(field, f"code {value} of frame {frame}, group {group}, must be 0 to {most}")
    return codes


class FrameWindow:
    """Limits the frames of a call in the engine."""

    def __init__(self, frames: int) -> None:
        self._free = frames
        self._freed = asyncio.Event()

    async def acquire(self, most: int) -> int:
        """Waits for room for 1 to `most` frames, and returns how many it took."""
        while not self._free:
            self._freed.clear()
            await self._freed.wait()
        frames = min(self._free, most)
        self._free -= frames
        return frames

    def release(self, frames: int) -> None:
        self._free += frames
        self._freed.set()


async def frames_of(
    spec: DecoderSpec,
    consumer: StreamConsumer,
    request: code2wav_pb2.DecodeRequest,
    begin: Callable[[int], object],
) -> AsyncIterator[torch.Tensor]:
    """The request's own frames, or a talker's, as (n, groups) int64 tensors. Before the first, `begin` takes the number
    of prompt frames.

    Raises:
        InvalidInput: no input, invalid codes, or a prompt longer than they are.
        InternalError: the producer skipped or repeated a frame.
        StageError: the producer's failure.
    """
    require(request.WhichOneof("input"), "input", "is required: set source, or codes")
    if request.HasField("codes"):
        codes = check_codes(spec, to_torch(request.codes, "codes"), "codes")
        _check_length(spec, len(codes), "codes")
        if not 0 <= request.prompt_frames <= len(codes):
            raise InvalidInput(
                "prompt_frames", f"{request.prompt_frames} must be 0 to {len(codes)}, the frames of codes"
            )
        begin(request.prompt_frames)
        yield codes
        return
    require(not request.prompt_frames, "prompt_frames", "must be 0 with a source, whose header has them")
    ungathered = round(UNGATHERED_S * spec.sample_rate_hz / spec.samples_per_frame)
    from_position = 0 if spec.decodes_whole else ungathered + spec.lookahead_frames
    gathering = stream_pb2.Gathering(from_position=from_position, delay_ms=GATHERED_MS)
    subscribed = consumer.subscribe(request.source, request.request_id, [CODES], gathering, producer="talker")
    async with subscribed as messages:
        async for codes in _frames_in(spec, messages, begin):
            yield codes


async def _frames_in(
    spec: DecoderSpec, messages: AsyncIterator[StreamMessage], begin: Callable[[int], object]
) -> AsyncIterator[torch.Tensor]:
    due, prompt = 0, 0
    async for message in messages:
        if isinstance(message, stream_pb2.StreamHeader):
            prompt = message.prompt_positions
            require(prompt >= 0, "source.prompt_positions", f"{prompt} must be at least 0")
            begin(prompt)
        elif isinstance(message, stream_pb2.StreamEnd):
            _expect(message.end_position, due, "the stream's end")
            require(prompt <= due, "source.prompt_positions", f"{prompt} must be 0 to {due}, the stream's frames")
        else:
            for rows in message.rows:
                _expect(rows.first_position, due, "the next frame")
                codes = check_codes(spec, rows.tensor, "source.codes")
                due += len(codes)
                _check_length(spec, due, "source.codes")
                yield codes


def _check_length(spec: DecoderSpec, frames: int, field: str) -> None:
    if spec.max_frames and frames > spec.max_frames:
        raise InvalidInput(field, f"{frames} frames are more than the {spec.max_frames} that are decoded in one piece")


def _expect(position: int, due: int, what: str) -> None:
    if position != due:
        raise InternalError(f"the talker's stream says {what} is at {position} after {due} frames")


class Code2WavServicer(code2wav_pb2_grpc.Code2WavServiceServicer):
    """`quartet.v1.Code2WavService`. Set `engine` before `admission` opens."""

    def __init__(self, admission: Admission, consumer: StreamConsumer) -> None:
        self._admission, self._consumer = admission, consumer
        self.engine: DecodeEngine

    async def Decode(
        self, request: code2wav_pb2.DecodeRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[code2wav_pb2.DecodeResponse]:
        async with serve_call("code2wav", request.request_id, context, self._admission) as call:
            engine = self.engine
            if request.sample_format not in code2wav_pb2.SampleFormat.values():
                raise InvalidInput("sample_format", f"{request.sample_format} is not a SampleFormat")
            # A slow client slows the talker's stream and does not fill memory.
            window = FrameWindow(WINDOW_STEPS * engine.policy.max_frames)
            events: asyncio.Queue[Event] = asyncio.Queue()
            loop = asyncio.get_running_loop()
            stream = engine.open(
                emit=lambda event: loop.call_soon_threadsafe(events.put_nowait, event),
                on_started=call.timings.mark_started,
                pcm16=request.sample_format == code2wav_pb2.SAMPLE_FORMAT_PCM16,
                voice=_voice(engine.spec, request.voice),
                seed=request.seed,
            )
            feeding = asyncio.create_task(self._feed(request, stream, window, events))
            try:
                while isinstance(event := await events.get(), Samples):
                    if len(event.samples):
                        call.timings.mark_output()
                        audio = code2wav_pb2.AudioChunk(
                            first_sample=event.first_sample, samples=to_message(event.samples), frames=event.frames
                        )
                        yield code2wav_pb2.DecodeResponse(audio=audio)
                    window.release(event.taken)
                if isinstance(event, Exception):
                    raise event
                call.set(frames=event.frames, samples=event.samples)
                summary = code2wav_pb2.DecodeSummary(
                    frames=event.frames,
                    samples=event.samples,
                    sample_rate_hz=engine.spec.sample_rate_hz,
                    timings=call.timings.to_message(),
                    waited_for_frames_ms=event.waited_ms,
                )
                yield code2wav_pb2.DecodeResponse(summary=summary)
            finally:
                engine.cancel(stream)
                feeding.cancel()

    async def _feed(
        self, request: code2wav_pb2.DecodeRequest, stream: Stream, window: FrameWindow, events: asyncio.Queue[Event]
    ) -> None:
        """Moves the request's frames into the engine. An error becomes an event."""
        try:
            begin = partial(self.engine.begin, stream)
            async for codes in frames_of(self.engine.spec, self._consumer, request, begin):
                while len(codes):
                    count = await window.acquire(len(codes))
                    self.engine.put(stream, codes[:count])
                    codes = codes[count:]
            self.engine.finish(stream)
        except Exception as error:
            events.put_nowait(error)


def _voice(spec: DecoderSpec, name: str) -> str:
    found = match_case(name, spec.voices) if name else next(iter(spec.voices), "")
    if found is None:
        there = f"is not one of {', '.join(spec.voices)}" if spec.voices else "cannot be chosen: the codes decide it"
        raise InvalidInput("voice", f"'{name}' {there}")
    return found
