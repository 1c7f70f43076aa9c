"""Finds the user's turns from the probability of speech in each 32 ms.

Times are milliseconds of the session's sound. A turn's sound ends in its first short pause unless the user goes on, so
a speculative answer that starts there has the turn's input."""

from dataclasses import dataclass

from gateway.dialects.realtime.settings.session import SemanticVad, ServerVad
from gateway.listening.detector import STEP_MS

PAUSE_MS = 160  # a shorter silence is within a word: a stop consonant's, for one
_HYSTERESIS = 0.15  # below the threshold speech goes on, down to this much
_LEAST_THRESHOLD = 0.05  # silence itself has a probability of a few hundredths
_LONGEST_TURN_MS = 600_000  # noise may seem to be speech for ever, and the sound has to be kept
ONSET_STEPS = 2  # of speech from which a turn begins; a click has one
# While the server plays an answer, of which a turn's beginning cuts the rest: more than a cough, or "mhm".
BARGE_IN_ONSET_STEPS = 8

_SEMANTIC_THRESHOLD, _SEMANTIC_PADDING_MS = 0.5, 300
# The usual and the longest silence that ends a turn, by eagerness.
_SEMANTIC_SILENCE_MS = {"low": (1200, 8000), "medium": (800, 4000), "auto": (800, 4000), "high": (400, 2000)}
# With a turn model: the silence after a surely complete turn; the least probabilities of "surely" and "likely".
_SURE_SILENCE_MS, _SURE, _LIKELY = 250, 0.95, 0.5
# The silence is this many times as long as the longest pause within the turn.
_PATIENCE = 1.5


@dataclass(frozen=True)
class SpeechStart:
    """A turn begins, with padding before the speech."""

    audio_start_ms: int


@dataclass(frozen=True)
class Pause:
    """The first short pause: the end of the turn's sound, if the turn ends here."""

    audio_end_ms: int


@dataclass(frozen=True)
class Resumption:
    """The user goes on after a `Pause`."""


@dataclass(frozen=True)
class SpeechEnd:
    """A turn ends. Its silence ends at `audio_end_ms`, its sound at `cut_ms`."""

    audio_end_ms: int
    cut_ms: int


@dataclass(frozen=True)
class IdleTimeout:
    """Nobody has spoken since the answer's playback ended at `audio_start_ms`."""

    audio_start_ms: int
    audio_end_ms: int


TurnEvent = SpeechStart | Pause | Resumption | SpeechEnd | IdleTimeout


class TurnDetector:
    """Detects the turns of one session.

    `semantic_vad` adapts the silence that ends a turn to eagerness, to the longest pause within this turn, and to a
    turn model's judgement of the current pause.

    Attributes:
        rules: may change at any time.
        speaking: whether a turn goes on.
        onset_steps: of speech from which a turn begins.
        completeness: a turn model's probability that the turn ends in the current pause; None: there is none.
        idle_from_ms: end of playback, from which the idle timeout counts; None: it does not count.
    """

    def __init__(self, rules: ServerVad | SemanticVad, begin_ms: float = 0.0) -> None:
        self.rules = rules
        self.idle_from_ms: float | None = None
        self.onset_steps = ONSET_STEPS
        self.clear(begin_ms)

    @property
    def padding_ms(self) -> int:
        return self.rules.prefix_padding_ms if isinstance(self.rules, ServerVad) else _SEMANTIC_PADDING_MS

    def clear(self, now_ms: float) -> None:
        """Drops the current turn. The next begins at `now_ms` or later."""
        self._free_ms = now_ms  # sound from here on is no earlier turn's
        self.speaking, self._begun_ms = False, now_ms
        self._onset_ms, self._onset_steps = None, 0  # speech that may become a turn
        self._silent_ms: float | None = None  # when the silence that goes on began
        self._cut_ms: float | None = None  # end of the turn's sound, if it ends in this silence
        self.completeness: float | None = None
        self._longest_pause_ms = 0.0  # after which this turn went on

    def add(self, probability: float, end_ms: float) -> list[TurnEvent]:
        """Processes one step that ends at `end_ms`."""
        return self._on(probability, end_ms) if self.speaking else self._before(probability, end_ms)

    @property
    def _threshold(self) -> float:
        threshold = self.rules.threshold if isinstance(self.rules, ServerVad) else _SEMANTIC_THRESHOLD
        return max(threshold, _LEAST_THRESHOLD)

    @property
    def _least(self) -> float:
        return max(_LEAST_THRESHOLD, self._threshold - _HYSTERESIS)

    @property
    def _silence_ms(self) -> float:
        if isinstance(self.rules, ServerVad):
            return self.rules.silence_duration_ms
        usual, most = _SEMANTIC_SILENCE_MS[self.rules.eagerness]
        if self.completeness is not None:
            if self.completeness >= _SURE:
                return _SURE_SILENCE_MS
            return usual if self.completeness >= _LIKELY else most
        return min(most, max(usual, _PATIENCE * self._longest_pause_ms))

    def _before(self, probability: float, end_ms: float) -> list[TurnEvent]:
        if probability >= self._threshold:
            self._onset_ms = end_ms - STEP_MS if self._onset_ms is None else self._onset_ms
            self._onset_steps += 1
        elif probability < self._least:
            self._onset_ms, self._onset_steps = None, 0
        if self._onset_ms is None or self._onset_steps < self.onset_steps:
            return self._idle(end_ms)
        start_ms = max(self._onset_ms - self.padding_ms, self._free_ms)
        self.speaking, self._begun_ms, self.idle_from_ms = True, end_ms, None
        return [SpeechStart(round(start_ms))]

    def _idle(self, end_ms: float) -> list[TurnEvent]:
        after_ms = self.rules.idle_timeout_ms if isinstance(self.rules, ServerVad) else None
        since_ms = self.idle_from_ms
        if after_ms is None or since_ms is None or self._onset_ms is not None or end_ms < since_ms + after_ms:
            return []
        self.idle_from_ms = None
        return [IdleTimeout(round(since_ms), round(end_ms))]

    def _on(self, probability: float, end_ms: float) -> list[TurnEvent]:
        """Processes a step within a turn. Between the two thresholds the state stays: speech, or silence."""
        if end_ms - self._begun_ms >= _LONGEST_TURN_MS:
            return self._stop(end_ms)
        if self._silent_ms is None and probability < self._least:
            self._silent_ms = end_ms - STEP_MS
        if self._silent_ms is None:
            return []
        if probability >= self._threshold:
            return self._resume(end_ms - STEP_MS - self._silent_ms)
        silence_ms = end_ms - self._silent_ms
        paused = self._cut_ms is None and silence_ms >= PAUSE_MS
        if paused:
            self._cut_ms = end_ms
        if silence_ms >= self._silence_ms:
            return self._stop(end_ms)
        return [Pause(round(end_ms))] if paused else []

    def _stop(self, end_ms: float) -> list[TurnEvent]:
        cut_ms = end_ms if self._cut_ms is None else self._cut_ms
        self.clear(cut_ms)
        return [SpeechEnd(round(end_ms), round(cut_ms))]

    def _resume(self, pause_ms: float) -> list[TurnEvent]:
        events: list[TurnEvent] = [] if self._cut_ms is None else [Resumption()]
        if events:
            self._longest_pause_ms = max(self._longest_pause_ms, pause_ms)
        self._silent_ms = self._cut_ms = self.completeness = None
        return events
