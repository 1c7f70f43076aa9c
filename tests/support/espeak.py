"""Speech by espeak-ng, from the library in the wheel espeakng-loader: it needs neither a command nor root."""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest

_SYNCHRONOUS = 2  # AUDIO_OUTPUT_SYNCHRONOUS: speech goes to the callback
_RATE = 1  # espeakRATE, words a minute
_UTF8 = 1  # espeakCHARS_UTF8
_AUDIBLE = 200  # of 32768, -44 dB: quieter samples at the ends of a clip are its silence
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


def recording(length_s: float, pauses_s: Sequence[float], seed: int = 0) -> Recording:
    """Speech of about `length_s`: sentences of 3 to 40 words, with one of `pauses_s` around each. Skips the test where
    espeak-ng is not installed."""
    draw, words = np.random.default_rng(seed), _TEXT.split()
    speaker = _Speaker()
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


class _Speaker:
    """The library, of which there is one a process.

    Attributes:
        rate_hz: samples a second.
    """

    def __init__(self) -> None:
        loader = pytest.importorskip("espeakng_loader", reason="espeakng-loader is not installed")
        self._library = ctypes.CDLL(loader.get_library_path())
        self.rate_hz: int = self._library.espeak_Initialize(_SYNCHRONOUS, 0, loader.get_data_path().encode(), 0)
        assert self.rate_hz > 0, "espeak-ng finds no data"
        self._said: list[np.ndarray] = []
        callback = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_short), ctypes.c_int, ctypes.c_void_p)
        self._heard = callback(self._hear)  # kept: the library has only its address
        self._library.espeak_SetSynthCallback(self._heard)
        assert self._library.espeak_SetVoiceByName(b"en-us") == 0
        self._library.espeak_SetParameter(_RATE, 150, 0)

    def say(self, text: str) -> np.ndarray:
        """PCM16 of `text`, without the silence around it."""
        self._said = []
        encoded = text.encode()
        failed = self._library.espeak_Synth(encoded, len(encoded) + 1, 0, 1, 0, _UTF8, None, None)
        assert not failed
        whole = np.concatenate(self._said)
        loud = np.flatnonzero(np.abs(whole.astype(int)) > _AUDIBLE)
        return whole[loud[0] : loud[-1] + 1]

    def _hear(self, samples: "ctypes._Pointer[ctypes.c_short]", count: int, _events: object) -> int:
        if samples and count:
            self._said.append(np.ctypeslib.as_array(samples, (count,)).copy())
        return 0
