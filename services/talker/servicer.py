"""`quartet.v1.TalkerService`: messages in, engine calls, messages out."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Sequence

import grpc

from quartet.v1 import server_info_pb2, stream_pb2, talker_pb2, talker_pb2_grpc
from services.common.rpc.call import Admission, Call, serve_call
from services.common.rpc.errors import InvalidInput
from services.common.stream.consumer import StreamConsumer
from services.common.stream.hub import StreamHub
from services.common.stream.output_stream import OutputStream
from services.common.stream.rows import Chunk, Rows
from services.common.stream.tensors import to_message, to_torch
from services.talker.engine import TalkerEngine
from services.talker.family import Prompt, TalkerFamily, TalkerSpec, Text, ThinkerInput
from services.talker.sampling import Sampling, resolve
from services.talker.speech import Speech, SpeechRequest

CODES = "codes"
# Frames that wait for the consumer's credit before the speech is read no further, and then made no further.
MAX_PENDING_FRAMES = 64

_ENDS = {"stop": talker_pb2.SPEECH_END_STOP, "length": talker_pb2.SPEECH_END_LENGTH}


class TalkerServicer(talker_pb2_grpc.TalkerServiceServicer):
    """Admits requests to `admission`, and serves them with `engine` and the `family` of what it runs: both are set
    once they are loaded, before `admission` opens."""

    def __init__(self, admission: Admission, hub: StreamHub, consumer: StreamConsumer) -> None:
        self._admission, self._hub, self._consumer = admission, hub, consumer
        self.engine: TalkerEngine
        self.family: TalkerFamily

    async def Speak(
        self, request: talker_pb2.SpeakRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[talker_pb2.SpeakResponse]:
        async with serve_call("talker", request.request_id, context, self._admission) as call:
            stream_id = request.output_stream_id
            with self._hub.open(stream_id, [CODES]) if stream_id else contextlib.nullcontext() as output:
                if output:
                    output.start(prompt_positions=0)
                sampling, speaker = self._sampling(request.sampling), self._speaker(request.speaker)
                session = SpeakSession(self.engine, self.family, speaker, sampling, call)
                async with contextlib.aclosing(self._speak(request, session, output)) as responses:
                    async for response in responses:
                        yield response

    def _speaker(self, asked: str) -> str:
        """Name of the voice as the checkpoint writes it."""
        speakers = self.family.spec.speakers
        found = [name for name in speakers if not asked or name.lower() == asked.lower()]
        if not found:
            raise InvalidInput("speaker", f"there is no voice '{asked}'; the voices are {', '.join(speakers)}")
        return found[0]

    def _sampling(self, message: talker_pb2.TalkerSampling) -> Sampling:
        asked = {field.name: value for field, value in message.ListFields()}
        spec = self.family.spec
        for name in asked if spec.predictor is None else ():
            if name.startswith("predictor_"):
                raise InvalidInput(f"sampling.{name}", "must be unset: this talker has no code predictor")
        return resolve(spec.defaults, **asked)

    async def _speak(
        self, request: talker_pb2.SpeakRequest, session: "SpeakSession", output: OutputStream | None
    ) -> AsyncGenerator[talker_pb2.SpeakResponse, None]:
        reading = asyncio.create_task(session.read(request, self._consumer))
        try:
            speech = await session.started
            if speech is None:
                yield session.summary(talker_pb2.SPEECH_END_EMPTY, output)
                return
            started = talker_pb2.SpeakStarted(speaker=session.speaker, seed=session.sampling.seed)
            yield talker_pb2.SpeakResponse(started=started)
            async with contextlib.aclosing(speech.frames()) as ready:
                async for codes in ready:
                    first = speech.frame_count - len(codes)
                    session.call.timings.mark_output()
                    if output is None:
                        frames = stream_pb2.Rows(name=CODES, first_position=first, tensor=to_message(codes))
                        yield talker_pb2.SpeakResponse(frames=frames)
                    else:
                        output.put([Rows(CODES, first, codes)])
                        await output.room(MAX_PENDING_FRAMES)
            assert speech.end is not None
            yield session.summary(_ENDS[speech.end], output)
        finally:
            reading.cancel()
            session.cancel()


class SpeakSession:
    """One request: carries what it is given, by a thinker or as text, to the engine.

    `started` becomes the Speech as soon as there is one, None when there is nothing to say, or the error.
    """

    def __init__(
        self, engine: TalkerEngine, family: TalkerFamily, speaker: str, sampling: Sampling, call: Call
    ) -> None:
        self.speaker, self.sampling, self.call = speaker, sampling, call
        self.started: asyncio.Future[Speech | None] = asyncio.get_running_loop().create_future()
        self._engine, self._family = engine, family
        self._waited_for_start_ms = 0.0
        self._speech: Speech | None = None

    async def read(self, request: talker_pb2.SpeakRequest, consumer: StreamConsumer) -> None:
        """Reads the input to its end. An error ends the speech with it."""
        try:
            match request.WhichOneof("input"):
                case "text":
                    self._read_text(request.text)
                case "source" | "inline" as field:
                    if self._family.thinker_input is None:
                        raise InvalidInput(field, "must be unset: this talker reads no thinker, but text")
                    thinker = self._family.thinker_input(self.speaker)
                    if field == "inline":
                        self._read_inline(request.inline, thinker)
                    else:
                        await self._read_source(request, thinker, consumer)
                    self._end_of_input(thinker)
                case _:
                    raise InvalidInput("input", "one of source, inline and text is required")
        except Exception as error:  # raised again where the frames are read, which is where the call ends
            if self._speech:
                self._speech.fail(error)
            elif not self.started.done():
                self.started.set_exception(error)

    def _read_text(self, spoken: str) -> None:
        if self._family.text_input is None:
            raise InvalidInput("text", "must be unset: this talker reads a thinker, by source or inline")
        prompt, text = self._family.text_input(spoken, self.speaker)
        if text.ids:
            self._start(prompt, text).finish_text()
        else:
            self.started.set_result(None)

    async def _read_source(
        self, request: talker_pb2.SpeakRequest, thinker: ThinkerInput, consumer: StreamConsumer
    ) -> None:
        subscribed = consumer.subscribe(request.source, request.request_id, thinker.wanted, producer="thinker")
        async with subscribed as messages:
            async for message in messages:
                if isinstance(message, stream_pb2.StreamHeader):
                    thinker.begin(message.prompt_positions)
                elif isinstance(message, Chunk):
                    self._take(message.rows, thinker)
                del message  # the thinker waits for its memory, and the next message may be long in coming

    def _read_inline(self, inline: talker_pb2.InlineThinkerOutput, thinker: ThinkerInput) -> None:
        thinker.begin(inline.header.prompt_positions)
        rows = [
            Rows(row.name, row.first_position, to_torch(row.tensor, f"inline.rows[{i}].tensor"))
            for i, row in enumerate(inline.rows)
        ]
        # Kinds of rows may come in any order here. Some say what others belong to: those are wanted first.
        order = {selection.name: place for place, selection in enumerate(thinker.wanted)}
        self._take(sorted(rows, key=lambda row: (order.get(row.name, len(order)), row.first_position)), thinker)

    def _take(self, rows: Sequence[Rows], thinker: ThinkerInput) -> None:
        """Adds what the thinker sent. Starts the speech once it can be, then feeds it."""
        for row in rows:
            thinker.add(row)
        if self._speech:
            self._speech.feed(thinker.take_text())
        elif thinker.ready:
            self._start(thinker.take_prompt(), thinker.take_text())

    def _start(self, prompt: Prompt, text: Text) -> Speech:
        self._speech = self._engine.submit(SpeechRequest(prompt, text, self.sampling, self.call.timings))
        self._waited_for_start_ms = self.call.timings.elapsed_ms()
        self.started.set_result(self._speech)
        return self._speech

    def _end_of_input(self, thinker: ThinkerInput) -> None:
        if self._speech:
            self._speech.finish_text()
        elif thinker.is_empty:
            self._waited_for_start_ms = self.call.timings.elapsed_ms()
            self.started.set_result(None)
        else:
            raise InvalidInput("rows", "the input ended before all rows of the prompt were there")

    def cancel(self) -> None:
        """Frees what the request holds in the engine."""
        if self._speech:
            self._speech.cancel()
        if self.started.done() and not self.started.cancelled():
            self.started.exception()  # seen, even if nobody waited for it

    def summary(self, end: "talker_pb2.SpeechEnd", output: OutputStream | None) -> talker_pb2.SpeakResponse:
        """The last message; completes the output stream."""
        frames = self._speech.frame_count if self._speech else 0
        waited_ms = self._waited_for_start_ms + (self._speech.waiting.waited_ms if self._speech else 0.0)
        if output:
            output.finish(end_position=frames)
        self.call.set(frames=frames, end=talker_pb2.SpeechEnd.Name(end), waited_for_text_ms=round(waited_ms, 1))
        summary = talker_pb2.SpeakSummary(
            frames=frames, end=end, timings=self.call.timings.to_message(), waited_for_text_ms=waited_ms
        )
        return talker_pb2.SpeakResponse(summary=summary)


def talker_info(spec: TalkerSpec, positions: int) -> server_info_pb2.TalkerInfo:
    """What ServerInfo says of this talker, which has `positions` positions a request."""
    return server_info_pb2.TalkerInfo(
        speakers=list(spec.speakers), num_code_groups=spec.num_code_groups, max_context_positions=positions
    )
