"""Transcribes speech by the thinker, window by window.

Several windows are written at a time, and their text comes in order. Memory does not grow with the audio.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AbstractContextManager, aclosing, nullcontext
from typing import Any

from gateway import metrics
from gateway.access.api_key import ApiKey
from gateway.answers.catalog import not_reached
from gateway.answers.gateway import Gateway
from gateway.answers.transcription.audio_sources import FileSound, LiveSound
from gateway.answers.transcription.formats import Segment
from gateway.answers.transcription.languages import code_of
from gateway.answers.transcription.request import TranslationRequest
from gateway.answers.word_times import NO_ALIGNER, TimedWord, timed_words
from gateway.errors import in_own_terms, invalid
from gateway.listening.silero import RATE_HZ
from gateway.listening.speech_windows import SpeechWindow
from gateway.media.encode import encode_audio
from gateway.media.fetch import media_errors
from gateway.pipeline.events import Event, Finished, PromptRead, TextDelta, WholeBeam
from gateway.pipeline.run import Job, run
from gateway.pipeline.sampling import TranscriptSampling
from gateway.pipeline.stage import Stage
from gateway.tasks import cancel
from quartet.v1 import media_pb2, thinker_pb2

_PARALLEL_WINDOWS = 4  # of one request, in the thinker


class TranscriptionRun:
    """The transcription of one audio source.

    Attributes:
        segments: with speech, in order; complete once `deltas` has ended.

    Raises:
        ApiError: no thinker here hears audio; or no aligner is here, and the times of words are wanted.
    """

    def __init__(
        self,
        gateway: Gateway,
        request: TranslationRequest,
        sound: FileSound | LiveSound,
        request_id: str,
        log: dict[str, Any],
        key: ApiKey | None = None,
    ) -> None:
        self._key = key
        self.request, self.sound, self.segments = request, sound, list[Segment]()
        self._gateway, self._request_id, self._log = gateway, request_id, log
        terms = f" Names and terms in it may be: {request.prompt}" if request.prompt else ""
        self._instruction = request.instruction + terms
        self._ended = list[_Piece]()
        if (request.n or 1) > gateway.settings.max_choices:
            raise invalid("n", f"at most {gateway.settings.max_choices} beams")
        if (stage := gateway.catalog.transcriber) is None:
            raise invalid("model", "no thinker here: only a server with one writes down sound", "unsupported_model")
        request.model = gateway.catalog.meant(request.model, "transcription")
        if request.model is not None and gateway.catalog.parent_of(request.model) is None:
            gateway.catalog.require_model(request.model, stage)
        self._lora = gateway.catalog.lora_of(request.model)  # of all windows: one that is unloaded meanwhile is missed
        if stage.info is None:
            raise not_reached(stage)
        self._hears = stage.info.thinker
        if "audio" not in self._hears.input_modalities:
            raise invalid("model", "does not hear", "unsupported_model")
        if self._hears.only_transcribes and request.use_beam_search:
            raise invalid("use_beam_search", "this model searches for no beams; leave it out")
        self._aligner = gateway.pipeline.output("words") if request.wants_words else None
        if request.wants_words and self._aligner is None:
            raise invalid("timestamp_granularities", f"{NO_ALIGNER}, or leave word out", "unsupported_model")

    @property
    def usage(self) -> dict[str, Any]:
        """OpenAI's token counts, once `deltas` has ended."""
        read = sum(piece.summary.prompt_tokens for piece in self._ended)
        audio = sum(piece.audio_tokens for piece in self._ended)
        written = sum(piece.summary.completion_tokens for piece in self._ended)
        return {
            "type": "tokens",
            "input_tokens": read,
            "input_token_details": {"audio_tokens": audio, "text_tokens": read - audio},
            "output_tokens": written,
            "total_tokens": read + written,
        }

    async def deltas(self) -> AsyncGenerator[str, None]:
        """Yields the text of the segments in order. Raises ApiError."""
        begun: asyncio.Queue[_Piece | None] = asyncio.Queue(_PARALLEL_WINDOWS)
        cutting, said = asyncio.create_task(self._cut(begun)), False
        try:
            with in_own_terms(self._own_name), media_errors(self.sound.field), self._places():
                while (piece := await begun.get()) is not None:
                    self.segments.append(piece.segment)
                    async for delta in piece.deltas():
                        yield f" {delta}" if said and not piece.segment.text else delta
                        piece.segment.text += delta
                    said = said or bool(piece.segment.text)
                    self._ended.append(piece)
                    metrics.PROMPT_TOKENS.inc(piece.summary.prompt_tokens)
                    metrics.TEXT_TOKENS.inc(piece.summary.completion_tokens)
                await cutting
        finally:
            await cancel(cutting)
            if self._key is not None:
                self._key.owe(self.sound.duration_s)
        self._log |= {"audio_s": round(self.sound.duration_s, 3), "windows": len(self.segments)}

    def _places(self) -> AbstractContextManager[None]:
        """For beams. Raises ApiError: the key may not have so many."""
        return nullcontext() if self._key is None else self._key.at_once((self.request.n or 1) - 1, "n")

    def _own_name(self, member: str) -> str:
        if member == "messages":
            return "prompt" if self.request.prompt else self.sound.field
        return "prompt" if member == "transcription.hints" else member.removeprefix("transcription.")

    async def _cut(self, begun: "asyncio.Queue[_Piece | None]") -> None:
        """Queues pieces, with the thinker at work on them; None comes last. Raises MediaError."""
        works: list[asyncio.Task[None]] = []
        try:
            async with aclosing(self.sound.windows()) as windows:
                async for window in windows:
                    piece = _Piece(Segment(len(works), window.begin_s, window.end_s, window.speech_probability))
                    works.append(asyncio.create_task(self._write(piece, window)))
                    await begun.put(piece)  # waits while there are enough
            await begun.put(None)
            await asyncio.gather(*works)
        except Exception:  # the reader of the next piece gets it from the task
            await begun.put(None)
            raise
        finally:
            await cancel(*works)

    async def _write(self, piece: "_Piece", window: SpeechWindow) -> None:
        """Transcribes a window; the piece's reader gets the error."""
        try:
            start = {"thinker": self._start(window)}
            job = Job(f"{self._request_id}-{piece.segment.id}", start, is_transcript=True)
            async with aclosing(run(self._gateway.pipeline, [job], self.sound.left_s())) as events:
                async for _, event in events:
                    piece.take(event)
            if self._aligner is not None:
                piece.segment.words = await self._words(self._aligner, piece, window)
            piece.events.put_nowait(None)
        except Exception as error:  # raised again where the piece is read
            piece.events.put_nowait(error)

    async def _words(self, aligner: Stage, piece: "_Piece", window: SpeechWindow) -> list[TimedWord]:
        """Of a piece whose text is whole. Their times are within the window. Raises StageError."""
        language, begin_s = code_of(self.request.language), window.audio_begin_s
        request_id, text = f"{self._request_id}-{piece.segment.id}", "".join(piece.written)
        left_s = self.sound.left_s()
        return await timed_words(aligner, request_id, window.pcm16, text, language, left_s, begin_s)

    def _start(self, window: SpeechWindow) -> thinker_pb2.GenerateStart:
        most, temperature = self.request.max_completion_tokens, self.request.temperature
        others = self.request.model_dump(include=set(TranscriptSampling.model_fields), exclude_none=True)
        sampling = thinker_pb2.SamplingParameters(temperature=temperature, max_tokens=most, **others)
        if self.request.response_format == "verbose_json":
            sampling.top_logprobs = 0
        start = thinker_pb2.GenerateStart(sampling=sampling, lora=self._lora, priority=self.request.priority or 0)
        self.request.search(start, self.request.n or 1)
        file = encode_audio(window.pcm16, RATE_HZ, "wav")
        sound = media_pb2.Media(kind=media_pb2.MEDIA_KIND_AUDIO, data=file, field=self.sound.field)
        if self._hears.transcribes:
            start.transcription.CopyFrom(self.request.transcription(sound))
            return start
        content = start.messages.add(role="user").content
        content.add(media=sound)
        content.add(text=self._instruction)
        return start


class _Piece:
    def __init__(self, segment: Segment) -> None:
        self.segment, self.audio_tokens, self.summary = segment, 0, thinker_pb2.GenerateSummary()
        self.is_whole, self.written = False, list[str]()
        self.events: asyncio.Queue[str | Exception | None] = asyncio.Queue()

    def take(self, event: Event) -> None:
        match event:
            case PromptRead(tokens):
                self.audio_tokens = tokens.audio_tokens
            case TextDelta(delta) | WholeBeam(delta) if not self.is_whole:
                self.is_whole = isinstance(event, WholeBeam)  # the others are less likely
                self.segment.token_ids += delta.token_ids
                self.segment.logprobs += [token.logprob for token in delta.logprobs]
                self.written.append(delta.text)
                self.events.put_nowait(delta.text)
            case Finished(thinker=thinker) if thinker is not None:
                self.summary = thinker

    async def deltas(self) -> AsyncIterator[str]:
        """Its text, stripped. Raises StageError."""
        held, begun = "", False
        while (event := await self.events.get()) is not None:
            if isinstance(event, Exception):
                raise event
            held += event
            if ready := held.rstrip() if begun else held.strip():
                yield ready
                held, begun = held[len(held.rstrip()) :], True
