"""Continuous batching of denoising steps: one thread runs what many pipelines wait for."""

import queue
import time
from collections.abc import Callable, Sequence
from typing import Any

import structlog
import torch
from prometheus_client import Gauge

from services.common.engine.thread import ThreadedEngine
from services.common.errors import StageError
from services.common.telemetry.metrics import STEP_BATCH, STEP_SECONDS
from services.diffusion.pipelines import PipelineStopped, explain
from services.diffusion.request import OutputSpec
from services.dit.batching import Unbatchable, join, split
from services.dit.config import DitSettings
from services.dit.coroutine import BatchPoint, install
from services.dit.learning import MadeCall, learn
from services.dit.models import Models, ModelsLost
from services.dit.output import Done, Encoded, Event, Failed, Output, Started
from services.dit.turns import TurnsCheck

RUNNING = Gauge("quartet_dit_outputs_running", "Outputs between their first step and their end")
WAITING = Gauge("quartet_dit_outputs_waiting", "Outputs that wait for others to end")

log = structlog.get_logger()


class DitEngine(ThreadedEngine):
    """Makes many outputs at a time.

    The output that had least engine time so far is next. Others that wait for the same model with the same shapes and
    adapters share the step, up to `max_batch`. An output begins at the level of the least served, so a picture that
    comes during a video waits for one step of the video.
    """

    def __init__(self, models: Models, settings: DitSettings, on_fatal: Callable[[BaseException], object]) -> None:
        super().__init__("dit", models.device, on_fatal, title="the diffusion stage")
        self.models = models
        self._max_running_outputs, self._max_batch = settings.max_running_outputs, settings.max_batch
        self._inbox: queue.SimpleQueue[Output | TurnsCheck | Exception | None] = queue.SimpleQueue()
        self._waiting: list[Output] = []
        self._running: list[Output] = []
        self._used: str | None = None  # what the latest call was for, as `Output.waits_for`
        self._broken: Exception | None = None
        self._made: list[MadeCall] | None = None  # during a check: the calls that ran alone
        RUNNING.set_function(lambda: len(self._running))
        WAITING.set_function(lambda: len(self._waiting))
        install(models.pipeline)
        models.watch(self._inbox.put, on_fatal)
        self._thread.start()

    def submit(self, spec: OutputSpec, emit: Callable[[Event], None]) -> Output:
        """Queues an output.

        Args:
            emit: called in the engine's thread, last with Done or Failed; never after `cancel` took effect.

        Raises:
            Unavailable: the engine failed or is stopped.
        """
        output = Output(spec, emit)
        with self.changed:
            self._check_running()
            self._inbox.put(output)
        return output

    def cancel(self, output: Output) -> None:
        """Frees its memory at the next step."""
        output.cancelled = True
        self._inbox.put(None)

    def check_turns(self, specs: Sequence[OutputSpec], like: OutputSpec | None = None) -> str:
        """Has outputs made one at a time if those of `specs`, two, made in turns, are others than alone; else looks
        whether they can share steps (`info.batched`). Blocks. Call it before there are outputs. See `TurnsCheck`.

        Returns:
            Why they are made one at a time; empty: they are not.

        Raises:
            StageError: they cannot be made.
            ValueError: one changes those after it.
            TimeoutError: they take too long.
        """
        check = TurnsCheck(specs, like)
        self._inbox.put(check)
        if reason := check.reason():
            self._max_running_outputs = 1
            self.models.info.one_at_a_time = reason
            self.models.info.not_batched = "one output is made at a time"
        return reason

    def _wake(self) -> None:
        self._inbox.put(None)

    # What follows runs in the engine's thread.

    @torch.no_grad()
    def _work(self) -> None:
        self._take_in(block=not self._running and not self._waiting)
        if self._broken is not None:
            raise self._broken
        self._drop_cancelled()
        self._admit()
        if self._running and not self._stopping:
            self._advance(self._next())

    def _take_in(self, block: bool) -> None:
        """Reads the inbox."""
        while block or not self._inbox.empty():
            entry = self._inbox.get()
            block = False
            if isinstance(entry, Output):
                self._waiting.append(entry)
            elif isinstance(entry, TurnsCheck):
                entry.run(self._take_turns, self._learn)
            elif entry is not None:
                self._broken = entry

    def _drop_cancelled(self) -> None:
        for output in [output for output in self._running if output.cancelled]:
            self._end(output)
        self._waiting = [output for output in self._waiting if not output.cancelled]

    def _admit(self) -> None:
        while self._waiting and len(self._running) < self._max_running_outputs:
            output = self._waiting.pop(0)
            output.virtual_time_s = min((other.virtual_time_s for other in self._running), default=0.0)
            self._running.append(output)
            output.begin(self.models.device)
            output.emit(Started())

    def _take_turns(self, outputs: Sequence[Output]) -> list[MadeCall]:
        """Makes `outputs` in turns, each a call, from the first. Returns the calls."""
        made = self._made = []
        for output in outputs:
            self._running.append(output)
            output.begin(self.models.device)
        try:
            while self._running:
                for output in list(self._running):
                    self._advance(output)
        finally:
            self._made = None
        return made

    def _learn(self, some: Sequence[MadeCall], others: Sequence[MadeCall]) -> bool:
        """Has steps shared whose joined calls give what each gives alone. Returns whether other calls could show it."""
        info = self.models.info
        if info.batched or self.models.cached:  # by the table's rules, or not for a reason that is told
            return False
        if self._max_batch == 1:
            info.not_batched = "max_batch=1"
            return False
        try:
            learned = learn(some, others, self._try)
        except Unbatchable as reason:
            info.not_batched = str(reason)
            return True
        for point, rules in learned.items():
            point.rules = rules
        info.batched, info.not_batched = True, ""
        return False

    def _try(self, point: BatchPoint, arguments: dict[str, Any]) -> Any:
        """A joined call, of rules that may be wrong. Raises Unbatchable."""
        try:
            with self.models.set_up(()):
                return self.models.run(point, arguments, ())
        except Exception as error:
            if _breaks_the_engine(error):
                raise
            said = str(error).partition("\n")[0]
            raise Unbatchable(f"two joined calls of {point.name} fail: {type(error).__name__}: {said}") from error

    def _next(self) -> Output:
        """The least served, and of several the one that has yet to begin. Where one model is on the device at a time,
        those that wait for it go first. An output does not begin while another reads the prompt of both."""
        stays = self.models.one_at_a_time
        readers = [output for output in self._running if output.reads]
        return min(
            (each for each in self._running if each.call is not None or not _waits_for_one(each, readers)),
            key=lambda output: (stays and output.waits_for != self._used, output.virtual_time_s, bool(output.call)),
        )

    def _advance(self, output: Output) -> None:
        """Starts `output`, or runs its call with like ones."""
        call, level_s = output.call, output.virtual_time_s
        self._used = output.waits_for
        if call is None:
            self._resume(output, None)
            # Reading a prompt is paid for after the first step, so that a new request shows its first step soon.
            output.deferred_s, output.virtual_time_s = output.virtual_time_s - level_s, level_s
            return
        batch = [output]
        if call.key is not None and self.models.info.batched:
            alike = [
                other
                for other in self._running
                if other is not output
                and other.call is not None
                and (other.call.key, other.spec.loras) == (call.key, output.spec.loras)
            ]
            batch += sorted(alike, key=lambda other: other.virtual_time_s)[: self._max_batch - 1]
        started = time.monotonic()
        results = self._results(batch)
        spent_s = time.monotonic() - started
        STEP_SECONDS.labels("dit", call.point.name).observe(spent_s)
        STEP_BATCH.labels("dit", call.point.name).observe(len(batch))
        for member, result in zip(batch, results, strict=True):
            member.virtual_time_s += spent_s / len(batch) + member.deferred_s
            member.deferred_s = 0.0
            member.batch = len(batch)
            if result is not None:
                self._resume(member, result)

    def _results(self, batch: list[Output]) -> list[Any]:
        """The result of each output's call; None for a failed one."""
        try:
            return self._compute(batch)
        except Exception as error:
            if len(batch) == 1 or _breaks_the_engine(error):
                self._fail(batch[0], error)
                return [None]
            log.warning("a shared step failed; its outputs go on alone", outputs=len(batch), error=repr(error))
            return [result for output in batch for result in self._results([output])]

    def _compute(self, batch: list[Output]) -> list[Any]:
        calls = [output.call for output in batch if output.call is not None]
        point = calls[0].point
        arguments = join(point.rules, [call.arguments for call in calls])
        made = [] if self._made is None else [MadeCall.before(point, call.arguments) for call in calls]
        with self.models.set_up(batch[0].spec.loras, batch[0], calls[0]):
            result = self.models.run(point, arguments, batch[0].spec.loras)
        if self.models.device.type == "cuda":
            torch.cuda.synchronize(self.models.device)  # so that time spent is time spent
        if self._made is not None:
            self._made += [call.after(result) for call in made]
        return split(result, [call.samples for call in calls], point.rules.layered)

    def _resume(self, output: Output, value: Any) -> None:
        """Lets the pipeline go on to its next call or its end."""
        started, task = time.monotonic(), output.task
        assert task is not None
        try:
            with self.models.set_up(output.spec.loras):
                result = task.resume(value)
        except PipelineStopped:
            self._end(output)
            return
        except Exception as error:
            self._fail(output, error)
            return
        output.virtual_time_s += time.monotonic() - started
        if output.call is not None and not output.reads and not output.encoded:
            output.encoded = True
            output.emit(Encoded())
        if task.dead:
            assert isinstance(result, Done)
            self._end(output)
            output.emit(result)

    def _fail(self, output: Output, error: Exception) -> None:
        if _breaks_the_engine(error):
            raise error
        self._end(output)
        output.emit(Failed(explain(error)))

    def _end_all(self, error: StageError) -> None:
        self._take_in(block=False)
        for output in [*self._running, *self._waiting]:
            self._end(output)
            output.emit(Failed(error))
        self._waiting.clear()
        self.models.close()

    def _end(self, output: Output) -> None:
        if output in self._running:
            self._running.remove(output)
        output.end()
        self.models.forget(output)


def _waits_for_one(output: Output, readers: Sequence[Output]) -> bool:
    return any(output.spec.conditioning.shares_with(other.spec.conditioning) for other in readers)


def _breaks_the_engine(error: Exception) -> bool:
    """Whether nothing can run any more, as after an index out of bounds in CUDA."""
    broken = (ModelsLost, torch.AcceleratorError)
    return isinstance(error, broken) and not isinstance(error, torch.OutOfMemoryError)
