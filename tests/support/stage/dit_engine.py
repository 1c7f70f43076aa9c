"""Drives the dit's engine in this process, and diffusers beside it."""

import queue
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from diffusers.models.attention_dispatch import _AttentionBackendRegistry
from diffusers.pipelines.pipeline_utils import DiffusionPipeline

from quartet.v1 import dit_pb2
from services.diffusion.checks import check
from services.diffusion.pictures import Pictures
from services.diffusion.request import OutputSpec, resolve
from services.dit.__main__ import start_engine, warm_up
from services.dit.config import DitSettings
from services.dit.engine import DitEngine
from services.dit.output import Done, Event, Failed, Output, Progress

TIMEOUT_S = 500.0  # a guard against hanging: a compilation takes minutes on a busy machine


@dataclass
class Watched:
    """An output in the engine and what was heard of it."""

    output: Output
    events: list[Event] = field(default_factory=list)

    @property
    def data(self) -> torch.Tensor:
        """The result."""
        last = self.events[-1]
        assert isinstance(last, Done), last
        return last.data

    @property
    def soundtrack(self) -> torch.Tensor | None:
        """Of a video."""
        last = self.events[-1]
        assert isinstance(last, Done), last
        return last.soundtrack

    @property
    def batches(self) -> list[int]:
        """How many outputs shared each of its steps."""
        return [event.batch for event in self.events if isinstance(event, Progress)]


class Bench:
    """An engine on one checkpoint.

    Attributes:
        log: (output, event) of all outputs, in the order of the engine's thread.
    """

    def __init__(self, engine: DitEngine) -> None:
        self.engine, self.info = engine, engine.models.info
        self.log: list[tuple[Watched, Event]] = []
        self._changed: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._least = 0
        self._admit, engine._admit = engine._admit, self._admit_together

    def orders(
        self,
        start: dit_pb2.DitStart,
        images: Sequence[Any] = (),
        mask: Any = None,
        controls: Sequence[Any] = (),
        video: Sequence[Any] = (),
        control_video: Sequence[Any] = (),
    ) -> list[OutputSpec]:
        """Those of a request, for floats."""
        start.pixel_format = dit_pb2.PIXEL_FORMAT_FLOAT32
        for _ in range(len(images) - len(start.images)):
            start.images.add()
        if mask is not None:
            start.mask.SetInParent()
        for _ in controls:
            start.control_images.add()
        for name, frames in (("video", video), ("control_video", control_video)):
            if frames:
                getattr(start, name).SetInParent()
        check(start, self.info)
        pictures = Pictures(images, mask, controls, video, control_video)
        return resolve(start, pictures, self.engine.models, self.info)

    def begin_with(self, outputs: int) -> None:
        """The engine, which has nothing to do, begins again when so many wait: then they share its first step."""
        self._least = outputs

    def _admit_together(self) -> None:
        """In the engine's thread."""
        engine = self.engine
        if engine._waiting:
            while len(engine._waiting) < self._least and not engine._stopping:
                engine._take_in(block=True)
            self._least = 0
        self._admit()

    def submit_together(self, orders: Sequence[OutputSpec]) -> list[Watched]:
        """To an engine that has nothing to do: none of them begins before all are there."""
        self.begin_with(len(orders))
        return [self.submit(order) for order in orders]

    def submit(self, order: OutputSpec, hear: Callable[[Event], object] = lambda event: None) -> Watched:
        """`hear` is called in the engine's thread."""

        def emit(event: Event) -> None:
            watched.events.append(event)
            self.log.append((watched, event))
            self._changed.put(None)
            hear(event)

        watched = Watched(None)  # type: ignore[arg-type]  # events may come before submit returns
        watched.output = self.engine.submit(order, emit)
        return watched

    def wait(self, until: Callable[[], bool]) -> None:
        """Until a condition on events holds."""
        while not until():
            self._changed.get(timeout=TIMEOUT_S)

    def finish(self, watched: Sequence[Watched]) -> list[torch.Tensor]:
        """Their results, as soon as all are there."""
        self.wait(lambda: all(w.events and isinstance(w.events[-1], Done | Failed) for w in watched))
        return [w.data for w in watched]

    def make(self, orders: Sequence[OutputSpec]) -> list[torch.Tensor]:
        """All of them at once."""
        return self.finish([self.submit(order) for order in orders])

    def settle(self) -> None:
        """Returns when the engine, which has nothing to do, has left what it did: it says Done before that."""
        self.engine._inbox.put(None)
        end = time.monotonic() + TIMEOUT_S
        while not self.engine._inbox.empty():
            assert time.monotonic() < end
            time.sleep(0.001)


@contextmanager
def bench(checkpoint: Path, **settings: Any) -> Iterator[Bench]:
    """An engine that has one thread."""
    torch.set_num_threads(1)
    backend, _ = _AttentionBackendRegistry.get_active_backend()
    asked = DitSettings(model=str(checkpoint), **{"default_size": "64x64", **settings})
    engine = start_engine(asked)
    try:
        yield Bench(engine)
    finally:
        engine.stop()
        _AttentionBackendRegistry.set_active_backend(backend)  # diffusers keeps one for the whole process


def check_shared_steps(dit: Bench, orders: Sequence[OutputSpec]) -> None:
    """At its start the engine learns to share steps; then all of the orders, the least steps first, give within
    rounding what each gave alone before."""
    alone = [dit.make([each])[0] for each in orders]
    warm_up(dit.engine)
    assert (dit.info.batched, dit.info.not_batched) == (True, "")
    watched = dit.submit_together(orders)
    for mine, before in zip(dit.finish(watched), alone, strict=True):
        assert (mine - before).abs().max() < 1e-4
    assert set(watched[0].batches) == {len(orders)}


def reference(pipeline: Any, order: OutputSpec) -> torch.Tensor:
    """What diffusers makes of `order` with a pipeline of its own: (height, width, 3), (frames, height, width, 3) or
    (samples, channels)."""
    pipeline.set_progress_bar_config(disable=True)
    # Stable Audio's scheduler keeps the noise of its first call
    pipeline.scheduler = type(pipeline.scheduler).from_config(pipeline.scheduler.config)
    generator = torch.Generator("cpu").manual_seed(order.seed)
    sound = order.result == "audios"
    result = pipeline(**order.arguments, generator=generator, output_type="pt" if sound else "np")
    data = torch.as_tensor(result[order.result][0]).float()
    return data.T if sound else data


def fresh(checkpoint: Path) -> Any:
    """diffusers' own pipeline of a checkpoint."""
    return DiffusionPipeline.from_pretrained(checkpoint)
