"""Requests of a client, each with the events that answer it.

`run` sends events until the answer is whole, and raises RequestError. `end` has the events that come last, after an
error too: Home Assistant passes over an `error`, and waits for these.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import Protocol

from wyoming.asr import Transcribe, Transcript, TranscriptChunk, TranscriptStart, TranscriptStop
from wyoming.audio import AudioChunk, AudioStart, AudioStop
from wyoming.event import Event
from wyoming.tts import Synthesize, SynthesizeStart, SynthesizeStopped, SynthesizeVoice

from cli.http import given
from cli.wyoming.gateway_client import GatewayClient, Piece, RequestError
from cli.wyoming.known_offer import Offer
from cli.wyoming.sound import Recording

MAX_CHARACTERS = 1_000_000  # that wait to be sent; the gateway has a limit of its own
_BYTES_PER_SAMPLE = 2
Send = Callable[[Event], Awaitable[None]]


class Answer(Protocol):
    """Attributes: kind: for logs. seconds: of sound heard or made."""

    kind: str
    seconds: float

    async def run(self, gateway: GatewayClient, offer: Offer, send: Send) -> None: ...

    def end(self) -> list[Event]: ...


class Transcription:
    kind = "transcription"

    def __init__(self, asked: Transcribe, sound: Recording) -> None:
        """Raises RequestError."""
        self._form = given(
            model=_text("name", asked.name),
            language=_text("language", asked.language),
            prompt=_hints(asked),
        )
        self._sound, self._said = sound, ""
        self.seconds = sound.seconds

    async def run(self, gateway: GatewayClient, offer: Offer, send: Send) -> None:
        if offer.hears is None:
            raise RequestError("the server has no model that hears", "unsupported")
        has_begun = False
        async with aclosing(gateway.transcript({"model": offer.hears, **self._form}, self._sound.wav())) as events:
            async for event in events:
                if not has_begun:
                    await send(TranscriptStart(language=self._form.get("language")).event())
                    has_begun = True
                if event["type"] == "transcript.text.delta":
                    await send(TranscriptChunk(event["delta"]).event())
                elif event["type"] == "transcript.text.done":
                    self._said = event["text"]

    def end(self) -> list[Event]:
        return [Transcript(self._said, language=self._form.get("language")).event(), TranscriptStop().event()]


class _Spoken:
    """Args: voice: None: the model's first."""

    def __init__(self, voice: SynthesizeVoice | None, text_format: object) -> None:
        """Raises RequestError."""
        if text_format not in (None, "text"):
            raise RequestError("text_format: only text is spoken; send it without marks", "invalid")
        if voice is not None:
            _text("voice.name", voice.name)
            _text("voice.language", voice.language)
        self._voice = voice
        self.seconds = 0.0

    async def _play(self, pieces: AsyncGenerator[Piece, None], send: Send) -> None:
        async with aclosing(pieces):
            async for rate, pcm in pieces:
                if not self.seconds:
                    await send(AudioStart(rate, _BYTES_PER_SAMPLE, 1).event())
                self.seconds += len(pcm) / _BYTES_PER_SAMPLE / rate
                await send(AudioChunk(rate, _BYTES_PER_SAMPLE, 1, pcm).event())


class WholeSpeech(_Spoken):
    kind = "speech"

    def __init__(self, asked: Synthesize) -> None:
        """Raises RequestError."""
        super().__init__(asked.voice, asked.text_format)
        self._words = _text("text", asked.text)

    async def run(self, gateway: GatewayClient, offer: Offer, send: Send) -> None:
        await self._play(gateway.speech({**offer.speech(self._voice), "input": self._words}), send)

    def end(self) -> list[Event]:
        return [AudioStop().event()]


class TypedSpeech(_Spoken):
    """WholeSpeech of a text that is still being written: `add` and `finish` may come while `run` does."""

    kind = "typed speech"

    def __init__(self, asked: SynthesizeStart) -> None:
        """Raises RequestError."""
        super().__init__(asked.voice, asked.text_format)
        self._texts: asyncio.Queue[str | RequestError | None] = asyncio.Queue()
        self._characters = 0

    def add(self, text: str) -> None:
        """Raises RequestError."""
        _text("text", text)
        if not text or self._characters > MAX_CHARACTERS:
            return
        self._characters += len(text)
        if self._characters > MAX_CHARACTERS:
            self._texts.put_nowait(RequestError(f"text: more than {MAX_CHARACTERS} characters", "too_large"))
        else:
            self._texts.put_nowait(text)

    def finish(self) -> None:
        self._texts.put_nowait(None)

    async def run(self, gateway: GatewayClient, offer: Offer, send: Send) -> None:
        await self._play(gateway.speech_of(offer.speech(self._voice), self._written()), send)

    async def _written(self) -> AsyncIterator[str]:
        while (text := await self._texts.get()) is not None:
            if isinstance(text, RequestError):
                raise text
            yield text

    def end(self) -> list[Event]:
        return [*([AudioStop().event()] if self.seconds else ()), SynthesizeStopped().event()]


def _text(name: str, value: object) -> str | None:
    """Raises RequestError: it is no text, or one that UTF-8 cannot have."""
    if value is None:
        return None
    try:
        str.encode(value)  # type: ignore[arg-type]
    except (TypeError, UnicodeEncodeError):
        raise RequestError(f"{name}: must be a text of Unicode characters", "invalid") from None
    return value  # type: ignore[return-value]


def _hints(asked: Transcribe) -> str | None:
    """Names and terms that the sound may have."""
    words = [*(asked.transcript_names or ()), *(asked.transcript_terms or ())]
    return ", ".join(filter(None, (_text("transcript_names", word) for word in words))) or None
