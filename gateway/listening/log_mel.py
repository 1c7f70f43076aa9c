"""Whisper's log-mel spectrogram, in numpy: the gateway has no torch.

Source: transformers' WhisperFeatureExtractor, with 80 bins and `do_normalize`.
"""

import numpy as np

RATE_HZ = 16_000
BINS = 80
HOP = 160  # samples from one frame to the next
_WINDOW = 400
_MAX_HZ = 8000.0
# Slaney's mel scale: linear up to 1 kHz, logarithmic above.
_HZ_PER_MEL, _BEND_HZ, _LOG_STEP = 200.0 / 3, 1000.0, np.log(6.4) / 27.0
_BEND_MEL = _BEND_HZ / _HZ_PER_MEL


def _to_hz(mel: np.ndarray) -> np.ndarray:
    return np.where(mel < _BEND_MEL, mel * _HZ_PER_MEL, _BEND_HZ * np.exp(_LOG_STEP * (mel - _BEND_MEL)))


def _filters() -> np.ndarray:
    """Weights of the frequencies in each bin, (BINS, _WINDOW // 2 + 1): triangles of equal area."""
    top_mel = _BEND_MEL + np.log(_MAX_HZ / _BEND_HZ) / _LOG_STEP
    edges = _to_hz(np.linspace(0.0, top_mel, BINS + 2))[:, None]
    hz = np.linspace(0.0, RATE_HZ / 2, _WINDOW // 2 + 1)
    low, peak, high = edges[:-2], edges[1:-1], edges[2:]
    rising, falling = (hz - low) / (peak - low), (high - hz) / (high - peak)
    return np.maximum(0.0, np.minimum(rising, falling)) * 2.0 / (high - low)


_FILTERS = _filters()
_HANN = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(_WINDOW) / _WINDOW)


def log_mel(samples: np.ndarray) -> np.ndarray:
    """The spectrogram, (BINS, n // HOP) float32, of (n,) float samples at RATE_HZ, which it normalizes."""
    sound = (samples - samples.mean()) / np.sqrt(samples.var() + 1e-7)
    padded = np.pad(sound, _WINDOW // 2, mode="reflect")
    frames = np.lib.stride_tricks.sliding_window_view(padded, _WINDOW)[::HOP][: len(samples) // HOP]
    power = np.abs(np.fft.rfft(frames * _HANN)) ** 2
    logs = np.log10(np.maximum(_FILTERS @ power.T, 1e-10))
    return ((np.maximum(logs, logs.max() - 8.0) + 4.0) / 4.0).astype(np.float32)
