"""Plays what a realtime session makes, and says it in the Live API's events."""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pybase64

from gateway.dialects.live.clock import SessionClock
from gateway.dialects.live.delegations import Delegations
from gateway.dialects.live.events import error_event
from gateway.dialects.live.readers import Readers
from gateway.dialects.live.session_config import LiveFormat
from gateway.dialects.live.sound import AnswerSound
from gateway.dialects.live.transcripts import LiveTranscripts
from gateway.dialects.realtime.conversation.conversation import Conversation
from gateway.dialects.realtime.events import RealtimeError
from gateway.dialects.realtime.settings.session_config import PCM_RATE_HZ
from gateway.errors import ApiError
from gateway.media.encode import BYTES_PER_SAMPLE
from gateway.pacing.pacer import SILENCE, Pacer

FRAME_MS, AHEAD_MS = 100, 200
_MOST_QUEUED_MS = 60_000  # beyond, the pipeline waits: what is not heard for long may never be
# Of silence behind an answer, by which clients tell that it is over: LiveKit's by 0.8 s, pipecat's by 0.35 s.
_TAIL_MS = 900
FIXTURE = "fixture"  # the item of the client's own sound
_BYTES_PER_MS = PCM_RATE_HZ // 1000 * BYTES_PER_SAMPLE


class LiveOutput:
    """The sink of a realtime session's events, and the playback of its answers.

    Attributes:
        conversation: of the session; what is cut is cut there, too.
    """

    conversation: Conversation

    def __init__(
        self, readers: Readers, clock: SessionClock, audio_format: LiveFormat, delegations: Callable[..., Delegations]
    ) -> None:
        self._readers, self._clock, self._encoder = readers, clock, AnswerSound(audio_format)
        self.room = asyncio.Event()
        self.room.set()
        self.pacer = Pacer(self._play, PCM_RATE_HZ, FRAME_MS, AHEAD_MS, fills_gaps=True)
        self.transcripts = LiveTranscripts(readers.put)
        self.delegations = delegations(readers.put, lambda: clock.now_ms, self.transcripts.after_user)
        self._turn_begins: dict[str, int] = {}
        self._cut = set[str]()  # items, of which more may come still

    @property
    def is_playing(self) -> bool:
        return self.pacer.is_playing

    def put(self, event: dict[str, Any], /) -> None:
        """Takes an event of the realtime session."""
        self.delegations.take(event)
        if event.get("item_id") in self._cut and event["type"].startswith("response.output_audio"):
            return
        match event:
            case {"type": "response.output_audio.delta", "item_id": item_id, "delta": delta}:
                pcm16 = pybase64.b64decode(delta)
                self.transcripts.sound(item_id, len(pcm16) / _BYTES_PER_MS)
                self.pacer.add(item_id, pcm16)
                self._measure()
            case {"type": "response.output_audio_transcript.delta", "item_id": item_id, "delta": delta}:
                self.transcripts.text(item_id, delta)
            case {"type": "response.output_audio_transcript.done", "item_id": item_id, "transcript": transcript}:
                self._end(item_id, transcript)
            case {"type": "input_audio_buffer.speech_started", "item_id": item_id, "audio_start_ms": start_ms}:
                self._turn_begins = {item_id: self._clock.heard_ms(start_ms)}
            case {"type": "input_audio_buffer.speech_stopped", "item_id": item_id, "audio_end_ms": end_ms}:
                end_ms = self._clock.heard_ms(end_ms)
                self.transcripts.turn(item_id, self._turn_begins.pop(item_id, end_ms), end_ms)
            case {"type": "conversation.item.input_audio_transcription.delta", "item_id": item_id, "delta": delta}:
                self.transcripts.user(item_id, delta)
            case {
                "type": "conversation.item.input_audio_transcription.completed"
                | "conversation.item.input_audio_transcription.failed",
                "item_id": item_id,
            }:
                self.transcripts.settle(item_id)
            case {"type": "response.created"}:
                self._cut.clear()
            case {"type": "response.done", "response": {"status": "failed", "status_details": {"error": error}}}:
                failure = ApiError(500, error["message"], None, error["code"] or "server_error", error["type"])
                self._readers.put(error_event(failure))
            case _:
                pass

    def cut(self) -> None:
        """Drops what was not played. The conversation keeps what was heard, and the client reads that."""
        for cut in self.pacer.clear():
            if cut.item_id == FIXTURE:
                continue
            self._cut.add(cut.item_id)
            with suppress(RealtimeError):  # the item is not in the conversation, which is full
                self.conversation.truncate(cut.item_id, 0, cut.played_ms)
            item = self.conversation.find(cut.item_id)
            words = () if item is None else item.words
            read = self.transcripts.cut(cut.item_id, words, cut.played_ms, self._plays_until_ms)
            if read is not None and item is not None and item.content:
                item.content[0]["transcript"] = read
        self._be_silent()
        self._measure()

    async def played(self) -> None:
        """Returns when all that was made has left."""
        done = asyncio.Event()
        self.pacer.mark(done.set)
        await done.wait()

    @property
    def _plays_until_ms(self) -> int:
        return self._clock.at_ms(self.pacer.plays_until)

    def _end(self, item_id: str, transcript: str) -> None:
        """All of an answer is there. `transcript`: of one that was cut short before it was heard, the rest."""
        if not self.transcripts.complete(item_id, transcript):
            return
        self.pacer.end(item_id)
        self.pacer.mark(lambda: self.transcripts.finish(item_id, self._plays_until_ms))
        self._be_silent()

    def _be_silent(self) -> None:
        self.pacer.add(SILENCE, bytes(_TAIL_MS * _BYTES_PER_MS))
        self.pacer.end(SILENCE)

    def _play(self, item_id: str, pcm16: bytes) -> None:
        """Takes a frame of the pacer's."""
        end_ms = self._plays_until_ms
        self._readers.put_sound(self._encoder.encode(pcm16), end_ms - FRAME_MS, end_ms)
        if item_id not in (SILENCE, FIXTURE):
            item = self.conversation.find(item_id)
            words = () if item is None else item.words
            self.transcripts.played(item_id, words, self.pacer.released_ms(item_id), end_ms - FRAME_MS, end_ms)
        self._measure()

    def _measure(self) -> None:
        if self.pacer.queued_ms < _MOST_QUEUED_MS:
            self.room.set()
        else:
            self.room.clear()
