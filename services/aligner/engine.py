"""Runs an aligner: sounds that wait are computed together, step by step, in a thread of the engine's own."""

import asyncio
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import torch

from services.aligner.config import AlignerSettings
from services.aligner.family import RATE_HZ, Sound, WordAligner, WordTimes, load_model
from services.aligner.metrics import AUDIO_SECONDS, STEP_BATCH, STEP_SECONDS, WORDS
from services.common.engine.device import make_current, prepared_device


class _Waiting(NamedTuple):
    sound: Sound
    result: "asyncio.Future[list[WordTimes]]"


class AlignerEngine:
    """For one event loop, in which it was made; `load_engine` makes it.

    Attributes:
        model: that it runs.
    """

    def __init__(self, model: WordAligner, settings: AlignerSettings) -> None:
        self.model = model
        self._settings = settings
        self._waiting: deque[_Waiting] = deque()
        self._thread = ThreadPoolExecutor(1, "aligner-engine", make_current, (torch.device(model.device),))
        self._steps: asyncio.Task[None] | None = None

    async def align(self, sound: Sound) -> list[WordTimes]:
        """The times of a sound's words. A cancelled sound leaves the queue; a step that has begun ends.

        Raises:
            Exception: the model failed at the step.
        """
        if not sound.words:
            return []
        waiting = _Waiting(sound, asyncio.get_running_loop().create_future())
        self._waiting.append(waiting)
        if self._steps is None or self._steps.done():
            self._steps = asyncio.create_task(self._work())
        return await waiting.result

    def close(self) -> None:
        if self._steps is not None:
            self._steps.cancel()
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def _work(self) -> None:
        """Steps, until nothing waits."""
        while batch := self._next_batch():
            try:
                loop = asyncio.get_running_loop()
                times = await loop.run_in_executor(self._thread, self._step, [each.sound for each in batch])
            except Exception as error:  # raised again where each sound is awaited
                for waiting in batch:
                    if not waiting.result.done():
                        waiting.result.set_exception(error)
                continue
            for waiting, found in zip(batch, times, strict=True):
                if not waiting.result.done():  # else it was cancelled
                    waiting.result.set_result(found)

    def _next_batch(self) -> list[_Waiting]:
        """The sounds that came first, as many as fit; those that nobody waits for are dropped."""
        batch, longest = list[_Waiting](), 0
        while self._waiting and len(batch) < self._settings.max_batch_sounds:
            following = self._waiting[0]
            if following.result.done():
                self._waiting.popleft()
                continue
            wider = max(longest, len(following.sound.samples))
            if batch and wider * (len(batch) + 1) > self._settings.max_batch_audio_s * RATE_HZ:
                break
            longest = wider
            batch.append(self._waiting.popleft())
        return batch

    def _step(self, sounds: Sequence[Sound]) -> list[list[WordTimes]]:
        """In the engine's thread."""
        with torch.inference_mode(), STEP_SECONDS.time():
            times = self.model.align(sounds)
        STEP_BATCH.observe(len(sounds))
        AUDIO_SECONDS.inc(sum(len(sound.samples) for sound in sounds) / RATE_HZ)
        WORDS.inc(sum(map(len, times)))
        return [_in_order(each) for each in times]


def _in_order(times: Sequence[WordTimes]) -> list[WordTimes]:
    """No word ends before it begins, or begins before the one before it."""
    found, last = list[WordTimes](), 0
    for begin, end in times:
        last = max(last, begin)
        found.append(WordTimes(last, max(last, end)))
    return found


def load_engine(settings: AlignerSettings) -> AlignerEngine:
    """The engine of the settings' checkpoint. Blocks.

    Raises:
        ValueError: no such device, no such checkpoint, or no aligner's.
        OSError: files are missing.
    """
    return AlignerEngine(load_model(settings.model, prepared_device(settings.device), settings.dtype), settings)
