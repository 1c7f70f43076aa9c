"""Speech of espeak-ng, by its C library: samples, when each word begins, and where pauses do."""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import soxr

_SYNCHRONOUS, _UTF8, _SSML, _PHONEMES = 2, 1, 0x10, 0x100
_RATE, _PITCH, _RANGE = 1, 3, 4
_WORD_EVENT, _PHONEME_EVENT, _LAST_EVENT = 1, 7, 0
_PHONEME_EVENTS = 1  # espeakINITIALIZE_PHONEME_EVENTS


class _EspeakEvent(ctypes.Structure):
    """espeak_EVENT of speak_lib.h."""

    _fields_: Sequence[Any] = [
        ("type", ctypes.c_int),
        ("unique_identifier", ctypes.c_uint),
        ("text_position", ctypes.c_int),
        ("length", ctypes.c_int),
        ("audio_position", ctypes.c_int),
        ("sample", ctypes.c_int),
        ("user_data", ctypes.c_void_p),
        ("id", ctypes.c_char * 8),
    ]


_Callback = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_short), ctypes.c_int, ctypes.POINTER(_EspeakEvent))


@dataclass(frozen=True)
class EspeakVoice:
    """A voice of espeak-ng.

    Attributes:
        name: of a language and a variant, as `espeak-ng -v` takes it.
        rate: words a minute.
        pitch, pitch_range: 0 to 100.
    """

    name: str
    rate: int = 160
    pitch: int = 50
    pitch_range: int = 50


@dataclass(frozen=True)
class Utterance:
    """Speech: `samples` (samples,) float32 at `rate_hz`.

    Attributes:
        words: where each begins, as (character, sample).
        pauses: where silence begins, in samples.
    """

    samples: np.ndarray
    rate_hz: int
    words: tuple[tuple[int, int], ...]
    pauses: tuple[int, ...] = ()


class _Espeak:
    def __init__(self) -> None:
        try:
            import espeakng_loader
        except ModuleNotFoundError:
            raise RuntimeError("espeak-ng is not installed: pip install -e '.[training]'") from None
        self._library = ctypes.CDLL(espeakng_loader.get_library_path())
        data = espeakng_loader.get_data_path().encode()
        self.rate_hz: int = self._library.espeak_Initialize(_SYNCHRONOUS, 0, data, _PHONEME_EVENTS)
        self._pieces: list[np.ndarray] = []
        self._words: list[tuple[int, int]] = []
        self._pauses: list[int] = []
        self._callback = _Callback(self._take)  # kept: the library has its address
        self._library.espeak_SetSynthCallback(self._callback)
        self._voice: EspeakVoice | None = None

    def _take(self, samples: Any, count: int, events: Any) -> int:
        if count:
            self._pieces.append(np.ctypeslib.as_array(samples, (count,)).astype(np.float32) / 32768)
        index = 0
        while (event := events[index]).type != _LAST_EVENT:
            if event.type == _WORD_EVENT:
                self._words.append((event.text_position - 1, event.sample))
            elif event.type == _PHONEME_EVENT and event.id.startswith(b"_"):
                self._pauses.append(event.sample)
            index += 1
        return 0

    def say(self, text: str, voice: EspeakVoice, ssml: bool) -> Utterance:
        if voice != self._voice:
            if self._library.espeak_SetVoiceByName(voice.name.encode()):
                raise ValueError(f"espeak-ng has no voice {voice.name}")
            for parameter, value in ((_RATE, voice.rate), (_PITCH, voice.pitch), (_RANGE, voice.pitch_range)):
                self._library.espeak_SetParameter(parameter, value, 0)
            self._voice = voice
        self._pieces, self._words, self._pauses = [], [], []
        data = text.encode()
        flags = _UTF8 | _PHONEMES | (_SSML if ssml else 0)
        self._library.espeak_Synth(data, len(data) + 1, 0, 1, 0, flags, None, None)
        samples = np.concatenate(self._pieces) if self._pieces else np.zeros(0, np.float32)
        return Utterance(samples, self.rate_hz, tuple(self._words), tuple(self._pauses))


@cache
def _espeak() -> _Espeak:
    return _Espeak()  # the library has one state a process


def say(text: str, voice: EspeakVoice, rate_hz: int | None = None, ssml: bool = False) -> Utterance:
    """Synthesizes `text`; words in `[[...]]` are espeak-ng's phonemes.

    Args:
        rate_hz: samples a second; None: espeak-ng's own, 22,050.
        ssml: whether `text` is SSML.

    Raises:
        RuntimeError: espeak-ng is not installed.
        ValueError: it has no such voice.
    """
    spoken = _espeak().say(text, voice, ssml)
    if rate_hz in (None, spoken.rate_hz):
        return spoken
    assert rate_hz is not None
    samples = soxr.resample(spoken.samples, spoken.rate_hz, rate_hz).astype(np.float32)
    scale = rate_hz / spoken.rate_hz
    words = tuple((at, int(sample * scale)) for at, sample in spoken.words)
    return Utterance(samples, rate_hz, words, tuple(int(sample * scale) for sample in spoken.pauses))
