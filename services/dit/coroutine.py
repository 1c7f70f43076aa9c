"""Stops a diffusers pipeline where it calls a model, and resumes it later.

A pipeline's `__call__` runs as a greenlet. Whenever it calls its transformer or its VAE, control returns to the engine,
which runs such calls of several pipelines as one.
"""

import contextlib
import functools
import inspect
from collections.abc import Callable, Hashable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from diffusers.pipelines.pipeline_utils import DiffusionPipeline
from greenlet import getcurrent, greenlet

from services.diffusion.families import NO_BATCHING, BatchRules, family_of
from services.diffusion.loaded import denoisers
from services.diffusion.own import OwnPipeline
from services.diffusion.pipelines import PipelineStopped
from services.dit.batching import DECODE_RULES, Arguments, Unbatchable, content, key_of, samples_of


class BatchPoint:
    """A function of a model that pipelines stop at. `reads`: before denoising, for the prompt."""

    def __init__(self, name: str, function: Callable[..., Any], rules: BatchRules, reads: bool = False) -> None:
        self.name, self.function, self.rules, self.reads = name, function, rules, reads
        self._signature = inspect.signature(function)

    def bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        return self._signature.bind(*args, **kwargs).arguments

    def run(self, arguments: Arguments) -> Any:
        bound = inspect.BoundArguments(self._signature, arguments)  # type: ignore[arg-type]  # a dict is ordered
        return self.function(*bound.args, **bound.kwargs)


CacheContext = Callable[[str], AbstractContextManager[Any]]
"""A pipeline's `cache_context`. Its argument, a prefix of the call's name, tells several pipelines' caches apart."""


@dataclass(frozen=True)
class ModelCall:
    """What a stopped pipeline waits for. Calls with equal keys can be run as one; without a key it runs alone."""

    point: BatchPoint
    arguments: Arguments
    context: CacheContext | None
    key: Hashable
    samples: int


class _RandomState:
    """torch's global random state as one pipeline has it, after `torch.manual_seed`. Some draw from it, as where a
    control image is encoded, whatever generator they are given."""

    def __init__(self, seed: int, device: torch.device) -> None:
        self._generators = [torch.default_generator]
        if device.type == "cuda":
            index = torch.cuda.current_device() if device.index is None else device.index
            self._generators.append(torch.cuda.default_generators[index])
        self._states = [torch.Generator(each.device).manual_seed(seed).get_state() for each in self._generators]

    @contextlib.contextmanager
    def own(self) -> Iterator[None]:
        others = self._exchange(self._states)
        try:
            yield
        finally:
            self._states = self._exchange(others)

    def _exchange(self, states: list[torch.Tensor]) -> list[torch.Tensor]:
        """The states up to now."""
        before = [each.get_state() for each in self._generators]
        for generator, state in zip(self._generators, states, strict=True):
            generator.set_state(state)
        return before


class PipelineTask(greenlet):
    """A pipeline's call that can be stopped.

    Args:
        body: calls the pipeline and returns its result.
        seed: of torch's global random state while it runs.
        device: where its models run.

    Attributes:
        call: what it waits for; None before its start, and when it has ended.
        replay: while set, the denoiser's calls return it, and the pipeline does not stop.
        last: result of the latest denoising call.
    """

    def __init__(self, body: Callable[[], Any], seed: int, device: torch.device) -> None:
        super().__init__(body)
        self._random = _RandomState(seed, device)
        self.call: ModelCall | None = None
        self.context: CacheContext | None = None
        self.replay: Any = None
        self.last: Any = None
        self._digests: dict[int, tuple[torch.Tensor, bytes]] = {}

    def resume(self, value: Any = None) -> Any:
        """Goes on to the next call, or to the end (`dead`) and its result. Raises what the pipeline raises."""
        self.call = None
        with self._random.own():
            return self.switch() if not self else self.switch(value)

    def stop(self) -> None:
        """Ends the pipeline and frees what it holds."""
        if self and not self.dead:
            with contextlib.suppress(PipelineStopped):
                self.throw(PipelineStopped)
        self.call = self.last = None
        self._digests.clear()

    def wait_for(self, point: BatchPoint, arguments: Arguments) -> Any:
        """Stops the calling pipeline until the engine has the result."""
        samples, key = 1, None
        with contextlib.suppress(Unbatchable):
            samples = samples_of(point.rules, arguments)
            key = (point.name, key_of(point.rules, arguments, self._digest))
        self.call = ModelCall(point, arguments, self.context, key, samples)
        return self.parent.switch(None)  # type: ignore[union-attr]  # the engine's greenlet

    def _digest(self, tensor: torch.Tensor) -> bytes:
        """Digest of a tensor that most pipelines pass unchanged with every step."""
        known = self._digests.get(id(tensor))
        if known is None or known[0] is not tensor:
            known = self._digests[id(tensor)] = (tensor, content(tensor))
        return known[1]


def install(pipeline: DiffusionPipeline) -> None:
    """Makes pipelines stop at the models of `pipeline`. Offloading, caches, compilation and parallelism, which replace
    the models' functions, come before. Calls from outside of a `PipelineTask` are not stopped."""
    family = family_of(type(pipeline))
    module: Any
    for name, module in denoisers(pipeline).items():
        module.forward = _stopping(BatchPoint(name, module.forward, family.batching), denoises=True)
        if hasattr(module, "cache_context"):
            module.cache_context = _record_context(module.cache_context)
    readers = type(pipeline).readers if isinstance(pipeline, OwnPipeline) else ()
    for name in readers:
        module = getattr(pipeline, name)
        module.forward = _stopping(BatchPoint(name, module.forward, NO_BATCHING, reads=True), denoises=False)
    vae = getattr(pipeline, "vae", None)
    if vae is not None and family.listed:  # others may pass what no rule is about
        vae.decode = _stopping(BatchPoint("vae.decode", _plain_decode(vae.decode), DECODE_RULES), denoises=False)


def _plain_decode(decode: Callable[..., Any]) -> Callable[..., Any]:
    """`decode` with the signature that a decorator hides. No VAE here draws from `generator`."""

    def plain(z: torch.Tensor, return_dict: bool = True, generator: Any = None) -> Any:
        return decode(z, return_dict=return_dict)

    return plain


def _stopping(point: BatchPoint, denoises: bool) -> Callable[..., Any]:
    @functools.wraps(point.function)  # pipelines look at its signature
    def call(*args: Any, **kwargs: Any) -> Any:
        task = getcurrent()
        if not isinstance(task, PipelineTask):
            return point.function(*args, **kwargs)
        if task.replay is not None:
            return task.replay if denoises else point.function(*args, **kwargs)
        result = task.wait_for(point, point.bind(args, kwargs))
        if denoises:
            task.last = result
        return result

    return call


def _record_context(cache_context: Callable[..., Any]) -> Callable[..., Any]:
    @contextlib.contextmanager
    def record(name: str, **arguments: Any) -> Iterator[None]:
        task = getcurrent()
        if not isinstance(task, PipelineTask):
            with cache_context(name, **arguments):
                yield
            return
        task.context = lambda owner: cache_context(f"{owner}{name}", **arguments)  # the engine enters it for a call
        try:
            yield
        finally:
            task.context = None

    return record
