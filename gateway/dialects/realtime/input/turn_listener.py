"""The user's turns where the server finds them: the sound is listened to, committed and answered.

An answer is begun in a short pause, and held back until the silence shows that the turn has ended there: a speculative
turn. If the user goes on, it is dropped.
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
    Paused,
    Resumed,
    SpeechStarted,
    SpeechStopped,
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


class Detector(Protocol):
    """What says how probable speech is. `heard_ms`: time until which it has heard."""

    heard_ms: float

    async def add(self, samples: np.ndarray) -> list[float]:
        """Of each 32 ms that these samples, (n,) int16, 16 kHz, complete."""
        ...

    def close(self) -> None: ...


class Turns(Protocol):
    """The session, as far as turns concern it."""

    session: Session
    buffer: InputBuffer

    @property
    def active(self) -> Response | None: ...
    @property
    def may_speculate(self) -> bool: ...
    @property
    def turn_model(self) -> TurnModel | None: ...
    def tell(self, kind: str, /, **members: object) -> None: ...
    def commit(self, item: Item) -> None: ...
    def respond(self, *, after: Item | None = None, held: bool = False) -> Response: ...


class Listening:
    """One session's ear.

    Args:
        turns: the session.
        detector: new.
        rules: how turns end.
    """

    def __init__(self, turns: Turns, detector: Detector, rules: ServerVad | SemanticVad) -> None:
        self._session, self._detector, self._rules = turns, detector, rules
        self._turns, self._heard_ms = TurnDetector(rules, detector.heard_ms), detector.heard_ms
        self._start_ms, self._id, self._speculations = 0, "", 0
        self._item: Item | None = None
        self._early: Response | None = None

    def use(self, rules: ServerVad | SemanticVad) -> None:
        """Other rules from now on."""
        self._rules = rules
        self._turns.use(rules)

    async def hear(self, samples: np.ndarray) -> None:
        """The next samples. Raises RealtimeError: a turn could not be committed; all was heard."""
        refusal: RealtimeError | None = None
        for probability in await self._detector.add(samples):
            self._heard_ms += STEP_MS
            for event in self._turns.add(probability, self._heard_ms):
                try:
                    await self._happened(event)
                except RealtimeError as error:
                    refusal = refusal or error
        if not self._turns.speaking:
            self._session.buffer.forget_before(self._heard_ms - self._turns.padding_ms - _MORE_KEPT_MS)
        if refusal is not None:
            raise refusal

    async def void(self) -> None:
        """The client changes what an answer that was begun in a pause goes by: it is made anew at the turn's end."""
        early, self._early = self._early, None
        if early is not None:
            metrics.SPECULATIONS.labels("wasted").inc()
            await early.drop()

    def close(self) -> None:
        """Hears no more."""
        self._detector.close()

    async def forget(self) -> None:
        """The client has committed the sound itself, or thrown it away."""
        await self._drop()
        self._turns.clear(self._heard_ms)

    def idle_from(self, after_s: float | None) -> None:
        """The user has heard the last answer in so many seconds; None: something else has begun."""
        self._turns.idle_from(None if after_s is None else self._heard_ms + after_s * 1000)

    async def _happened(self, event: TurnEvent) -> None:
        match event:
            case SpeechStarted(start_ms):
                self._start_ms, self._id, self._speculations = start_ms, new_id("item"), 0
                self._session.tell("input_audio_buffer.speech_started", audio_start_ms=start_ms, item_id=self._id)
                active = self._session.active
                if active is not None and self._rules.interrupt_response:
                    metrics.BARGE_INS.inc()
                    await active.cancel("turn_detected")
            case Paused(end_ms):
                self._item = self._cut(end_ms)
                self._speculate(self._item)
                if self._session.turn_model is not None and isinstance(self._rules, SemanticVad):
                    sound = np.frombuffer(self._item.sound[0], "<i2")
                    self._turns.judge(await self._session.turn_model.is_complete(sound))
            case Resumed():
                await self._drop()
            case SpeechStopped(end_ms, cut_ms):
                self.idle_from(None)  # an answer that was interrupted is over
                self._session.tell("input_audio_buffer.speech_stopped", audio_end_ms=end_ms, item_id=self._id)
                await self._commit(self._item or self._cut(cut_ms), cut_ms)
            case IdleTimeout(start_ms, end_ms) if self._session.active is None:
                self._start_ms, self._id = start_ms, new_id("item")
                times = {"audio_start_ms": start_ms, "audio_end_ms": end_ms}
                self._session.tell("input_audio_buffer.timeout_triggered", **times, item_id=self._id)
                await self._commit(self._cut(end_ms), end_ms)

    def _speculate(self, item: Item) -> None:
        """Begins the answer, if the turn may end with `item`."""
        if not self._rules.create_response or self._session.active is not None:
            return
        if self._speculations < _MOST_SPECULATIONS and self._session.may_speculate:
            self._speculations += 1
            self._early = self._session.respond(after=item, held=True)

    async def _commit(self, item: Item, cut_ms: float) -> None:
        if self._early is not None and self._early.status == "failed":
            await self.void()  # refused, for a load that may be over
        self._item = None
        self._session.buffer.forget_before(cut_ms)
        try:
            self._session.commit(item)
        except BaseException:
            await self.void()
            raise
        early, self._early = self._early, None
        if early is not None:
            metrics.SPECULATIONS.labels("used").inc()
            metrics.SPECULATION_SAVED.observe(early.head_start_s)
            await early.release()
            if self._session.active is None:  # it was complete before anybody was told of it
                self.idle_from(max(0.0, early.played_at - time.monotonic()))
        elif self._rules.create_response and self._session.active is None:
            self._session.respond()

    def _cut(self, end_ms: float) -> Item:
        return spoken(self._session.buffer.between(self._start_ms, end_ms), self._id)

    async def _drop(self) -> None:
        self._item = None
        await self.void()
