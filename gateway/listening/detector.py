"""Detects speech for many sessions in one thread.

In each round, every session with audio gets one step of 32 ms: a client that sends minutes at once delays no other.
More threads would not help: Silero's library keeps Python's lock."""

import asyncio
from collections import deque
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any, Self

import numpy as np

from gateway.listening.detector_models import Model, OnnxSilero, PackagedSilero
from gateway.listening.silero import STEP

STEP_MS = 32  # of audio, with one probability of speech
_STOPS = "the gateway stops"


class DetectorError(Exception):
    """Speech could not be detected; says why."""


class SessionDetector:
    """Detects the speech of one session. `Detectors.open` makes it. `heard_ms` is the end of the last step
    submitted."""

    def __init__(self, detectors: "Detectors", begin_ms: float) -> None:
        self._detectors, self._rest = detectors, np.empty(0, np.int16)
        self.heard_ms = begin_ms
        self.state: Any = None  # belongs to the thread
        self.closed = False

    async def add(self, samples: np.ndarray) -> list[float]:
        """Probabilities of speech, 0 to 1, of each 32 ms that these samples complete. A cancelled call's samples count,
        too.

        Args:
            samples: (n,) int16 at 16 kHz, next to those before.

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
    """Waiting steps of one session.

    Attributes:
        steps: (n, STEP) int16.
        probabilities: of the first steps, so far.
    """

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
        self._model: Model = PackagedSilero() if model_file is None else OnnxSilero(model_file)
        self._jobs: SimpleQueue[_DetectorJob | None] = SimpleQueue()
        self._closed = False
        self._thread = Thread(target=self._run, name="speech-detector", daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def open(self, begin_ms: float = 0.0) -> SessionDetector:
        """Opens a detector for audio that begins at `begin_ms`."""
        return SessionDetector(self, begin_ms)

    def submit(self, job: "_DetectorJob") -> None:
        """Queues a job of a `SessionDetector`. Raises DetectorError: closed."""
        if self._closed:
            raise DetectorError(_STOPS)
        job.future.set_running_or_notify_cancel()  # from now on a cancellation cannot reorder it
        self._jobs.put(job)

    def close(self) -> None:
        self._closed = True
        self._jobs.put(None)
        self._thread.join()

    def _run(self) -> None:
        waiting: dict[SessionDetector, deque[_DetectorJob]] = {}  # by session, each one's in order
        while self._take(waiting):
            self._round(waiting)
        for job in (job for jobs in waiting.values() for job in jobs):
            job.future.set_exception(DetectorError(_STOPS))

    def _take(self, waiting: dict[SessionDetector, deque[_DetectorJob]]) -> bool:
        """Takes all new jobs, and waits if there are none at all. False ends the thread."""
        try:
            job = self._jobs.get(block=not waiting)
            while job is not None:
                waiting.setdefault(job.detector, deque()).append(job)
                job = self._jobs.get_nowait()
        except Empty:
            return True
        return False

    def _round(self, waiting: dict[SessionDetector, deque[_DetectorJob]]) -> None:
        closed = [jobs[0] for detector, jobs in waiting.items() if detector.closed]
        for job in closed:
            job.detector.state = None
        self._end(waiting, closed)
        jobs = [jobs[0] for detector, jobs in waiting.items() if not detector.closed]
        if not jobs:
            return
        steps = np.stack([job.steps[len(job.probabilities)] for job in jobs])
        try:
            for job in jobs:
                if job.detector.state is None:
                    job.detector.state = self._model.new_state()
            probabilities = self._model.step([job.detector.state for job in jobs], steps)
        except Exception as error:  # whatever it is, the sessions get it, and the thread lives on
            self._end(waiting, jobs, DetectorError(f"speech could not be detected: {error}"))
            return
        for job, probability in zip(jobs, probabilities, strict=True):
            job.probabilities.append(probability)
        self._end(waiting, [job for job in jobs if len(job.probabilities) == len(job.steps)])

    def _end(
        self,
        waiting: dict[SessionDetector, deque[_DetectorJob]],
        jobs: list[_DetectorJob],
        error: Exception | None = None,
    ) -> None:
        for job in jobs:
            queue = waiting[job.detector]
            queue.popleft()
            if not queue:
                del waiting[job.detector]
            if error is None:
                job.future.set_result(job.probabilities)
            else:
                job.future.set_exception(error)
