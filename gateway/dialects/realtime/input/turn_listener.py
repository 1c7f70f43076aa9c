"""Commits and answers the user's turns where the server detects them.

A short pause starts a speculative answer, which is released if the turn ends there, else discarded."""

import time
from typing import TYPE_CHECKING

import numpy as np

from gateway import metrics
from gateway.answers.gateway import Gateway
from gateway.dialects.realtime.conversation.items import Item, spoken
from gateway.dialects.realtime.events import RealtimeError, new_id
from gateway.dialects.realtime.input import turn_detector
from gateway.dialects.realtime.input.sound_clock import SoundClock
from gateway.dialects.realtime.output.responses import Response
from gateway.dialects.realtime.settings.session_config import SemanticVad, ServerVad
from gateway.listening.detector import STEP_MS, SessionDetector

if TYPE_CHECKING:
    from gateway.dialects.realtime.session_handler import SessionHandler

_MOST_SPECULATIONS = 3  # in one turn: who pauses so often will pause again
_MORE_KEPT_MS = 1000  # of sound in which nobody speaks, beyond what may become part of a turn


class TurnListener:
    def __init__(
        self, session: "SessionHandler", gateway: Gateway, detector: SessionDetector, rules: ServerVad | SemanticVad
    ) -> None:
        self._session, self._gateway, self._detector = session, gateway, detector
        self._turns = turn_detector.TurnDetector(rules, detector.heard_ms)
        self._heard_ms = detector.heard_ms
        self._clock = SoundClock()
        self._start_ms, self._id, self._speculations = 0, "", 0
        self._item: Item | None = None
        self._speculative: Response | None = None

    async def listen(self, samples: np.ndarray, rules: ServerVad | SemanticVad) -> None:
        """Processes all of (n,) int16 samples at 16 kHz. Raises RealtimeError: a turn could not be committed."""
        self._turns.rules = rules
        self._clock.came(self._session.buffer.returned_ms)
        refusal: RealtimeError | None = None
        for probability in await self._detector.add(samples):
            self._heard_ms += STEP_MS
            self._turns.onset_steps = self._onset_steps
            for event in self._turns.add(probability, self._heard_ms):
                try:
                    await self._handle(event)
                except RealtimeError as error:
                    refusal = refusal or error
        self._session.quality.user_speaks(self._turns.speaking)
        if not self._turns.speaking:
            self._session.buffer.drop_before(self._heard_ms - self._turns.padding_ms - _MORE_KEPT_MS)
        self._clock.ready()
        if refusal is not None:
            raise refusal

    async def discard_speculation(self) -> None:
        """Drops the speculative answer, as its input has changed."""
        response, self._speculative = self._speculative, None
        if response is not None:
            metrics.SPECULATIONS.labels("wasted").inc()
            await response.drop()

    def close(self) -> None:
        self._detector.close()
        self._session.quality.user_speaks(False)

    async def reset_turn(self) -> None:
        """Drops the current turn: the client has committed or cleared its sound."""
        await self._discard_item()
        self._turns.clear(self._heard_ms)
        self._session.quality.user_speaks(False)

    def idle_from(self, played_at: float | None) -> None:
        """Counts the idle timeout from the end of playback, in `time.monotonic()`, or from now; None: stops."""
        after_s = None if played_at is None else max(0.0, played_at - time.monotonic())
        self._turns.idle_from_ms = None if after_s is None else self._heard_ms + after_s * 1000

    async def _handle(self, event: turn_detector.TurnEvent) -> None:
        match event:
            case turn_detector.SpeechStart(start_ms):
                self._start_ms, self._id, self._speculations = start_ms, new_id("item"), 0
                self._session.send("input_audio_buffer.speech_started", audio_start_ms=start_ms, item_id=self._id)
                if self._turns.rules.interrupt_response:
                    await self._interrupt()
            case turn_detector.Pause(end_ms):
                self._item = self._cut(end_ms)
                self._speculate(self._item)
                if self._gateway.turn_model is not None and isinstance(self._turns.rules, SemanticVad):
                    sound = np.frombuffer(self._item.sound[0], "<i2")
                    self._turns.completeness = await self._gateway.turn_model.is_complete(sound)
            case turn_detector.Resumption():
                await self._discard_item()
            case turn_detector.SpeechEnd(end_ms, cut_ms):
                self.idle_from(None)  # an answer that was interrupted is over
                self._session.quality.turn_ended(self._clock.at(cut_ms - turn_detector.PAUSE_MS))
                self._session.send("input_audio_buffer.speech_stopped", audio_end_ms=end_ms, item_id=self._id)
                await self._commit(self._item or self._cut(cut_ms), cut_ms)
            case turn_detector.IdleTimeout(start_ms, end_ms) if self._session.active is None:
                self._start_ms, self._id = start_ms, new_id("item")
                times = {"audio_start_ms": start_ms, "audio_end_ms": end_ms}
                self._session.send("input_audio_buffer.timeout_triggered", **times, item_id=self._id)
                await self._commit(self._cut(end_ms), end_ms)

    @property
    def user_speaks(self) -> bool:
        return self._turns.speaking

    @property
    def _is_played(self) -> bool:
        """Whether the server plays an answer."""
        return self._session.playback is not None and self._session.playback.is_playing

    @property
    def _onset_steps(self) -> int:
        return turn_detector.BARGE_IN_ONSET_STEPS if self._is_played else turn_detector.ONSET_STEPS

    async def _interrupt(self) -> None:
        """Ends the answer that is made, or played."""
        active, is_played = self._session.active, self._is_played
        if active is not None or is_played:
            metrics.BARGE_INS.inc()
        if self._session.playback is not None and is_played:
            self._session.playback.cut()
        if active is not None:
            await active.cancel("turn_detected")

    def _speculate(self, item: Item) -> None:
        if (
            self._turns.rules.create_response
            and self._session.active is None
            and self._speculations < _MOST_SPECULATIONS
            and self._gateway.settings.realtime_speculation
            and self._gateway.pipeline.has_room  # no request waits for a stage: this one delays nobody
        ):
            self._speculations += 1
            items = [*self._session.conversation.context(), item]
            self._speculative = self._session.respond(items=items, speculative=True)

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
                self.idle_from(response.played_at)
        elif self._turns.rules.create_response and self._session.active is None:
            self._session.respond()

    def _cut(self, end_ms: float) -> Item:
        return spoken(self._session.buffer.between(self._start_ms, end_ms), self._id)

    async def _discard_item(self) -> None:
        self._item = None
        await self.discard_speculation()
