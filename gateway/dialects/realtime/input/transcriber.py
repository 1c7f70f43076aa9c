"""Transcribes the user's sound, beside the answers to it."""

import asyncio
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import aclosing, nullcontext
from typing import Any

import structlog

from gateway.access.api_key import ApiKey
from gateway.answers.gateway import Gateway
from gateway.answers.transcription.audio_sources import FileSound, LiveSound
from gateway.answers.transcription.formats import joined
from gateway.answers.transcription.languages import language_of
from gateway.answers.transcription.request import TranscriptionRequest
from gateway.answers.transcription.run import TranscriptionRun
from gateway.answers.transcription.sound_transcripts import model_that_hears
from gateway.dialects.realtime.audio import MODEL_RATE_HZ
from gateway.dialects.realtime.conversation.items import Item
from gateway.dialects.realtime.events import new_id
from gateway.dialects.realtime.settings import session_config
from gateway.errors import ApiError, gateway_fault, in_own_terms
from gateway.listening.speech_windows import Pauses
from gateway.media.encode import encode_audio

log = structlog.get_logger()
_PART = 0  # of an item of the buffer's sound: its only one
_NO_TOKENS = {
    "type": "tokens",
    "input_tokens": 0,
    "output_tokens": 0,
    "total_tokens": 0,
    "input_token_details": {"audio_tokens": 0, "text_tokens": 0},
}


async def transcribe(
    gateway: Gateway,
    key: ApiKey | None,
    request: TranscriptionRequest,
    sound: FileSound | LiveSound,
    send_delta: Callable[[str], None],
) -> TranscriptionRun:
    """Transcribes one sound, as a request of its own in the stages and the log. Raises ApiError."""
    fields: dict[str, Any] = {"request_id": new_id("transcription")}
    try:
        # as of any request, the key's rate is counted last: what the gateway refuses does not use it up
        with in_own_terms(), gateway.admission.admit(), nullcontext() if key is None else key.request():
            work = TranscriptionRun(gateway, request, sound, fields["request_id"], fields, key)
            async with aclosing(work.deltas()) as deltas:
                async for delta in deltas:
                    send_delta(delta)
        return work
    except ApiError as error:
        fields |= error.log
        raise
    finally:
        log.info("realtime transcription", **fields)


class Transcriber:
    """Transcribes a session's items one after another. `send` takes an event's type and members."""

    def __init__(self, gateway: Gateway, send: Callable[..., None], key: ApiKey | None) -> None:
        self._gateway, self._send, self._key = gateway, send, key
        self._waiting: deque[tuple[Item, session_config.TranscriptionSettings, bool, bool]] = deque()
        self._working: asyncio.Task[None] | None = None

    def add(
        self, item: Item, settings: session_config.TranscriptionSettings, sound_is_kept: bool, is_counted: bool
    ) -> None:
        """Queues `item`, whose sound is dropped afterwards unless `sound_is_kept`. `is_counted`: it is a request."""
        waiting_bytes = sum(waiting.size_bytes for waiting, *_ in self._waiting)
        if waiting_bytes + item.size_bytes > self._gateway.settings.max_realtime_bytes:
            reason = "too much sound waits to be written down; send it more slowly"
            error = ApiError(429, reason, None, "transcription_queue_full", "rate_limit_error")
            self._event(item, "failed", **error.body())
            return
        self._waiting.append((item, settings, sound_is_kept, is_counted))
        if self._working is None or self._working.done():
            self._working = asyncio.create_task(self._work())

    @property
    def is_busy(self) -> bool:
        return self._working is not None and not self._working.done()

    def remove(self, item_id: str) -> None:
        self._waiting = deque(each for each in self._waiting if each[0].id != item_id)

    async def finish(self) -> None:
        """Returns when no item waits."""
        if self._working is not None:
            await asyncio.wait([self._working])

    async def close(self) -> None:
        self._waiting.clear()
        if self._working is not None:
            self._working.cancel()
            await asyncio.wait([self._working])

    async def _work(self) -> None:
        while self._waiting:
            item, settings, sound_is_kept, is_counted = self._waiting.popleft()
            try:
                await self._transcribe(item, settings, is_counted)
            except ApiError as error:
                self._event(item, "failed", **error.body())
            except Exception as error:  # a bug: the session goes on
                log.exception("transcription failed", item_id=item.id, exc_info=error)
                self._event(item, "failed", **gateway_fault().body())
            if not sound_is_kept:
                item.sound.clear()

    def _event(self, item: Item, kind: str, **members: Any) -> None:
        name = f"conversation.item.input_audio_transcription.{kind}"
        self._send(name, item_id=item.id, content_index=_PART, **members)

    async def _transcribe(self, item: Item, settings: session_config.TranscriptionSettings, is_counted: bool) -> None:
        def send_delta(delta: str) -> None:
            self._event(item, "delta", delta=delta)

        async with item.writing:
            known = item.content[_PART]["transcript"]  # the answer's thinker needed it before
            if known is not None:
                send_delta(known)
                self._event(item, "completed", transcript=known, usage=_NO_TOKENS)
                return
            work = await _written(self._gateway, item, _PART, settings, self._key, is_counted, send_delta)
            transcript = item.content[_PART]["transcript"]
        self._event(item, "completed", transcript=transcript, usage=work.usage)


async def transcribe_items(gateway: Gateway, items: Iterable[Item], key: ApiKey | None) -> None:
    """Writes down the sounds of `items`, each once: for a thinker that does not hear. Raises ApiError."""
    settings = session_config.TranscriptionSettings()
    for item in items:
        for part in list(item.sound) if item.role == "user" else ():
            async with item.writing:
                if item.content[part]["transcript"] is None:
                    await _written(gateway, item, part, settings, key, False, lambda _: None)


async def _written(
    gateway: Gateway,
    item: Item,
    part: int,
    settings: session_config.TranscriptionSettings,
    key: ApiKey | None,
    is_counted: bool,
    send_delta: Callable[[str], None],
) -> TranscriptionRun:
    """Writes down the sound of a part of `item`, which then has the transcript. `is_counted`: as a request of `key`.

    Raises ApiError.
    """
    model = model_that_hears(gateway)
    hints = {"prompt": settings.prompt, "keywords": settings.keywords}
    request = TranscriptionRequest(model=model, language=_language(settings.only_language), **hints)
    file = await asyncio.to_thread(encode_audio, item.sound[part], MODEL_RATE_HZ, "wav")
    sounds, limit_s = gateway.fetcher.decoding.sounds, gateway.settings.request_timeout_s
    sound = FileSound(sounds, file, Pauses(), limit_s, owner=key and key.name)
    work = await transcribe(gateway, key if is_counted else None, request, sound, send_delta)
    item.content[part]["transcript"] = joined(work.segments)
    return work


def _language(code: str | None) -> str | None:
    """The language's name; None if it is unknown: a client's default must not end its session."""
    try:
        return None if code is None else language_of(code)
    except ValueError:
        return None
