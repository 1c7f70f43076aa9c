"""Recordings of speech by espeak-ng, with known pauses."""

import wave
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
import soxr

if TYPE_CHECKING:  # only where it is installed
    from benchmarks.conversations.espeak import Speaker

_TEXT = (
    "the boats are out and nobody waits for them because every harbor along this coast has been empty since winter "
    "when we came down from the hills our neighbors had already painted seven old doors in green and yellow"
)


@dataclass(frozen=True)
class Recording:
    """Clips of speech, and the silence that was put before, between and after them.

    Attributes:
        pcm16: mono.
        rate_hz: samples a second.
        clips: (begin, end) of each in seconds.
    """

    pcm16: bytes
    rate_hz: int
    clips: list[tuple[float, float]]

    def pcm16_at(self, rate_hz: int) -> bytes:
        """Resampled."""
        return soxr.resample(np.frombuffer(self.pcm16, "<i2"), self.rate_hz, rate_hz).tobytes()


def recording(length_s: float, pauses_s: Sequence[float], seed: int = 0) -> Recording:
    """Speech of about `length_s`: sentences of 3 to 40 words, with one of `pauses_s` around each. Skips the test where
    espeak-ng is not installed."""
    draw, words = np.random.default_rng(seed), _TEXT.split()
    speaker = speaker_or_skip()
    pieces, clips, end = [], [], 0

    def silence() -> None:
        nonlocal end
        pieces.append(np.zeros(round(draw.choice(pauses_s) * speaker.rate_hz), np.int16))
        end += len(pieces[-1])

    silence()
    while end < length_s * speaker.rate_hz:
        clip = speaker.say(" ".join(draw.choice(words, draw.integers(3, 40))) + ".")
        pieces.append(clip)
        clips.append((end / speaker.rate_hz, (end + len(clip)) / speaker.rate_hz))
        end += len(clip)
        silence()
    return Recording(np.concatenate(pieces).tobytes(), speaker.rate_hz, clips)


def speaker_or_skip(voice: str = "en-us") -> "Speaker":
    """A voice. Skips the test where espeak-ng is not installed."""
    pytest.importorskip("espeakng_loader", reason="espeakng-loader is not installed")
    from benchmarks.conversations.espeak import Speaker

    return Speaker(voice)


def spoken(text: str, rate_hz: int) -> bytes:
    """`text` in mono PCM16. Skips the test where espeak-ng is not installed."""
    speaker = speaker_or_skip()
    return soxr.resample(speaker.say(text), speaker.rate_hz, rate_hz).tobytes()


def sentences(file: Path, texts: Sequence[str], pause_s: float) -> None:
    """Writes a WAV file of `texts`, each with a pause after it. Skips the test as `spoken` does."""
    speaker = speaker_or_skip()
    pause = np.zeros(round(pause_s * speaker.rate_hz), np.int16)
    with wave.open(str(file), "wb") as opened:
        opened.setparams((1, 2, speaker.rate_hz, 0, "NONE", "not compressed"))
        for text in texts:
            opened.writeframes(np.concatenate([speaker.say(text), pause]).tobytes())
