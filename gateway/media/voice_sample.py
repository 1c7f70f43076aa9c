"""Reads and stores voice samples. Blocking: call these in a thread."""

import io
import math

import numpy as np
import soundfile
import soxr

from services.common.media import MediaError
from services.common.media.calls import Read
from services.common.media.calls import read as read_here

MAX_BYTES = 10 * 1024 * 1024
MIN_S, MAX_S = 1.0, 30.0
_CODEC_SLACK_S = 0.1  # codecs may add this to a sample
_SILENCE = 1e-3  # RMS of a microphone in an empty room: -60 dB


def read_sample(content: bytes, rate_hz: int, read: Read = read_here) -> np.ndarray:
    """A sample, (n,) float32, -1 to 1, mono, at `rate_hz`, MIN_S to MAX_S long.

    Raises:
        MediaError: broken, without audio, silent, too large, too long or too short.
    """
    if not content:
        raise MediaError("the file is empty")
    if len(content) > MAX_BYTES:
        raise MediaError(f"the file is larger than the {MAX_BYTES} bytes allowed")
    sound = _decoded(content, rate_hz, read)
    length_s = len(sound) / rate_hz
    if length_s < MIN_S:
        raise MediaError(f"the sample is {length_s:.2f} s long; at least {MIN_S:g} s are needed")
    if not np.isfinite(sound).all():
        raise MediaError("has samples that are no numbers")
    if np.sqrt(np.mean(np.square(sound, dtype=np.float64))) < _SILENCE:
        raise MediaError("the sample is silent: nobody's voice is in it")
    return np.clip(sound[: int(MAX_S * rate_hz)], -1.0, 1.0)


def _decoded(content: bytes, rate_hz: int, read: Read) -> np.ndarray:
    """(samples,) float32, mono, at `rate_hz`. Raises MediaError."""
    pieces, samples = [np.empty(0, np.float32)], 0
    for piece in read("sound", content, rate_hz, math.inf):
        pieces.append(piece)
        samples += len(piece)
        if samples > (MAX_S + _CODEC_SLACK_S) * rate_hz:
            raise MediaError(f"the sample is longer than the {MAX_S:g} s allowed; send the best part of it")
    return np.concatenate(pieces)


def as_flac(samples: np.ndarray, rate_hz: int) -> bytes:
    """A 16-bit FLAC file of (n,) float32 samples."""
    file = io.BytesIO()
    soundfile.write(file, samples, rate_hz, format="FLAC", subtype="PCM_16")
    return file.getvalue()


def from_flac(file: bytes, rate_hz: int) -> np.ndarray:
    """(n,) float32 samples of an `as_flac` file."""
    samples, own_rate_hz = soundfile.read(io.BytesIO(file), dtype="float32")
    return np.clip(soxr.resample(samples, own_rate_hz, rate_hz), -1.0, 1.0) if own_rate_hz != rate_hz else samples
