"""Silero's models: the probability of speech in a step of 32 ms.

The caller keeps each session's state. Blocking."""

from pathlib import Path
from typing import Any, Protocol

import numpy as np

from gateway.listening.onnx import ModelFileError, load
from gateway.listening.silero import RATE_HZ, STEP, SileroVoiceActivityDetector

_CONTEXT = 64  # samples before a step that the ONNX model hears with it
_STATE_SIZE = 128


class Model(Protocol):
    def new_state(self) -> Any: ...

    def step(self, states: list[Any], steps: np.ndarray) -> list[float]:
        """Probabilities of the next step of each session.

        Args:
            states: of n sessions; changed.
            steps: (n, STEP) int16 at RATE_HZ.
        """
        ...


class PackagedSilero:
    """The packaged Silero: 0.12 ms of CPU time a step, 3 MB a session."""

    def new_state(self) -> SileroVoiceActivityDetector:
        return SileroVoiceActivityDetector()

    def step(self, states: list[SileroVoiceActivityDetector], steps: np.ndarray) -> list[float]:
        return [state(step.tobytes()) for state, step in zip(states, steps, strict=True)]


class _OnnxState:
    def __init__(self) -> None:
        self.memory: np.ndarray = np.zeros((2, _STATE_SIZE), np.float32)
        self.context: np.ndarray = np.zeros(_CONTEXT, np.float32)


class OnnxSilero:
    """Silero's ONNX file on onnxruntime: one copy and one call for all sessions.

    Args:
        file: Silero of version 5 or later, such as silero_vad_16k_op15.onnx.

    Raises:
        ModelFileError: as `onnx.load`, or it is another model.
    """

    def __init__(self, file: Path) -> None:
        self._session = load(file, "Silero's model")
        try:
            self._rate = {"sr": np.array(RATE_HZ, np.int64)} if "sr" in self._inputs() else {}
            self.step([self.new_state(), self.new_state()], np.zeros((2, STEP), np.int16))
        except Exception as error:  # onnxruntime's own have no common base
            raise ModelFileError(f"{file} is no Silero model of 16 kHz: {error}") from error

    def _inputs(self) -> set[str]:
        return {member.name for member in self._session.get_inputs()}

    def new_state(self) -> _OnnxState:
        return _OnnxState()

    def step(self, states: list[_OnnxState], steps: np.ndarray) -> list[float]:
        contexts = np.stack([state.context for state in states])
        sound = np.concatenate([contexts, steps.astype(np.float32) / 32768], axis=1)
        memory = np.stack([state.memory for state in states], axis=1)
        probabilities, memory = self._session.run(None, {"input": sound, "state": memory, **self._rate})
        for row, state in enumerate(states):
            state.memory, state.context = memory[:, row], sound[row, -_CONTEXT:]
        return probabilities[:, 0].tolist()
