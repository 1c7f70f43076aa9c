"""Detects speech for many sessions in one thread: more would not help, as Silero's library keeps Python's lock.

In each round, every session with audio gets one step of 32 ms: a client that sends minutes at once delays no other.
Microphones that are off, or muted, send zeros: after some seconds of these a session has no model until it sounds."""

import asyncio
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any

import numpy as np

from gateway.listening.detector_models import OnnxSilero, PackagedSilero
from gateway.listening.silero import STEP

STEP_MS = 32  # of audio, with one probability of speech
_STOPS = "the gateway stops"
# Of zeros, after which the model's state is dropped. No pause within a turn is so long, and what follows is detected as
# at the beginning of a session.
_SLEEPS_AFTER_STEPS = 10_000 // STEP_MS


class DetectorError(Exception):
    """Speech could not be detected; says why."""


class SessionDetector:
    """Detects the speech of one session; `Detectors.open` makes it. `heard_ms`: end of the last step submitted."""

    def __init__(self, detectors: "Detectors", begin_ms: float) -> None:
        self._detectors, self._rest = detectors, np.empty(0, np.int16)
        self.heard_ms = begin_ms
        self.state: Any = None  # belongs to the thread, as the next does
        self.zero_steps = 0  # the last ones, without any sound
        self.closed = False

    async def add(self, samples: np.ndarray) -> list[float]:
        """Probabilities of speech, 0 to 1, of each 32 ms that (n,) int16 samples at 16 kHz complete. A cancelled call's
        samples count, too.

        Raises:
            DetectorError: the detectors are closed, or the model failed.
        """
        sound = np.concatenate([self._rest, samples])
        steps = sound[: len(sound) // STEP * STEP].reshape(-1, STEP)
        self._rest = sound[steps.size :]
        if not len(steps):
            return []
        self.heard_ms += len(steps) * STEP_MS
        job = _DetectorJob(self, steps)
        self._detectors.submit(job)
        return await asyncio.wrap_future(job.future)

    def close(self) -> None:
        """Frees the session's model state, some 3 MB."""
        self.closed = True
        with suppress(DetectorError):  # all are closed
            self._detectors.submit(_DetectorJob(self, np.empty((0, STEP), np.int16)))


@dataclass
class _DetectorJob:
    """Steps of one session, (n, STEP) int16, and the probabilities so far."""

    detector: SessionDetector
    steps: np.ndarray
    probabilities: list[float] = field(default_factory=list)
    future: Future[list[float]] = field(default_factory=Future)


class Detectors:
    """The detectors of all sessions, and their thread.

    Args:
        model_file: Silero's ONNX file; None: the packaged model.

    Raises:
        ModelFileError: as `OnnxSilero`.
    """

    def __init__(self, model_file: Path | None = None) -> None:
        self._model = PackagedSilero() if model_file is None else OnnxSilero(model_file)
        self._jobs: SimpleQueue[_DetectorJob | None] = SimpleQueue()
        self._closed = False
        self._thread = Thread(target=self._run, name="speech-detector", daemon=True)
        self._thread.start()

    def open(self, begin_ms: float = 0.0) -> SessionDetector:
        return SessionDetector(self, begin_ms)

    def submit(self, job: _DetectorJob) -> None:
        """For `SessionDetector`. Raises DetectorError: closed."""
        if self._closed:
            raise DetectorError(_STOPS)
        job.future.set_running_or_notify_cancel()  # from now on a cancellation cannot reorder it
        self._jobs.put(job)

    def close(self) -> None:
        self._closed = True
        self._jobs.put(None)
        self._thread.join()

    def _run(self) -> None:
        waiting: list[_DetectorJob] = []
        while self._take(waiting):
            firsts = {job.detector: job for job in reversed(waiting)}
            self._round(list(firsts.values()))
            waiting = [job for job in waiting if not job.future.done()]
        for job in waiting:
            job.future.set_exception(DetectorError(_STOPS))

    def _take(self, waiting: list[_DetectorJob]) -> bool:
        """Adds all new jobs, and waits if there are none at all. False ends the thread."""
        try:
            while (job := self._jobs.get(block=not waiting)) is not None:
                waiting.append(job)
        except Empty:
            return True
        return False

    def _round(self, jobs: list[_DetectorJob]) -> None:
        """Does one step of each job, all of different sessions."""
        for job in jobs:
            if job.detector.closed:
                job.detector.state = None
                job.future.set_result(job.probabilities)
        working = [job for job in jobs if not job.future.done()]
        try:
            self._step(working)
        except Exception as error:  # whatever it is, the sessions get it, and the thread lives on
            for job in working:
                job.future.set_exception(DetectorError(f"speech could not be detected: {error}"))

    def _step(self, jobs: list[_DetectorJob]) -> None:
        awake = [job for job in jobs if self._is_awake(job)]
        for job in awake:
            if job.detector.state is None:
                job.detector.state = self._model.new_state()
        if awake:
            steps = np.stack([job.steps[len(job.probabilities)] for job in awake])
            probabilities = self._model.step([job.detector.state for job in awake], steps)
            for job, probability in zip(awake, probabilities, strict=True):
                job.probabilities.append(probability)
        for job in jobs:
            if len(job.probabilities) == len(job.steps):
                job.future.set_result(job.probabilities)

    def _is_awake(self, job: _DetectorJob) -> bool:
        """Whether the model has to hear the next step. If not, nobody speaks in it."""
        detector = job.detector
        detector.zero_steps = 0 if job.steps[len(job.probabilities)].any() else detector.zero_steps + 1
        if detector.zero_steps <= _SLEEPS_AFTER_STEPS:
            return True
        detector.state = None
        job.probabilities.append(0.0)
        return False
