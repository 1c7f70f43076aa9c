"""gRPC side of code2wav: frames in from a talker or inline, samples out."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing

import grpc
import torch

from quartet.v1 import code2wav_pb2, code2wav_pb2_grpc
from services.code2wav.engine import DecodeEngine
from services.code2wav.family import DecoderSpec
from services.code2wav.frames import FrameWindow, frames_of
from services.code2wav.stream import Event, Failed, Samples, Stream
from services.common.rpc.call import Admission, Call, serve_call
from services.common.rpc.errors import InvalidInput, Unavailable
from services.common.stream.consumer import StreamConsumer
from services.common.stream.tensors import to_message

# Steps of a call's frames that are taken in before their samples have left: one that is decoded, and what comes
# meanwhile.
WINDOW_STEPS = 4


class Code2WavServicer(code2wav_pb2_grpc.Code2WavServiceServicer):
    """`quartet.v1.Code2WavService` on an engine, which `bind` sets once it is loaded.

    Args:
        admission: refuses calls while there is no engine, and those beyond the stage's limits.
        consumer: reads talkers' streams.
    """

    def __init__(self, admission: Admission, consumer: StreamConsumer) -> None:
        self._admission, self._consumer = admission, consumer
        self._engine: DecodeEngine | None = None

    def bind(self, engine: DecodeEngine) -> None:
        """Serves with `engine` from now on."""
        self._engine = engine

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
        voice = _voice(engine.spec, request.voice)
        frames_in = frames_of(engine.spec, self._consumer, request)
        # A client that does not read, or reads slowly, thereby slows the talker's stream instead of filling memory.
        window = FrameWindow(WINDOW_STEPS * engine.policy.max_frames)
        events: asyncio.Queue[Event] = asyncio.Queue()
        loop = asyncio.get_running_loop()
        stream = engine.open(
            emit=lambda event: loop.call_soon_threadsafe(events.put_nowait, event),
            on_started=call.timings.mark_started,
            pcm16=request.sample_format == code2wav_pb2.SAMPLE_FORMAT_PCM16,
            voice=voice,
            seed=request.seed,
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
                sample_rate_hz=engine.spec.sample_rate_hz,
                timings=call.timings.to_message(),
                waited_for_frames_ms=event.waited_ms,
            )
            yield code2wav_pb2.DecodeResponse(summary=summary)
        finally:
            engine.cancel(stream)
            feeding.cancel()


async def _feed(
    engine: DecodeEngine,
    stream: Stream,
    frames_in: AsyncIterator[torch.Tensor],
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


def _voice(spec: DecoderSpec, asked: str) -> str:
    """The voice to decode with.

    Raises:
        InvalidInput: there is no such voice.
    """
    if asked and asked not in spec.voices:
        there = f"is not one of {', '.join(spec.voices)}" if spec.voices else "cannot be chosen: the codes decide it"
        raise InvalidInput("voice", f"'{asked}' {there}")
    return asked or next(iter(spec.voices), "")
