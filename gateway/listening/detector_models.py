"""Silero's models: the probability of speech in a step of 32 ms. Blocking."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from gateway.listening.onnx import ModelFileError, load
from gateway.listening.silero import RATE_HZ, STEP, SileroVoiceActivityDetector
from services.common.engine.process import free_large_memory

_CONTEXT = 64  # samples before a step that the ONNX model hears with it
_STATE_SIZE = 128


class PackagedSilero:
    """The packaged Silero: 0.12 ms of CPU time a step, 3 MB a session, which `free_large_memory` frees with it."""

    def __init__(self) -> None:
        free_large_memory()

    def new_state(self) -> SileroVoiceActivityDetector:
        return SileroVoiceActivityDetector()

    def step(self, states: list[SileroVoiceActivityDetector], steps: np.ndarray) -> list[float]:
        """Probabilities of the next step of n sessions, (n, STEP) int16 at RATE_HZ. Changes their states."""
        return [state(step.tobytes()) for state, step in zip(states, steps, strict=True)]


@dataclass
class _OnnxState:
    memory: np.ndarray
    context: np.ndarray


class OnnxSilero:
    """Silero's ONNX file, of version 5 or later, on onnxruntime: one copy and one call for all sessions.

    Raises:
        ModelFileError: as `onnx.load`, or it is another model.
    """

    def __init__(self, file: Path) -> None:
        self._session = load(file, "Silero's model")
        try:
            inputs = {member.name for member in self._session.get_inputs()}
            self._rate = {"sr": np.array(RATE_HZ, np.int64)} if "sr" in inputs else {}
            self.step([self.new_state(), self.new_state()], np.zeros((2, STEP), np.int16))
        except Exception as error:  # onnxruntime's own have no common base
            raise ModelFileError(f"{file} is no Silero model of 16 kHz: {error}") from error

    def new_state(self) -> _OnnxState:
        return _OnnxState(np.zeros((2, _STATE_SIZE), np.float32), np.zeros(_CONTEXT, np.float32))

    def step(self, states: list[_OnnxState], steps: np.ndarray) -> list[float]:
        """As `PackagedSilero.step`."""
        contexts = np.stack([state.context for state in states])
        sound = np.concatenate([contexts, steps.astype(np.float32) / 32768], axis=1)
        memory = np.stack([state.memory for state in states], axis=1)
        probabilities, memory = self._session.run(None, {"input": sound, "state": memory, **self._rate})
        for row, state in enumerate(states):
            state.memory, state.context = memory[:, row], sound[row, -_CONTEXT:]
        return probabilities[:, 0].tolist()
