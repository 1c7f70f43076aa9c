"""`quartet.v1.TalkerService`: messages in, engine calls, messages out."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine
from typing import Any

import grpc
import torch

from quartet.v1 import server_info_pb2, stream_pb2, talker_pb2, talker_pb2_grpc
from services.common.rpc.call import Admission, serve_call
from services.common.rpc.requests import first_start
from services.common.stream.consumer import StreamConsumer
from services.common.stream.frames_in_flight import FRAMES_IN_FLIGHT
from services.common.stream.hub import StreamHub
from services.common.stream.output_stream import OutputStream
from services.common.stream.rows import CODES, Rows
from services.common.stream.tensors import to_message
from services.talker.engine import TalkerEngine
from services.talker.family import TalkerFamily
from services.talker.session import Requests, SpeakSession
from services.talker.voices import Voices

# Frames that wait for the consumer's credit before the speech is read, and then made, no further.
MAX_PENDING_FRAMES = FRAMES_IN_FLIGHT // 2

_ENDS = {"stop": talker_pb2.SPEECH_END_STOP, "length": talker_pb2.SPEECH_END_LENGTH}


class TalkerServicer(talker_pb2_grpc.TalkerServiceServicer):
    """Serves requests. Set `engine`, the `family` that it runs, and `voices`, if it imitates some, before `admission`
    opens."""

    def __init__(self, admission: Admission, hub: StreamHub, consumer: StreamConsumer) -> None:
        self._admission, self._hub, self._consumer = admission, hub, consumer
        self.engine: TalkerEngine
        self.family: TalkerFamily
        self.voices: Voices | None = None

    async def Speak(
        self, request_iterator: Requests, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[talker_pb2.SpeakResponse]:
        start: talker_pb2.SpeakStart = await first_start(request_iterator, context)
        async with serve_call("talker", start.request_id, context, self._admission) as call:
            stream_id = start.output_stream_id
            with self._hub.open(stream_id, [CODES]) if stream_id else contextlib.nullcontext() as output:
                session = SpeakSession(self.engine, self.family, self.voices, start, output, call)
                read = session.read(request_iterator, self._consumer)
                sends_frames = output is None or start.wants_frames
                async with contextlib.aclosing(_speak(session, read, output, sends_frames)) as responses:
                    async for response in responses:
                        yield response


async def _speak(
    session: SpeakSession, read: Coroutine[Any, Any, None], output: OutputStream | None, sends_frames: bool
) -> AsyncGenerator[talker_pb2.SpeakResponse, None]:
    """The responses. Frames are among them if `sends_frames`, once `output` has them."""
    reading = asyncio.create_task(read)
    try:
        speech = await session.started
        if speech is None:
            yield session.summary(talker_pb2.SPEECH_END_EMPTY)
            return
        before = len(session.frames_before)
        started = talker_pb2.SpeakStarted(speaker=session.speaker, seed=session.sampling.seed, prompt_frames=before)
        yield talker_pb2.SpeakResponse(started=started)
        if before and sends_frames:
            yield _frames(0, session.frames_before)
        async with contextlib.aclosing(speech.frames()) as ready:
            async for codes in ready:
                first = before + speech.frame_count - len(codes)
                session.call.timings.mark_output()
                if output is not None:
                    output.put([Rows(CODES, first, codes)])
                if sends_frames:
                    yield _frames(first, codes)
                if output is not None:
                    await output.room(MAX_PENDING_FRAMES)
        assert speech.end is not None
        yield session.summary(_ENDS[speech.end])
    finally:
        reading.cancel()
        session.cancel()


def _frames(first: int, codes: torch.Tensor) -> talker_pb2.SpeakResponse:
    rows = stream_pb2.Rows(name=CODES, first_position=first, tensor=to_message(codes))
    return talker_pb2.SpeakResponse(frames=rows)


def talker_info(family: TalkerFamily, voices: Voices | None, positions: int) -> server_info_pb2.TalkerInfo:
    """`positions` are those of a request."""
    return server_info_pb2.TalkerInfo(
        speakers=list(family.spec.speakers),
        num_code_groups=family.spec.num_code_groups,
        max_context_positions=positions,
        reads_text=family.text_input is not None,
        languages=family.languages,
        voice_sample_rate_hz=voices.sample_rate_hz if voices else 0,
        takes_instructions=family.takes_instructions,
        max_frames=family.spec.defaults.max_frames,
    )
