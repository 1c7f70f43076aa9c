"""What users say in benchmarks and tests of `/v1/realtime`: sentences by espeak-ng, with pauses and noise."""

import io
import wave
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.conversations.espeak import Speaker

RATE_HZ = 24_000  # of audio/pcm


@dataclass(frozen=True)
class Utterance:
    """A turn of a user.

    Attributes:
        samples: (n,) int16 at RATE_HZ, from the first audible to the last.
    """

    samples: np.ndarray

    @property
    def seconds(self) -> float:
        """How long it is."""
        return len(self.samples) / RATE_HZ

    def wav(self) -> bytes:
        """As a file."""
        file = io.BytesIO()
        with wave.open(file, "wb") as writer:
            writer.setnchannels(1)
            writer.setsampwidth(2)
            writer.setframerate(RATE_HZ)
            writer.writeframes(self.samples.astype("<i2").tobytes())
        return file.getvalue()


def utterance(speaker: Speaker, clauses: Sequence[str], pause_s: float = 0.0, seed: int | None = None) -> Utterance:
    """`clauses` with pauses between them.

    Args:
        speaker: who says it.
        clauses: parts of a sentence.
        pause_s: of silence between two of them.
        seed: of noise at -54 dB, so that no two turns are the same; None: digital silence in the pauses.
    """
    pause = np.zeros(round(pause_s * RATE_HZ), np.int16)
    pieces = [piece for clause in clauses for piece in (pause, at_rate(speaker.say(clause), speaker.rate_hz))][1:]
    samples = np.concatenate(pieces)
    if seed is not None:
        samples = samples + noise(len(samples), seed)
    return Utterance(np.clip(samples, -32768, 32767).astype(np.int16))


def noise(samples: int, seed: int, level: float = 65.0) -> np.ndarray:
    """(samples,) float64 of white noise; `level` is its standard deviation, of 32768."""
    return np.random.default_rng(seed).normal(0, level, samples)


def silence(seconds: float, seed: int | None = None) -> np.ndarray:
    """(n,) int16 at RATE_HZ; with the noise of `seed`, if there is one."""
    count = round(seconds * RATE_HZ)
    return (np.zeros(count) if seed is None else noise(count, seed)).astype(np.int16)


def at_rate(samples: np.ndarray, rate_hz: int) -> np.ndarray:
    """(n,) int16 at RATE_HZ of samples at `rate_hz`, by straight lines: good enough for a synthetic voice."""
    count = round(len(samples) * RATE_HZ / rate_hz)
    return np.interp(np.arange(count) * rate_hz / RATE_HZ, np.arange(len(samples)), samples).astype(np.int16)
