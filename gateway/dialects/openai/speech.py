"""`POST /v1/audio/speech`: speech of a text, without a thinker."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from copy import deepcopy
from dataclasses import replace
from typing import Annotated, Any, Literal, Self

import pybase64
from fastapi import APIRouter, Depends, Request
from pydantic import Field
from starlette.requests import HTTPConnection
from starlette.responses import Response

from gateway import metrics
from gateway.answers import harmless
from gateway.answers.gateway import Gateway
from gateway.answers.meter import Meter
from gateway.answers.sampling import talker_sampling
from gateway.answers.voice_options import SpeakPlan, VoiceOptions, plan_speech
from gateway.answers.word_times import NO_ALIGNER, TimedWord, for_aligner, timed_words
from gateway.errors import ApiError, in_own_terms, invalid
from gateway.http.connection import EventStream, StreamedResponse, admitted, key_of, owner_of, sse
from gateway.http.forms import page, read_json
from gateway.media.encode import AUDIO_MEDIA_TYPES, BYTES_PER_SAMPLE, AudioStream
from gateway.pipeline.events import AudioDelta, Finished
from gateway.pipeline.run import Job, run, speech
from gateway.pipeline.sampling import TalkerSampling
from gateway.pipeline.sentences import cut
from gateway.pipeline.stage import Stage
from gateway.pipeline.typed_text import TypedText
from gateway.validation import Listed, NotNegative, Strict, ignoring
from quartet.v1 import talker_pb2

MEDIA_TYPES = {**AUDIO_MEDIA_TYPES, "pcm": "audio/pcm"}

router = APIRouter(tags=["speech"])


class SpeechOptions(Strict):
    """Settings per stage that OpenAI's API lacks."""

    talker: TalkerSampling = Field(default_factory=TalkerSampling)


class SpeechSettings(VoiceOptions):
    """Voice, format and speed of the speech."""

    model: str | None = Field(default=None, description="default, or a name of OpenAI's: the model that speaks")
    response_format: Literal["mp3", "opus", "aac", "flac", "wav", "pcm"] = Field(
        default="mp3", description="pcm: mono, 16 bit, little-endian, at the model's sample_rate_hz"
    )
    speed: Annotated[float, Field(ge=0.25, le=4)] = Field(default=1.0, description="of the speech; its pitch stays")
    seed: NotNegative | None = Field(default=None, description="of the speech; default: a random one")
    quartet: SpeechOptions = Field(default_factory=SpeechOptions)


class CreateSpeechRequest(ignoring(SpeechSettings, *harmless.SPEECH)):
    """A text to be spoken."""

    input: str = Field(description="what is said; control tokens of the model are read as plain text")
    stream_format: Literal["audio", "sse"] = Field(default="audio", description="sse: OpenAI's speech.audio events")
    timestamp_granularities: Listed[Literal["word"]] | None = Field(
        default=None, description="only with sse: events with the times of words, by an aligner"
    )
    volume_multiplier: Annotated[float, Field(ge=1, le=1)] | None = Field(
        default=None, description="accepted if it is 1: the speech is as loud as the model makes it"
    )


_ANSWERED = (*MEDIA_TYPES.values(), "text/event-stream")
_OPENAPI = page(CreateSpeechRequest, "the audio, as it is made; or its events", answered=_ANSWERED)


@router.post("/v1/audio/speech", openapi_extra=_OPENAPI)
async def speak(http: Request, gateway: Annotated[Gateway, Depends(admitted)]) -> Response:
    """Speaks a text."""
    limit_s = gateway.settings.request_timeout_s
    request = await read_json(http, CreateSpeechRequest)
    speech_run = await SpeechRun.begin(gateway, request, http)
    if request.timestamp_granularities:
        if request.stream_format != "sse":
            raise invalid("timestamp_granularities", "only with stream_format sse: a file has no place for them")
        speech_run.find_words()
    pieces = speech_run.cut(request.input)
    if request.stream_format == "sse":
        return EventStream(_events(speech_run, pieces), limit_s, speech_run.headers)
    headers = {**speech_run.headers, "x-accel-buffering": "no"}
    media_type = MEDIA_TYPES[request.response_format]
    return StreamedResponse(speech_run.file(pieces), limit_s, media_type, headers)


async def _events(speech_run: "SpeechRun", pieces: Sequence[str]) -> AsyncGenerator[bytes, None]:
    """OpenAI's events. Raises ApiError."""
    async with aclosing(speech_run.file(pieces)) as made:
        async for piece in made:
            yield sse({"type": "speech.audio.delta", "audio": pybase64.b64encode_as_string(piece)})
            if words := speech_run.take_words():
                yield sse({"type": "speech.audio.words", "words": words})
    if words := speech_run.take_words():
        yield sse({"type": "speech.audio.words", "words": words})
    yield sse({"type": "speech.audio.done", "usage": speech_run.usage})


class SpeechRun:
    """The speech of one text, which the request calls `text`; `begin` makes it.

    Raises:
        ApiError: 400, there is no room for the text.
    """

    def __init__(self, gateway: Gateway, settings: SpeechSettings, plan: SpeakPlan, meter: Meter, text: str) -> None:
        self._gateway, self._settings, self._meter = gateway, settings, meter
        # This request's names of members that errors name as a chat's.
        self._start, self._names = plan.start, {"audio.voice": "voice", "messages": text, "file": text, **plan.names}
        self._start.sampling.CopyFrom(talker_sampling(gateway, settings.quartet.talker, settings.seed))
        code2wav = gateway.catalog.info("code2wav")
        self.sample_rate_hz: int = code2wav.sample_rate_hz
        self._most_bytes = plan.most_bytes(gateway.catalog.info("talker"), code2wav)
        self.headers = {"x-quartet-sample-rate-hz": str(self.sample_rate_hz)}
        if plan.voice:
            self.headers["x-quartet-voice"] = plan.voice
        self._audio_bytes, self._spoken = 0, list[talker_pb2.SpeakSummary]()
        self._aligner: Stage | None = None
        self._words = list[TimedWord]()
        meter.log |= {"format": settings.response_format, **plan.log}

    @classmethod
    async def begin(cls, gateway: Gateway, settings: SpeechSettings, http: HTTPConnection, text: str = "input") -> Self:
        """Raises ApiError: the talker cannot speak so."""
        meter = Meter(http.state.request_id, gateway.settings.request_timeout_s, http.state.log, key=key_of(http))
        gateway.catalog.stage_for("speech", gateway.catalog.meant(settings.model, "speech"))
        talker = gateway.catalog.info("talker")
        if not talker.reads_text:
            raise invalid("model", "its talker reads what its thinker writes only", "unsupported_model")
        return cls(gateway, settings, await plan_speech(gateway, settings, talker, owner_of(http)), meter, text)

    def cut(self, text: str) -> list[str]:
        """The pieces to speak. Raises ApiError: 400, the text cannot be spoken."""
        self.check_length("input", len(text))
        pieces = cut(text, self._most_bytes)
        if not pieces:
            raise nothing_to_say("input")
        return pieces

    def check_length(self, param: str, characters: int) -> None:
        """Raises ApiError: 400, too much text."""
        most = self._gateway.settings.max_speech_characters
        if characters > most:
            reason = f"has {characters} characters; at most {most} are spoken"
            raise invalid(param, reason, "string_above_max_length")

    def find_words(self) -> None:
        """From now on, has the words of each piece found. Raises ApiError: 400, there is no aligner."""
        self._aligner = self._gateway.pipeline.output("words")
        if self._aligner is None:
            raise invalid("timestamp_granularities", f"{NO_ALIGNER}, or leave them out", "unsupported_model")

    def take_words(self) -> list[dict[str, Any]]:
        """Those that were found since the last call, in OpenAI's form, with their times in the file."""
        words, self._words = self._words, []
        speed = self._settings.speed
        return [replace(each, begin_s=each.begin_s / speed, end_s=each.end_s / speed).verbose() for each in words]

    @property
    def usage(self) -> dict[str, int]:
        read, made = sum(piece.text_tokens for piece in self._spoken), sum(piece.frames for piece in self._spoken)
        return {"input_tokens": read, "output_tokens": made, "total_tokens": read + made}

    @property
    def seconds(self) -> float:
        """Of the sound so far."""
        return self._audio_bytes / BYTES_PER_SAMPLE / self.sample_rate_hz

    @property
    def finish_reason(self) -> str:
        """Whether the talker's limit of frames ended a piece, in OpenAI's words."""
        return "length" if any(piece.end == talker_pb2.SPEECH_END_LENGTH for piece in self._spoken) else "stop"

    async def file(self, pieces: Sequence[str | TypedText]) -> AsyncGenerator[bytes, None]:
        """Yields the audio of one piece of text after the other. Raises ApiError."""
        form = "pcm16" if self._settings.response_format == "pcm" else self._settings.response_format
        stream = AudioStream(self.sample_rate_hz, form, self._settings.speed)
        try:
            for i, piece in enumerate(pieces):
                async with aclosing(self._samples(piece, "" if len(pieces) == 1 else f"-{i}")) as samples:
                    async for pcm16 in samples:
                        if ready := await asyncio.to_thread(stream.add, pcm16):
                            yield ready
        finally:  # the stages' work counts, if the client is gone, too
            self._meter.owe(self.seconds)
        if rest := await asyncio.to_thread(stream.close):
            yield rest
        metrics.spoken(self.seconds, self._meter.elapsed_s)
        usage = self.usage
        tokens = {"text_tokens": usage["input_tokens"], "frames": usage["output_tokens"]}
        self._meter.log |= {**tokens, "finish_reason": self.finish_reason}

    async def _samples(self, piece: str | TypedText, suffix: str) -> AsyncGenerator[bytes, None]:
        """Yields PCM16."""
        start, typed = deepcopy(self._start), None
        if isinstance(piece, TypedText):
            typed = piece
        else:
            start.text.text = piece
        request_id, begin_s, sound = f"{self._meter.request_id}{suffix}", self.seconds, bytearray()
        job = Job(request_id, speech(start), text=typed)
        with in_own_terms(lambda member: self._names.get(member, member)):
            async with aclosing(run(self._gateway.pipeline, [job], self._meter.left_s)) as events:
                async for _, event in events:
                    if isinstance(event, AudioDelta):
                        self._meter.observe(event)
                        self._audio_bytes += len(event.pcm16)
                        if self._aligner is not None:
                            sound += event.pcm16
                        yield event.pcm16
                    elif isinstance(event, Finished) and event.talker is not None:
                        self._spoken.append(event.talker)
            if self._aligner is not None and self.seconds - begin_s <= _longest_s(self._aligner):
                rest = self._aligner, request_id, start.text.text, begin_s
                self._words += await self._words_of(bytes(sound), *rest)

    async def _words_of(
        self, sound: bytes, aligner: Stage, request_id: str, text: str, begin_s: float
    ) -> list[TimedWord]:
        """Of a piece that begins at `begin_s`. Raises StageError."""
        pcm16 = await asyncio.to_thread(for_aligner, sound, self.sample_rate_hz)
        return await timed_words(aligner, request_id, pcm16, text, "", self._meter.left_s, begin_s)


def _longest_s(aligner: Stage) -> float:
    """The longest sound that it takes."""
    return aligner.info.aligner.max_audio_s if aligner.info is not None else 0.0


def nothing_to_say(param: str) -> ApiError:
    return invalid(param, "has no letter and no digit: there is nothing to say")
