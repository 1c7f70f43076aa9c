"""`quartet.v1.TalkerService`: messages in, engine calls, messages out."""

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterable

import grpc

from quartet.v1 import server_info_pb2, stream_pb2, talker_pb2, talker_pb2_grpc
from services.common.rpc.call import Admission, Call, serve_call
from services.common.rpc.errors import InvalidInput
from services.common.stream.consumer import StreamConsumer, StreamMessage
from services.common.stream.hub import StreamHub
from services.common.stream.output_stream import OutputStream
from services.common.stream.rows import Chunk, Rows
from services.common.stream.tensors import to_message, to_torch
from services.talker.engine import TalkerEngine
from services.talker.sampling import Sampling, resolve
from services.talker.speech import Speech, SpeechRequest
from services.talker.thinker_input import ROPE_POSITIONS, TOKEN_IDS, ThinkerInput

CODES = "codes"
# Frames that wait for the consumer's credit before the speech is read no further, and then made no further.
MAX_PENDING_FRAMES = 64

_ENDS = {"stop": talker_pb2.SPEECH_END_STOP, "length": talker_pb2.SPEECH_END_LENGTH}


class TalkerServicer(talker_pb2_grpc.TalkerServiceServicer):
    """Admits requests to `admission`, and once it has an engine serves them with it."""

    def __init__(self, admission: Admission, hub: StreamHub, consumer: StreamConsumer) -> None:
        self._admission, self._hub, self._consumer = admission, hub, consumer
        self._engine: TalkerEngine
        self._text_ids = 0

    def bind(self, engine: TalkerEngine, text_ids: int) -> None:
        """The engine, before `admission` opens. `text_ids` is the size of the text vocabulary."""
        self._engine, self._text_ids = engine, text_ids

    async def Speak(
        self, request: talker_pb2.SpeakRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[talker_pb2.SpeakResponse]:
        async with serve_call("talker", request.request_id, context, self._admission) as call:
            with self._output(request) as output:
                sampling, speaker = self._sampling(request.sampling), self._speaker(request.speaker)
                talk = _Talk(self._engine, ThinkerInput(self._engine.spec, self._text_ids), speaker, sampling, call)
                async with contextlib.aclosing(self._speak(request, talk, output)) as responses:
                    async for response in responses:
                        yield response

    def _output(self, request: talker_pb2.SpeakRequest) -> contextlib.AbstractContextManager[OutputStream | None]:
        if not request.output_stream_id:
            return contextlib.nullcontext()
        output = self._hub.open(request.output_stream_id, [CODES])
        output.start(prompt_positions=0)
        return output

    def _speaker(self, asked: str) -> str:
        """Name of the voice as the checkpoint writes it."""
        speakers = self._engine.spec.speakers
        if not asked:
            return next(iter(speakers))
        for name in speakers:
            if name.lower() == asked.lower():
                return name
        raise InvalidInput("speaker", f"there is no voice '{asked}'; the voices are {', '.join(speakers)}")

    def _sampling(self, message: talker_pb2.TalkerSampling) -> Sampling:
        asked = {field.name: value for field, value in message.ListFields()}
        return resolve(self._engine.spec.defaults, **asked)

    async def _speak(
        self, request: talker_pb2.SpeakRequest, talk: "_Talk", output: OutputStream | None
    ) -> AsyncGenerator[talker_pb2.SpeakResponse, None]:
        reading = asyncio.create_task(talk.read(request, self._consumer))
        try:
            speech = await talk.started
            if speech is None:
                yield talk.summary(talker_pb2.SPEECH_END_EMPTY, output)
                return
            started = talker_pb2.SpeakStarted(speaker=talk.speaker, seed=talk.sampling.seed)
            yield talker_pb2.SpeakResponse(started=started)
            async with contextlib.aclosing(speech.frames()) as ready:
                async for codes in ready:
                    first = speech.frame_count - len(codes)
                    talk.call.timings.mark_output()
                    if output is None:
                        frames = stream_pb2.Rows(name=CODES, first_position=first, tensor=to_message(codes))
                        yield talker_pb2.SpeakResponse(frames=frames)
                    else:
                        output.put([Rows(CODES, first, codes)])
                        await output.room(MAX_PENDING_FRAMES)
            assert speech.end is not None
            yield talk.summary(_ENDS[speech.end], output)
        finally:
            reading.cancel()
            talk.cancel()


class _Talk:
    """One request: carries the thinker's rows to the engine.

    `started` becomes the Speech as soon as there is one, None when there is nothing to say, or the error.
    """

    def __init__(
        self, engine: TalkerEngine, thinker: ThinkerInput, speaker: str, sampling: Sampling, call: Call
    ) -> None:
        self.speaker, self.sampling, self.call = speaker, sampling, call
        self.started: asyncio.Future[Speech | None] = asyncio.get_running_loop().create_future()
        self._engine, self._thinker = engine, thinker
        self._accepted = time.monotonic()
        self._waited_for_start_ms = 0.0
        self._speech: Speech | None = None

    async def read(self, request: talker_pb2.SpeakRequest, consumer: StreamConsumer) -> None:
        """Reads the input to its end. An error ends the speech with it."""
        try:
            if request.WhichOneof("input") == "source":
                await self._read_source(request, consumer)
            elif request.WhichOneof("input") == "inline":
                self._read_inline(request.inline)
            else:
                raise InvalidInput("input", "one of source and inline is required")
            self._end_of_input()
        except Exception as error:  # raised again where the frames are read, which is where the call ends
            self._fail(error)

    async def _read_source(self, request: talker_pb2.SpeakRequest, consumer: StreamConsumer) -> None:
        wanted = [
            stream_pb2.RowSelection(name=TOKEN_IDS, positions=stream_pb2.POSITIONS_ALL),
            stream_pb2.RowSelection(name=self._thinker.hidden_states, positions=stream_pb2.POSITIONS_PROMPT_MULTIMODAL),
            stream_pb2.RowSelection(name=ROPE_POSITIONS, positions=stream_pb2.POSITIONS_PROMPT),
        ]
        async with consumer.subscribe(request.source, request.request_id, wanted, producer="thinker") as messages:
            async for message in messages:
                self._read_message(message)
                del message  # the thinker waits for its memory, and the next message may be long in coming

    def _read_message(self, message: StreamMessage) -> None:
        if isinstance(message, stream_pb2.StreamHeader):
            self._thinker.begin(message.prompt_positions)
        elif isinstance(message, Chunk):
            self._add(message.rows)
            self._pass_on()

    def _read_inline(self, inline: talker_pb2.InlineThinkerOutput) -> None:
        self._thinker.begin(inline.header.prompt_positions)
        # Token ids say what the other rows belong to; inline rows may come in any order of kinds.
        rows = [
            Rows(row.name, row.first_position, to_torch(row.tensor, f"inline.rows[{i}].tensor"))
            for i, row in enumerate(inline.rows)
        ]
        self._add(sorted(rows, key=lambda row: (row.name != TOKEN_IDS, row.name, row.first_position)))
        self._pass_on()

    def _add(self, rows: Iterable[Rows]) -> None:
        for row in rows:
            self._thinker.add(row.name, row.first_position, row.tensor)

    def _pass_on(self) -> None:
        """Starts the speech once it can be, then feeds it."""
        if self._speech:
            self._speech.feed(self._thinker.take_text())
        elif self._thinker.ready:
            prompt, text = self._thinker.take_prompt(), tuple(self._thinker.take_text())
            request = SpeechRequest(prompt, text, self.speaker, self.sampling, self.call.timings)
            self._speech = self._engine.submit(request)
            self._waited_for_start_ms = (time.monotonic() - self._accepted) * 1000
            self.started.set_result(self._speech)

    def _end_of_input(self) -> None:
        if self._speech:
            self._speech.finish_text()
        elif self._thinker.is_empty:
            self._waited_for_start_ms = (time.monotonic() - self._accepted) * 1000
            self.started.set_result(None)
        else:
            raise InvalidInput("rows", "the input ended before all rows of the prompt were there")

    def _fail(self, error: Exception) -> None:
        if self._speech:
            self._speech.fail(error)
        elif not self.started.done():
            self.started.set_exception(error)

    def cancel(self) -> None:
        """Frees what the request holds in the engine."""
        if self._speech:
            self._speech.cancel()
        if self.started.done() and not self.started.cancelled():
            self.started.exception()  # seen, even if nobody waited for it

    def summary(self, end: "talker_pb2.SpeechEnd", output: OutputStream | None) -> talker_pb2.SpeakResponse:
        """The last message; completes the output stream."""
        frames = self._speech.frame_count if self._speech else 0
        waited_ms = self._waited_for_start_ms + (self._speech.waited_ms if self._speech else 0.0)
        if output:
            output.finish(end_position=frames)
        self.call.set(frames=frames, end=talker_pb2.SpeechEnd.Name(end), waited_for_text_ms=round(waited_ms, 1))
        summary = talker_pb2.SpeakSummary(
            frames=frames, end=end, timings=self.call.timings.to_message(), waited_for_text_ms=waited_ms
        )
        return talker_pb2.SpeakResponse(summary=summary)


def talker_info(
    engine: TalkerEngine, positions: int
) -> tuple[list[server_info_pb2.RowsInfo], server_info_pb2.TalkerInfo]:
    """What ServerInfo says of this talker."""
    spec = engine.spec
    rows = [server_info_pb2.RowsInfo(name=CODES)]
    info = server_info_pb2.TalkerInfo(
        speakers=list(spec.speakers), num_code_groups=spec.num_code_groups, max_context_positions=positions
    )
    return rows, info
