"""One call of the talker."""

import asyncio
from collections.abc import AsyncIterator, Sequence

import torch

from quartet.v1 import stream_pb2, talker_pb2
from services.common.errors import InvalidInput, require
from services.common.rpc.call import Call
from services.common.rpc.requests import next_of
from services.common.stream.consumer import StreamConsumer
from services.common.stream.output_stream import OutputStream
from services.common.stream.rows import CODES, Chunk, Rows
from services.common.stream.tensors import to_torch
from services.talker.answer import AnswerRows
from services.talker.delivery import delivery_of, sampling_of, speaker_of
from services.talker.engine import TalkerEngine
from services.talker.family import TalkerFamily
from services.talker.inputs import SpeechInput, TextInput
from services.talker.speech import Speech, SpeechRequest
from services.talker.voices import Voices

Requests = AsyncIterator[talker_pb2.SpeakRequest]
TEXT_TIMEOUT_S = 600.0  # a client that is silent for longer gives up its place
_AT_ONCE = 2000  # characters that are tokenized before other calls have their turn: some 20 ms


class SpeakSession:
    """Carries the input of one request, a thinker's rows or text, to the engine.

    Args:
        voices: hears voice samples; None: the talker imitates none.
        output: where its frames go; None: back to the caller.

    Attributes:
        started: becomes the Speech as soon as there is one, None when there is nothing to say, or the error.
        frames_before: (frames, groups) int32 of a voice sample, before those of the speech.

    Raises:
        InvalidInput: the request asks for what the talker has not.
    """

    def __init__(
        self,
        engine: TalkerEngine,
        family: TalkerFamily,
        voices: Voices | None,
        start: talker_pb2.SpeakStart,
        output: OutputStream | None,
        call: Call,
    ) -> None:
        self.speaker, self.sampling, self.call = speaker_of(family, start), sampling_of(family, start), call
        self.started: asyncio.Future[Speech | None] = asyncio.get_running_loop().create_future()
        self.frames_before = torch.empty(0, family.spec.num_code_groups, dtype=torch.int32)
        self._engine, self._family, self._voices, self._request, self._output = engine, family, voices, start, output
        self._waited_for_start_ms = 0.0
        self._speech: Speech | None = None
        self._input: SpeechInput | None = None

    async def read(self, requests: Requests, consumer: StreamConsumer) -> None:
        """Reads the input to its end. An error ends the speech."""
        try:
            match self._request.WhichOneof("input"):
                case "text":
                    await self._read_text(self._request.text, requests)
                case "source" | "inline" as field:
                    await self._read_thinker(field, consumer)
                case _:
                    raise InvalidInput("input", "one of source, inline and text is required")
        except Exception as error:  # raised again where the frames are read, which is where the call ends
            if self._speech:
                self._speech.fail(error)
            elif not self.started.done():
                self.started.set_exception(error)

    async def _read_text(self, spoken: talker_pb2.SpokenText, requests: Requests) -> None:
        if self._family.text_input is None:
            raise InvalidInput("text", "must be unset: this talker reads a thinker, by source or inline")
        delivery = await delivery_of(self._family, self._voices, self.speaker, spoken)
        if delivery.frames_before is not None:
            self.frames_before = delivery.frames_before.to(torch.int32)
        self._begin_output()  # before there is text: a decoder needs a while for many frames
        self._input = text = self._family.text_input(delivery)
        await self._add(spoken.text, text)
        while (request := await _next(requests)) is not None:
            require(request.WhichOneof("message") == "text", "message", "after the start comes text only")
            await self._add(request.text, text)
        text.finish()
        self._advance(text)
        self._end_of_input(text)

    async def _add(self, piece: str, text: TextInput) -> None:
        most = self._engine.runner.positions
        for begin in range(0, len(piece), _AT_ONCE):
            if text.tokens > most and self._speech:
                return  # it has no frames for what follows
            require(text.tokens <= most, "text", f"has more than the {most} tokens that can be read")
            text.add(piece[begin : begin + _AT_ONCE])
            self._advance(text)
            await asyncio.sleep(0)

    def _begin_output(self) -> None:
        if self._output:
            self._output.start(prompt_positions=len(self.frames_before))
            if len(self.frames_before):
                self._output.put([Rows(CODES, 0, self.frames_before)])

    async def _read_thinker(self, field: str, consumer: StreamConsumer) -> None:
        if self._family.thinker_input is None:
            raise InvalidInput(field, "must be unset: this talker reads no thinker, but text")
        self._begin_output()
        self._input = thinker = self._family.thinker_input(self.speaker)
        if field == "inline":
            self._read_inline(self._request.inline, thinker)
        else:
            await self._read_source(thinker, consumer)
        self._end_of_input(thinker)

    async def _read_source(self, thinker: AnswerRows, consumer: StreamConsumer) -> None:
        start = self._request
        subscribed = consumer.subscribe(start.source, start.request_id, thinker.wanted, producer="thinker")
        async with subscribed as messages:
            async for message in messages:
                if isinstance(message, stream_pb2.StreamHeader):
                    thinker.begin(message.prompt_positions)
                elif isinstance(message, Chunk):
                    self._take(message.rows, thinker)
                del message  # the thinker waits for its memory, and the next message may be long in coming

    def _read_inline(self, inline: talker_pb2.InlineThinkerOutput, thinker: AnswerRows) -> None:
        thinker.begin(inline.header.prompt_positions)
        rows = [
            Rows(row.name, row.first_position, to_torch(row.tensor, f"inline.rows[{i}].tensor"))
            for i, row in enumerate(inline.rows)
        ]
        # Kinds of rows may come in any order here. Some say what others belong to: those are wanted first.
        order = {selection.name: place for place, selection in enumerate(thinker.wanted)}
        self._take(sorted(rows, key=lambda row: (order.get(row.name, len(order)), row.first_position)), thinker)

    def _take(self, rows: Sequence[Rows], thinker: AnswerRows) -> None:
        for row in rows:
            thinker.add(row)
        self._advance(thinker)

    def _advance(self, source: SpeechInput) -> None:
        """Starts the speech once it can be, then feeds it."""
        if self._speech:
            self._speech.feed(source.take_text())
        elif source.ready:
            request = SpeechRequest(source.take_prompt(), source.take_text(), self.sampling, self.call.timings)
            self._speech = self._engine.submit(request)
            self._waited_for_start_ms = self.call.timings.elapsed_ms()
            self.started.set_result(self._speech)

    def _end_of_input(self, source: SpeechInput) -> None:
        if self._speech:
            self._speech.finish_text()
        elif source.is_empty:
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

    def summary(self, end: "talker_pb2.SpeechEnd") -> talker_pb2.SpeakResponse:
        """The last message; completes the output stream."""
        frames = self._speech.frame_count if self._speech else 0
        waited_ms = self._waited_for_start_ms + (self._speech.waiting.waited_ms if self._speech else 0.0)
        if self._output:
            self._output.finish(end_position=len(self.frames_before) + frames)
        self.call.set(frames=frames, end=talker_pb2.SpeechEnd.Name(end), waited_for_text_ms=round(waited_ms, 1))
        summary = talker_pb2.SpeakSummary(
            frames=frames,
            end=end,
            timings=self.call.timings.to_message(),
            waited_for_text_ms=waited_ms,
            text_tokens=self._input.tokens if self._input else 0,
        )
        return talker_pb2.SpeakResponse(summary=summary)


async def _next(requests: Requests) -> talker_pb2.SpeakRequest | None:
    """None: there is none. Raises InvalidInput: the client is silent."""
    try:
        return await next_of(requests, TEXT_TIMEOUT_S)
    except TimeoutError:
        raise InvalidInput("text", f"no more of it came for {TEXT_TIMEOUT_S:g} s") from None
