"""A Smart Turn model (version 3), which says for `semantic_vad` whether the user has finished."""

import asyncio
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from gateway.listening.log_mel import BINS, HOP, RATE_HZ, log_mel
from gateway.listening.onnx import ModelFileError, load

_SAMPLES = 8 * RATE_HZ


class TurnModel:
    """One model for all sessions. `file`: such as smart-turn-v3.2-cpu.onnx.

    Raises:
        ModelFileError: as `onnx.load`, or it is another model.
    """

    def __init__(self, file: Path) -> None:
        self._session = load(file, "a Smart Turn model")
        self._threads = ThreadPoolExecutor(os.cpu_count(), "turn-model")  # a call takes a tenth of a second of a core
        try:
            self._probability(np.zeros(_SAMPLES, np.int16))
        except Exception as error:  # onnxruntime's own have no common base
            reason = f"{file} is no turn model: it must take input_features of (1, {BINS}, {_SAMPLES // HOP}): {error}"
            raise ModelFileError(reason) from error

    async def is_complete(self, samples: np.ndarray) -> float:
        """Probability, 0 to 1, that a turn ends with these samples, (n,) int16 at 16 kHz."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, self._probability, samples)

    def close(self) -> None:
        self._threads.shutdown(cancel_futures=True)

    def _probability(self, samples: np.ndarray) -> float:
        return float(self._session.run(None, {"input_features": features(samples)[None]})[0].item())


def features(samples: np.ndarray) -> np.ndarray:
    """The model's input, (80, 800) float32: the last 8 s of (n,) int16 samples at 16 kHz, padded in front."""
    last = samples[-_SAMPLES:].astype(np.float64) / 32768
    return log_mel(np.pad(last, (_SAMPLES - len(last), 0)))
