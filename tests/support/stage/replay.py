"""CUDA graphs without CUDA: records the operators of a function and runs them again on the same tensors.

What a graph would get wrong goes wrong here too. A number that Python computed from data stays what it was at the
capture; a tensor that the function got from elsewhere is read where it was then; an output lies where it lay. What a
graph refuses is refused: operators whose result reaches the host, or whose shape depends on data. Memory of one capture
is another's too, as in a pool that graphs share: before a replay everything that any capture allocated is spoilt.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from services.common.engine.device import CapturedRun

_WAITS_FOR_HOST = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
_SPOILT = {torch.bool: True, torch.int64: 3, torch.int32: 3}  # of a floating dtype: NaN


class CaptureError(RuntimeError):
    """The function does what no CUDA graph can hold."""


@dataclass(frozen=True)
class _Call:
    """One operator with its arguments and what it returned; `fresh` are results in memory of their own."""

    function: Any
    arguments: tuple
    keywords: dict
    fresh: list[tuple[int, torch.Tensor]]

    def run(self) -> None:
        results = self.function(*self.arguments, **self.keywords)
        if self.fresh:
            leaves = _leaves(results)
            for index, kept in self.fresh:
                kept.copy_(leaves[index])


class _Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[_Call] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if _waits_for_host(func) and not _is_lookup(func, args):
            raise CaptureError(f"{func} waits for the host")
        if func.namespace == "aten" and func._opname == "lift_fresh":
            raise CaptureError("a tensor is made of Python's values: a graph would keep those of its capture")
        given = {*_memories(args), *_memories(kwargs.values())}
        results = func(*args, **kwargs)
        fresh = [
            (index, result)
            for index, result in enumerate(_leaves(results))
            if isinstance(result, torch.Tensor) and given.isdisjoint(_memories((result,)))
        ]
        self.calls.append(_Call(func, args, kwargs, fresh))
        return results


def _is_lookup(function: Any, arguments: tuple) -> bool:
    """Whether it indexes by numbers: only a mask makes the result's shape depend on data."""
    return function is torch.ops.aten.index.Tensor and all(
        index.dtype not in (torch.bool, torch.uint8) for index in _leaves(arguments[1]) if index is not None
    )


@cache
def _waits_for_host(function: Any) -> bool:
    return not _WAITS_FOR_HOST.isdisjoint(function.tags)


# torch's own, which knows more kinds of trees, takes longer than the operators.
def _leaves(values: Any) -> list[Any]:
    """What lists and tuples in `values` hold, or `values`."""
    if isinstance(values, list | tuple):
        return [leaf for each in values for leaf in _leaves(each)]
    return [values]


def _memories(values: Iterable[Any]) -> Iterator[int]:
    """Addresses of what holds the memory of every tensor in `values`, and in lists and tuples in it."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value.untyped_storage()._cdata
        elif isinstance(value, list | tuple):
            yield from _memories(value)


class ReplayedOps:
    """A `Capturer` for a CPU.

    Attributes:
        captures: how many functions were captured.
    """

    def __init__(self) -> None:
        self.captures = 0
        self._in_use: list[torch.Tensor] = []  # what the last capture or replay wrote; all else is spoilt

    def capture(self, run: Callable[[], torch.Tensor]) -> CapturedRun:
        """Records `run`.

        Raises:
            CaptureError: a graph could not hold it.
        """
        self.captures += 1
        run()  # as a warm-up does
        with _Recorder() as recorder:
            output = run()
        allocated = [tensor for call in recorder.calls for _, tensor in call.fresh]
        self._spoil_before(allocated)

        def replay() -> None:
            self._spoil_before(allocated)
            for call in recorder.calls:
                call.run()

        return CapturedRun(torch.inference_mode()(replay), output)

    def _spoil_before(self, allocated: list[torch.Tensor]) -> None:
        for tensor in self._in_use:
            tensor.fill_(_SPOILT.get(tensor.dtype, float("nan")))
        self._in_use = allocated
