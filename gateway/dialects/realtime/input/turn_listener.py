"""Commits and answers the user's turns where the server detects them.

A short pause starts a speculative answer. It is released if the turn ends there, and discarded if the user goes on.
"""

import time
from typing import Protocol

import numpy as np

from gateway import metrics
from gateway.dialects.realtime.conversation.items import Item, spoken
from gateway.dialects.realtime.events import RealtimeError, new_id
from gateway.dialects.realtime.input.input_buffer import InputBuffer
from gateway.dialects.realtime.input.turn_detector import (
    IdleTimeout,
    Pause,
    Resumption,
    SpeechEnd,
    SpeechStart,
    TurnDetector,
    TurnEvent,
)
from gateway.dialects.realtime.output.responses import Response
from gateway.dialects.realtime.settings.session import Session
from gateway.dialects.realtime.settings.session_config import SemanticVad, ServerVad
from gateway.listening.detector import STEP_MS
from gateway.listening.turn_model import TurnModel

_MOST_SPECULATIONS = 3  # in one turn: who pauses so often will pause again
_MORE_KEPT_MS = 1000  # of sound in which nobody speaks, beyond what may become part of a turn


class SpeechDetector(Protocol):
    """Estimates the probability of speech. `heard_ms`: end of the sound that it has processed."""

    heard_ms: float

    async def add(self, samples: np.ndarray) -> list[float]:
        """Takes (n,) int16 at 16 kHz. Returns a probability for each 32 ms that they complete."""
        ...

    def close(self) -> None: ...


class VoiceSession(Protocol):
    """What a listener uses of its session."""

    session: Session
    buffer: InputBuffer

    @property
    def active(self) -> Response | None: ...
    @property
    def may_speculate(self) -> bool: ...
    @property
    def turn_model(self) -> TurnModel | None: ...
    def send(self, kind: str, /, **members: object) -> None: ...
    def commit(self, item: Item) -> None: ...
    def respond(self, *, after: Item | None = None, speculative: bool = False) -> Response: ...


class TurnListener:
    def __init__(self, session: VoiceSession, detector: SpeechDetector, rules: ServerVad | SemanticVad) -> None:
        self._session, self._detector, self._rules = session, detector, rules
        self._turns, self._heard_ms = TurnDetector(rules, detector.heard_ms), detector.heard_ms
        self._start_ms, self._id, self._speculations = 0, "", 0
        self._item: Item | None = None
        self._speculative: Response | None = None

    def use(self, rules: ServerVad | SemanticVad) -> None:
        self._rules = rules
        self._turns.use(rules)

    async def listen(self, samples: np.ndarray) -> None:
        """Processes all of `samples`. Raises RealtimeError: a turn could not be committed."""
        refusal: RealtimeError | None = None
        for probability in await self._detector.add(samples):
            self._heard_ms += STEP_MS
            for event in self._turns.add(probability, self._heard_ms):
                try:
                    await self._handle(event)
                except RealtimeError as error:
                    refusal = refusal or error
        if not self._turns.speaking:
            self._session.buffer.drop_before(self._heard_ms - self._turns.padding_ms - _MORE_KEPT_MS)
        if refusal is not None:
            raise refusal

    async def discard_speculation(self) -> None:
        """Drops the speculative answer, as its input has changed. The end of the turn starts another."""
        response, self._speculative = self._speculative, None
        if response is not None:
            metrics.SPECULATIONS.labels("wasted").inc()
            await response.drop()

    def close(self) -> None:
        self._detector.close()

    async def reset_turn(self) -> None:
        """Starts over after the client has committed or cleared the sound."""
        await self._discard_item()
        self._turns.clear(self._heard_ms)

    def idle_from(self, after_s: float | None) -> None:
        """Counts the idle timeout from `after_s` on, when the answer's playback ends; None: stops counting."""
        self._turns.idle_from(None if after_s is None else self._heard_ms + after_s * 1000)

    async def _handle(self, event: TurnEvent) -> None:
        match event:
            case SpeechStart(start_ms):
                self._start_ms, self._id, self._speculations = start_ms, new_id("item"), 0
                self._session.send("input_audio_buffer.speech_started", audio_start_ms=start_ms, item_id=self._id)
                active = self._session.active
                if active is not None and self._rules.interrupt_response:
                    metrics.BARGE_INS.inc()
                    await active.cancel("turn_detected")
            case Pause(end_ms):
                self._item = self._cut(end_ms)
                self._speculate(self._item)
                if self._session.turn_model is not None and isinstance(self._rules, SemanticVad):
                    sound = np.frombuffer(self._item.sound[0], "<i2")
                    self._turns.judge(await self._session.turn_model.is_complete(sound))
            case Resumption():
                await self._discard_item()
            case SpeechEnd(end_ms, cut_ms):
                self.idle_from(None)  # an answer that was interrupted is over
                self._session.send("input_audio_buffer.speech_stopped", audio_end_ms=end_ms, item_id=self._id)
                await self._commit(self._item or self._cut(cut_ms), cut_ms)
            case IdleTimeout(start_ms, end_ms) if self._session.active is None:
                self._start_ms, self._id = start_ms, new_id("item")
                times = {"audio_start_ms": start_ms, "audio_end_ms": end_ms}
                self._session.send("input_audio_buffer.timeout_triggered", **times, item_id=self._id)
                await self._commit(self._cut(end_ms), end_ms)

    def _speculate(self, item: Item) -> None:
        if not self._rules.create_response or self._session.active is not None:
            return
        if self._speculations < _MOST_SPECULATIONS and self._session.may_speculate:
            self._speculations += 1
            self._speculative = self._session.respond(after=item, speculative=True)

    async def _commit(self, item: Item, cut_ms: float) -> None:
        if self._speculative is not None and self._speculative.status == "failed":
            await self.discard_speculation()  # refused, for a load that may be over
        self._item = None
        self._session.buffer.drop_before(cut_ms)
        try:
            self._session.commit(item)
        except BaseException:
            await self.discard_speculation()
            raise
        response, self._speculative = self._speculative, None
        if response is not None:
            metrics.SPECULATIONS.labels("used").inc()
            metrics.SPECULATION_SAVED.observe(response.head_start_s)
            await response.release()
            if self._session.active is None:  # it was complete before its release
                self.idle_from(max(0.0, response.played_at - time.monotonic()))
        elif self._rules.create_response and self._session.active is None:
            self._session.respond()

    def _cut(self, end_ms: float) -> Item:
        return spoken(self._session.buffer.between(self._start_ms, end_ms), self._id)

    async def _discard_item(self) -> None:
        self._item = None
        await self.discard_speculation()
