"""How calls of a model that no row is about are joined: guessed from calls that were made, and checked before use.

An argument is judged by its shape. Calls of two outputs are then run as one, in both orders, and each one's part of the
result is compared with what it was alone. Where a model mixes its samples, or reads one for all, the parts differ.
"""

import itertools
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from diffusers.utils.outputs import BaseOutput
from torch.utils._pytree import tree_leaves, tree_map_only  # diffusers registers its outputs there

from services.diffusion.families import BatchRules
from services.dit.batching import Arguments, Unbatchable, are_layers, content, join, key_of, samples_of, split
from services.dit.coroutine import BatchPoint

Run = Callable[[BatchPoint, Arguments], Any]


@dataclass(frozen=True)
class MadeCall:
    """A call that ran alone, and its result: copies, as models empty lists and pipelines change tensors in place."""

    point: BatchPoint
    arguments: Arguments
    result: Any = None

    @classmethod
    def before(cls, point: BatchPoint, arguments: Arguments) -> "MadeCall":
        return cls(point, _copied(arguments))

    def after(self, result: Any) -> "MadeCall":
        return replace(self, result=_copied(result))

    @property
    def samples(self) -> int:
        """Raises Unbatchable."""
        if isinstance(self.result, list):
            return len(self.result)
        first = next(iter(_leaves(self.result)), None)
        if first is None or not first.dim():
            raise Unbatchable(f"the result of {self.point.name} has no samples")
        return first.shape[0]


Pair = tuple[MadeCall, MadeCall]


def learn(some: Sequence[MadeCall], others: Sequence[MadeCall], run: Run) -> dict[BatchPoint, BatchRules]:
    """The rules for each function that both outputs call.

    Args:
        some, others: the calls of two outputs, which differ in prompt, noise and number of steps.
        run: calls a function. Raises Unbatchable if the function fails.

    Raises:
        Unbatchable: says why calls of one of them cannot be joined.
    """
    learned: dict[BatchPoint, BatchRules] = {}
    for point in dict.fromkeys(call.point for call in some):
        theirs = [call for call in others if call.point is point]
        learned[point] = _learn([call for call in some if call.point is point], theirs, run)
    return learned


def _learn(some: Sequence[MadeCall], others: Sequence[MadeCall], run: Run) -> BatchRules:
    reason = f"no calls of {some[0].point.name} for two outputs have like arguments"
    for rules, pair in _guesses(some, others):
        try:
            reason = _compared(rules, pair, run)
        except Unbatchable as failed:
            reason = str(failed)
        if not reason:
            return rules
    raise Unbatchable(reason)


def _guesses(some: Sequence[MadeCall], others: Sequence[MadeCall]) -> Iterator[tuple[BatchRules, Pair]]:
    """Rules, and a call of each output that they join; the likeliest first.

    Raises:
        Unbatchable: an argument is of no kind that can be joined.
    """
    seen: dict[str, list[tuple[Any, int]]] = {}
    for call in (*some, *others):
        for name, value in _named(call.arguments):
            seen.setdefault(name, []).append((value, call.samples))
    kinds = {name: _kind(name, values) for name, values in seen.items()}
    rows = next((name for name, kind in kinds.items() if kind == "rows" and name in some[0].arguments), None)
    if rows is None:
        raise Unbatchable(f"no argument of {some[0].point.name} has an entry for each sample")

    def of(kind: str) -> frozenset[str]:
        return frozenset(name for name, its in kinds.items() if its == kind and name != rows)

    layered = any(_has_layers(call.result, call.samples) for call in (*some, *others))
    none = frozenset[str]()
    for one in dict.fromkeys((of("one"), none)):
        shared = of("shared") | of("one") - one
        loose = BatchRules(rows, shared, of("alike"), expanded=one, layers=of("layers"), layered=layered)
        if (pair := _alike(loose, some, others)) is None:
            continue
        # What both have may be read for the first sample only: it must be the same in all calls that are joined. By
        # chance, a tensor for all samples may have as many rows as there are samples.
        theirs = [{name: _digest(value) for name, value in _named(call.arguments)} for call in pair]
        same = frozenset(name for name, value in theirs[0].items() if theirs[1].get(name) == value)
        for once in dict.fromkeys((none, same & of("rows"))):
            shared, alike = loose.shared | once | same & one, loose.alike | (same & of("rows")) - once
            changes = {"shared": shared, "alike": alike, "expanded": one - same, "known": frozenset(kinds)}
            yield replace(loose, **changes), pair


def _named(arguments: Arguments, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Those of dictionaries as "name.key"."""
    for name, value in arguments.items():
        if isinstance(value, dict):
            yield from _named(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _kind(name: str, values: Sequence[tuple[Any, int]]) -> str:
    """How an argument is joined, by its values and the samples of their calls; "equal": it is not.

    Raises:
        Unbatchable: it is an object that cannot be compared.
    """
    given = [(value, samples) for value, samples in values if value is not None]
    if all(isinstance(value, bool | int | float | str) for value, _ in given):
        return "equal"
    if all(isinstance(value, torch.Tensor) for value, _ in given):
        if all(value.dim() and value.shape[0] == samples for value, samples in given):
            return "rows"
        return "one" if all(value.dim() == 0 or value.shape[0] in (1, n) for value, n in given) else "shared"
    if all(are_layers(value, samples) for value, samples in given):
        return "layers"
    if all(isinstance(value, list) and len(value) == samples for value, samples in given):
        return "rows" if all(isinstance(each, torch.Tensor) for value, _ in given for each in value) else "alike"
    if all(_is_plain(value) for value, _ in given):
        return "shared"
    kinds = sorted({type(value).__name__ for value, _ in given})
    raise Unbatchable(f"it is not known how to join the argument {name}, a {' or '.join(kinds)}")


def _has_layers(result: Any, samples: int) -> bool:
    """Whether there is a list of layers in it."""
    if isinstance(result, list) and are_layers(result, samples):
        return True
    parts = list(result.values()) if isinstance(result, BaseOutput) else result
    return isinstance(parts, list | tuple) and any(_has_layers(part, samples) for part in parts)


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(_is_plain(each) for each in value)
    return value is None or isinstance(value, bool | int | float | str | torch.Tensor)


def _alike(rules: BatchRules, some: Sequence[MadeCall], others: Sequence[MadeCall]) -> Pair | None:
    """A call of each that can be run as one, if possible of different steps. Raises Unbatchable."""
    keys: Mapping[Hashable, MadeCall] = {key_of(rules, call.arguments, content): call for call in reversed(some)}
    for other in reversed(others):
        if call := keys.get(key_of(rules, other.arguments, content)):
            return call, other
    return None


def _compared(rules: BatchRules, calls: Pair, run: Run) -> str:
    """Why the two calls cannot be run as one; empty: they can."""
    (one, other), name = calls, calls[0].point.name
    if _close(one.result, other.result):
        return f"two outputs' calls of {name} give the same, so that a mistake would not be seen"
    for pair in ((one, other), (other, one)):
        sizes = [samples_of(rules, call.arguments) for call in pair]
        joined = run(one.point, join(rules, [_copied(call.arguments) for call in pair]))
        try:
            parts = split(joined, sizes, rules.layered)
        except (TypeError, ValueError, RuntimeError) as error:
            return f"the result of two joined calls of {name} cannot be taken apart: {error}"
        if not all(_close(part, call.result) for part, call in zip(parts, pair, strict=True)):
            return f"two joined calls of {name} give others than each alone"
    return ""


def _close(mine: Any, theirs: Any) -> bool:
    """Whether they differ by rounding only: by a part of the root mean square of `theirs` that suits its dtype."""
    pairs = list(itertools.zip_longest(_leaves(mine), _leaves(theirs)))
    if any(one is None or other is None or one.shape != other.shape for one, other in pairs):
        return False
    return all(bool((one - other).float().norm() <= _tolerance(other) * other.float().norm()) for one, other in pairs)


def _tolerance(tensor: torch.Tensor) -> float:
    least = 1e-4 if tensor.device.type == "cpu" else 4e-3  # convolutions on a GPU round to TF32
    return max(least, 4 * torch.finfo(tensor.dtype).eps) if tensor.is_floating_point() else 0.0


def _leaves(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def _copied(value: Any) -> Any:
    return tree_map_only(torch.Tensor, lambda tensor: tensor.detach().clone(), value)


def _digest(value: Any) -> Hashable:
    """Of equal values the same."""
    if isinstance(value, torch.Tensor):
        return value.shape, content(value)
    return tuple(map(_digest, value)) if isinstance(value, list | tuple) else value
