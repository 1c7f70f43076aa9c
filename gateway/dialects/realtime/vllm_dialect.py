"""vLLM's dialect of `/v1/realtime`: transcribes sound while the client sends it.

A `session.update` with `model` and without `session` chooses this dialect. Source: vLLM 0.32's
`vllm/entrypoints/openai/realtime`.
"""

import asyncio
from typing import Any

import structlog

from gateway.access.api_key import ApiKey
from gateway.answers.gateway import Gateway
from gateway.answers.transcription.audio_sources import LiveSound
from gateway.answers.transcription.formats import joined
from gateway.answers.transcription.request import TranscriptionRequest
from gateway.dialects.realtime import events
from gateway.dialects.realtime.conversation.items import decode_base64
from gateway.dialects.realtime.events import RealtimeError
from gateway.dialects.realtime.input.transcriber import transcribe
from gateway.dialects.realtime.output.outbox import Outbox
from gateway.errors import ApiError, gateway_fault
from gateway.listening.speech_windows import Pauses

_MOST_WAITING_S = 900  # of sound
log = structlog.get_logger()


class VllmDialect:
    """Handles one session. A commit starts a transcription; a final one also ends the sound."""

    def __init__(self, gateway: Gateway, outbox: Outbox, key: ApiKey | None) -> None:
        self._gateway, self._outbox, self._key = gateway, outbox, key
        self._model: str | None = None
        self._sound = self._new_sound()  # takes what the client sends
        self._work: asyncio.Task[None] | None = None
        self._transcribed: LiveSound | None = None  # by `_work`

    @property
    def is_busy(self) -> bool:
        """Whether it works for the client."""
        return self._work is not None and not self._work.done()

    async def handle(self, event: events.ClientEvent) -> None:
        match event:
            case events.ModelUpdate(model=model):
                self._model = self._gateway.catalog.meant(model, "realtime")
                self._gateway.catalog.stage_for("text", self._model, takes_loras=True)
            case events.AudioAppend(audio=audio):
                if self._sound.waiting_s >= _MOST_WAITING_S:
                    reason = f"{_MOST_WAITING_S} s of sound wait to be written down, the most; send it later"
                    raise events.wrong("audio", reason, "input_audio_buffer_full")
                self._sound.add(await events.in_thread_if_long(len(audio), lambda: decode_base64(audio, "audio")))
            case events.AudioCommit():
                self._commit((event.model_extra or {}).get("final") is True)
            case _:
                reason = f"{event.type} is not known after a session.update without `session`"
                raise events.wrong("type", reason, "unknown_event")

    async def finish(self) -> None:
        """Returns when the sound that the client has committed is transcribed."""
        self._sound.end()
        if self._work is not None:
            await asyncio.wait([self._work])

    async def close(self) -> None:
        if self._work is not None:
            self._work.cancel()
            await asyncio.wait([self._work])

    def error_event(self, error: ApiError, event_id: str | None = None) -> dict[str, Any]:
        return {"type": "error", "error": error.message, "code": error.code or "invalid_value"}

    def _commit(self, is_final: bool) -> None:
        if self._transcribed is not self._sound:
            if self._work is not None and not self._work.done():
                message = "the sound before is still being written down; wait for transcription.done"
                raise RealtimeError("transcription_in_progress", message)
            self._transcribed = self._sound
            self._work = asyncio.create_task(self._transcribe(self._sound))
        if is_final:
            self._sound.end()
            self._sound = self._new_sound()

    def _new_sound(self) -> LiveSound:
        owner = self._key and self._key.name
        return LiveSound(Pauses(), self._gateway.settings.request_timeout_s, owner)

    async def _transcribe(self, sound: LiveSound) -> None:
        request = TranscriptionRequest(model=self._model)
        try:
            work = await transcribe(self._gateway, self._key, request, sound, self._send_delta)
        except ApiError as error:
            self._fail(sound, error)
        except Exception as error:  # a bug: the session goes on
            log.exception("transcription failed", exc_info=error)
            self._fail(sound, gateway_fault())
        else:
            prompt, completion = work.usage["input_tokens"], work.usage["output_tokens"]
            usage = {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
            self._outbox.put({"type": "transcription.done", "text": joined(work.segments), "usage": usage})

    def _send_delta(self, delta: str) -> None:
        self._outbox.put({"type": "transcription.delta", "delta": delta})

    def _fail(self, sound: LiveSound, error: ApiError) -> None:
        self._outbox.put(self.error_event(error))
        if self._sound is sound:  # further sound is another transcription's
            self._sound = self._new_sound()
