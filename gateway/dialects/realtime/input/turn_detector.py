"""Says where a user's turns begin and end, of the probabilities that each 32 ms is speech.

Times are milliseconds of the session's sound, so a client that sends none lets no time pass.

A turn's sound ends in its first short pause. Only if the user goes on does it get longer: an answer that is begun in
the pause is the very answer to the turn, and what was silence anyway costs the user no wait.
"""

from dataclasses import dataclass

from gateway.dialects.realtime.settings.session import SemanticVad, ServerVad
from gateway.listening.detector import STEP_MS

PAUSE_MS = 160  # a shorter silence is within a word: a stop consonant's, for one
_HYSTERESIS = 0.15  # below the threshold speech goes on, down to this much
_LEAST_THRESHOLD = 0.05  # silence itself has a probability of a few hundredths
_LONGEST_TURN_MS = 600_000  # noise may seem to be speech for ever, and the sound has to be kept
_ONSET_STEPS = 2  # of speech from which a turn begins; a click has one

_SEMANTIC_THRESHOLD, _SEMANTIC_PADDING_MS = 0.5, 300
# Silence that ends a turn, and the longest that one may need, by eagerness.
_SEMANTIC_SILENCE_MS = {"low": (1200, 8000), "medium": (800, 4000), "auto": (800, 4000), "high": (400, 2000)}
# With a turn model: silence that ends a turn which is surely complete; probabilities from which it is that, or likely.
_SURE_SILENCE_MS, _SURE, _LIKELY = 250, 0.95, 0.5
# Who has paused within a turn is given this much more time than the longest of those pauses took.
_PATIENCE = 1.5


@dataclass(frozen=True)
class SpeechStarted:
    """A turn begins. Its sound starts at `audio_start_ms`, some of what came before its speech included."""

    audio_start_ms: int


@dataclass(frozen=True)
class Paused:
    """A first short pause. If the turn ends here, its sound ends at `audio_end_ms`."""

    audio_end_ms: int


@dataclass(frozen=True)
class Resumed:
    """The turn goes on after `Paused`: what was begun there is void."""


@dataclass(frozen=True)
class SpeechStopped:
    """The turn has ended.

    Attributes:
        audio_end_ms: when that was found, after the silence that shows it.
        cut_ms: where its sound ends; that of `Paused`, if there was one.
    """

    audio_end_ms: int
    cut_ms: int


@dataclass(frozen=True)
class IdleTimeout:
    """Nobody has spoken since `audio_start_ms`, the end of the answer's playback."""

    audio_start_ms: int
    audio_end_ms: int


TurnEvent = SpeechStarted | Paused | Resumed | SpeechStopped | IdleTimeout


class TurnDetector:
    """The turns of one session.

    `semantic_vad` goes by silence as well, but by one that adapts: 1200, 800 or 400 ms for low, medium or high
    eagerness, and half as long again as the longest pause after which the user went on within this turn, up to 8, 4
    or 2 seconds. Where a turn model has judged the pause, a turn that is surely complete ends after 250 ms, one that
    likely is after the usual silence, and any other after the longest.

    Args:
        turn_detection: the session's.
        begin_ms: time from which on there is sound for turns.
    """

    def __init__(self, turn_detection: ServerVad | SemanticVad, begin_ms: float = 0.0) -> None:
        self._rules, self._idle_from_ms = turn_detection, None
        self.clear(begin_ms)

    @property
    def speaking(self) -> bool:
        """Whether a turn has begun and not ended."""
        return self._speaking

    @property
    def padding_ms(self) -> int:
        """Sound before a turn's speech that is part of it."""
        return self._rules.prefix_padding_ms if isinstance(self._rules, ServerVad) else _SEMANTIC_PADDING_MS

    def use(self, turn_detection: ServerVad | SemanticVad) -> None:
        """Other rules from now on, for the turn that goes on too."""
        self._rules = turn_detection

    def clear(self, now_ms: float) -> None:
        """Forgets the turn, as its sound was committed or thrown away by the client. No turn's begins before this."""
        self._free_ms = now_ms  # sound from here on is no earlier turn's
        self._speaking, self._begun_ms = False, now_ms
        self._onset_ms, self._onset_steps = None, 0  # speech that may become a turn
        self._silent_ms: float | None = None  # when the silence that goes on began
        self._cut_ms: float | None = None  # end of the turn's sound, if it ends in this silence
        self._completeness: float | None = None  # of the turn, if it ends in this silence
        self._longest_pause_ms = 0.0  # after which this turn went on

    def idle_from(self, played_ms: float | None) -> None:
        """When the last answer's playback ends, from which on the idle timeout counts. None: not now."""
        self._idle_from_ms = played_ms

    def judge(self, completeness: float) -> None:
        """What a turn model says of the pause that goes on: the probability that the turn ends there."""
        self._completeness = completeness

    def add(self, probability: float, end_ms: float) -> list[TurnEvent]:
        """The next step.

        Args:
            probability: of speech in it, 0 to 1.
            end_ms: time of its end.
        """
        return self._on(probability, end_ms) if self._speaking else self._before(probability, end_ms)

    @property
    def _threshold(self) -> float:
        asked = self._rules.threshold if isinstance(self._rules, ServerVad) else _SEMANTIC_THRESHOLD
        return max(asked, _LEAST_THRESHOLD)

    @property
    def _least(self) -> float:
        return max(_LEAST_THRESHOLD, self._threshold - _HYSTERESIS)

    @property
    def _silence_ms(self) -> float:
        """Silence that ends the turn."""
        if isinstance(self._rules, ServerVad):
            return self._rules.silence_duration_ms
        usual, most = _SEMANTIC_SILENCE_MS[self._rules.eagerness]
        if self._completeness is not None:
            return _SURE_SILENCE_MS if self._completeness >= _SURE else usual if self._completeness >= _LIKELY else most
        return min(most, max(usual, _PATIENCE * self._longest_pause_ms))

    def _before(self, probability: float, end_ms: float) -> list[TurnEvent]:
        """A step while nobody speaks."""
        if probability >= self._threshold:
            self._onset_ms = end_ms - STEP_MS if self._onset_ms is None else self._onset_ms
            self._onset_steps += 1
        elif probability < self._least:
            self._onset_ms, self._onset_steps = None, 0
        if self._onset_ms is None or self._onset_steps < _ONSET_STEPS:
            return self._idle(end_ms)
        start_ms = max(self._onset_ms - self.padding_ms, self._free_ms)
        self._speaking, self._begun_ms, self._idle_from_ms = True, end_ms, None
        return [SpeechStarted(round(start_ms))]

    def _idle(self, end_ms: float) -> list[TurnEvent]:
        after_ms = self._rules.idle_timeout_ms if isinstance(self._rules, ServerVad) else None
        since_ms = self._idle_from_ms
        if after_ms is None or since_ms is None or self._onset_ms is not None or end_ms < since_ms + after_ms:
            return []
        self._idle_from_ms = None
        return [IdleTimeout(round(since_ms), round(end_ms))]

    def _on(self, probability: float, end_ms: float) -> list[TurnEvent]:
        """A step within a turn. What is between the two thresholds goes on with what was: speech, or silence."""
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
        return [Paused(round(end_ms))] if paused else []

    def _stop(self, end_ms: float) -> list[TurnEvent]:
        cut_ms = end_ms if self._cut_ms is None else self._cut_ms
        self.clear(cut_ms)
        return [SpeechStopped(round(end_ms), round(cut_ms))]

    def _resume(self, pause_ms: float) -> list[TurnEvent]:
        void: list[TurnEvent] = [] if self._cut_ms is None else [Resumed()]
        if void:
            self._longest_pause_ms = max(self._longest_pause_ms, pause_ms)
        self._silent_ms = self._cut_ms = self._completeness = None
        return void
