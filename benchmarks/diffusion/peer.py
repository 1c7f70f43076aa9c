"""Plain diffusers, the named peer of dit.py, in a process of its own: a pipeline as `from_pretrained` gives it."""

import contextlib
import functools
import os
import time
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from benchmarks.diffusion.work import Job, Turn, as_integers, class_of


def serve(model: str, pipeline_class: str, dtype: str, device: str, log_file: Path, pipe: Connection) -> None:
    """The process: sends None when it has loaded, then a Turn for each Job that comes, until `pipe` is closed."""
    with log_file.open("wb") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    os.setpgid(0, 0)  # so that its CPU time can be told
    cls: Any = class_of(pipeline_class)
    pipeline: Any = cls.from_pretrained(model, dtype=getattr(torch, dtype)).to(device)
    pipeline.set_progress_bar_config(disable=True)
    peer = Peer(pipeline, device)
    pipe.send(None)
    with contextlib.suppress(EOFError):
        while True:
            pipe.send(peer.run(pipe.recv()))


class Peer:
    """A pipeline that is called."""

    def __init__(self, pipeline: Any, device: str) -> None:
        self._pipeline, self._cuda = pipeline, device.startswith("cuda")
        self._steps: list[Any] = []

    def run(self, job: Job) -> Turn:
        """Makes what `job` says. CPU time is not known here."""
        outputs: list[np.ndarray] = []
        marks: list[list[Any]] = []
        done_s: list[float] = []
        count = len(job.prompts)
        began_s = time.perf_counter()
        for members in [range(count)] if job.together else [range(i, i + 1) for i in range(count)]:
            outputs += self._call(job, members)
            done_s.append(time.perf_counter() - began_s)
            marks.append(self._steps)
        step_ms = median(self._step_ms(each) for each in marks)
        batch = float(count if job.together else 1)
        return Turn(done_s[-1], done_s[0], step_ms, mean_batch=batch, outputs=outputs)

    def _call(self, job: Job, members: range) -> list[np.ndarray]:
        """One call of the pipeline, for the outputs `members`."""
        self._watch_steps()
        arguments = dict(job.arguments)
        if job.negative is not None:
            arguments["negative_prompt"] = [job.negative] * len(members)
        sound = job.result == "audios"
        prompts = [job.prompts[i] for i in members]
        generators = [torch.Generator("cpu").manual_seed(job.seeds[i]) for i in members]
        alone = len(members) == 1  # some classes take no list
        result = self._pipeline(
            prompt=prompts[0] if alone else prompts,
            generator=generators[0] if alone else generators,
            output_type="pt" if sound else "np",
            **arguments,
        )
        found = result[job.result]
        if job.arguments.get("num_frames") and np.ndim(found) == 4:  # Cosmos 3's one video
            found = [found]
        made = [torch.as_tensor(each).float().cpu().numpy() for each in found]
        return [as_integers(each.T if sound else each) for each in made]

    def _watch_steps(self) -> None:
        """Has the end of each step noted, in `_steps`. Stable Audio's scheduler keeps the noise of its first call, so
        each call gets a new one."""
        cls = type(self._pipeline.scheduler)
        plain = cls.__bases__[0] if hasattr(cls, "is_watched") else cls
        scheduler = plain.from_config(self._pipeline.scheduler.config)
        steps: list[Any] = []

        @functools.wraps(plain.step)  # pipelines look at its signature
        def noted(own: Any, *args: Any, **kwargs: Any) -> Any:
            result = plain.step(own, *args, **kwargs)
            if own is scheduler:  # not a copy, which Cosmos 3 has for sound
                steps.append(self._now())
            return result

        scheduler.__class__ = type(plain.__name__, (plain,), {"step": noted, "is_watched": True})
        self._pipeline.scheduler, self._steps = scheduler, steps

    def _now(self) -> Any:
        """A point in time; of a GPU's own, as a call only queues its work there."""
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _step_ms(self, marks: list[Any]) -> float:
        if len(marks) < 2:
            return 0.0
        apart_ms = marks[0].elapsed_time(marks[-1]) if self._cuda else (marks[-1] - marks[0]) * 1000
        return apart_ms / (len(marks) - 1)
