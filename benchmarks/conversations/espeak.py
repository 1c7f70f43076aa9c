"""Speech by espeak-ng, from the library in the wheel espeakng-loader: it needs neither a command nor root."""

import ctypes

import espeakng_loader
import numpy as np

_SYNCHRONOUS = 2  # AUDIO_OUTPUT_SYNCHRONOUS: speech goes to the callback
_RATE = 1  # espeakRATE, words a minute
_UTF8 = 1  # espeakCHARS_UTF8
_AUDIBLE = 200  # of 32768, -44 dB: quieter samples at the ends of a clip are its silence


class Speaker:
    """The library, of which there is one a process.

    Args:
        voice: e.g. "en-us", "en-gb", "de".
        words_per_minute: how fast it speaks.

    Attributes:
        rate_hz: samples a second.
    """

    def __init__(self, voice: str = "en-us", words_per_minute: int = 150) -> None:
        self._library = ctypes.CDLL(espeakng_loader.get_library_path())
        self.rate_hz: int = self._library.espeak_Initialize(
            _SYNCHRONOUS, 0, espeakng_loader.get_data_path().encode(), 0
        )
        assert self.rate_hz > 0, "espeak-ng finds no data"
        self._said: list[np.ndarray] = []
        callback = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_short), ctypes.c_int, ctypes.c_void_p)
        self._heard = callback(self._hear)  # kept: the library has only its address
        self._library.espeak_SetSynthCallback(self._heard)
        assert self._library.espeak_SetVoiceByName(voice.encode()) == 0, f"there is no voice {voice}"
        self._library.espeak_SetParameter(_RATE, words_per_minute, 0)

    def say(self, text: str) -> np.ndarray:
        """(n,) int16 of `text`, without the silence around it."""
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
