"""Which calls of a model can run as one, how their arguments are joined and the result is split.

A call is what a diffusers pipeline passes to its transformer or to `vae.decode`. Its arguments have a row for every
sample, most by their shape; `BatchRules`, of the family's row or learned, describe the others. What a dictionary has is
named "name.key".
"""

import hashlib
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from diffusers.utils.outputs import BaseOutput
from torch.nn import functional

from services.diffusion.families import BatchRules

Arguments = dict[str, Any]


DECODE_RULES = BatchRules(rows="z", inert={"generator": lambda generator: True})


class Unbatchable(Exception):
    """The call has an argument that no rule covers: it cannot share a step."""


def samples_of(rules: BatchRules, arguments: Arguments) -> int:
    """Samples in one call. Raises Unbatchable: they cannot be counted."""
    rows = arguments.get(rules.rows)
    if isinstance(rows, torch.Tensor) and rows.dim():
        return rows.shape[0]
    if isinstance(rows, list) and rows:
        return len(rows)
    raise Unbatchable(rules.rows)


def key_of(rules: BatchRules, arguments: Arguments, digest: Callable[[torch.Tensor], bytes]) -> Hashable:
    """Calls with equal keys can be run as one. Raises Unbatchable.

    Args:
        digest: see `content`.
    """
    samples = samples_of(rules, arguments)
    masks = set(rules.padded.values())
    parts = ((name, _part(rules, name, value, samples, digest)) for name, value in arguments.items())
    return tuple(part for part in parts if part[0] not in masks)


def _part(rules: BatchRules, name: str, value: Any, samples: int, digest: Callable[[torch.Tensor], bytes]) -> Hashable:
    if value is None:
        return None
    if rules.known is not None and not isinstance(value, dict) and name not in rules.known:
        raise Unbatchable(name)
    if isinstance(value, (bool, int, float, str)):
        return value
    if name in rules.inert and rules.inert[name](value):
        return "inert"
    if name in rules.shared or name in rules.alike:
        return _equal(value, digest)
    if name in rules.layers and are_layers(value, samples):
        return tuple((layer.dtype, layer.shape[1:]) for layer in value)
    if isinstance(value, torch.Tensor):
        if name in rules.padded:
            return value.dtype, value.shape[2:]
        if name in rules.expanded or (value.dim() and value.shape[0] == samples):
            return value.dtype, value.shape[1:]
    elif isinstance(value, list) and len(value) == samples and all(isinstance(v, torch.Tensor) for v in value):
        if name in rules.ragged:
            return value[0].dtype, value[0].shape[1:]
        return tuple((v.dtype, v.shape) for v in value)
    elif isinstance(value, dict):
        named = sorted(value.items())
        return tuple((key, _part(rules, f"{name}.{key}", each, samples, digest)) for key, each in named)
    raise Unbatchable(name)


def are_layers(value: Any, samples: int) -> bool:
    """Whether it has tensors alone, each with an entry for each sample."""
    layers = value if isinstance(value, (list, tuple)) else ()
    return bool(layers) and all(isinstance(each, torch.Tensor) and each.shape[:1] == (samples,) for each in layers)


def _equal(value: Any, digest: Callable[[torch.Tensor], bytes]) -> Hashable:
    if isinstance(value, torch.Tensor):
        return value.shape[1:], digest(value)
    if isinstance(value, (tuple, list)):
        distinct = {_equal(entry, digest) for entry in value} if isinstance(value, list) else ()
        return next(iter(distinct)) if len(distinct) == 1 else tuple(_equal(entry, digest) for entry in value)
    return value


def content(tensor: torch.Tensor) -> bytes:
    """A digest of the elements; where all entries are equal, that of one."""
    tensor = tensor.detach()
    if tensor.dim() > 2 and bool((tensor == tensor[:1]).all()):
        tensor = tensor[:1]
    # a tensor of one element has any strides and is contiguous, but bytes have a stride of one
    elements = tensor.cpu().ravel().clone(memory_format=torch.contiguous_format)
    return hashlib.blake2b(elements.view(torch.uint8).numpy().tobytes()).digest()


def join(rules: BatchRules, calls: Sequence[Arguments]) -> Arguments:
    """Arguments of one call in place of `calls`, which have equal keys."""
    if len(calls) == 1:
        return calls[0]
    sizes = [samples_of(rules, call) for call in calls]
    joined = {name: _join(rules, name, [call[name] for call in calls], sizes) for name in calls[0]}
    for sequence, mask in rules.padded.items():
        if sequence in calls[0]:
            joined[sequence], joined[mask] = _pad([(call[sequence], call.get(mask)) for call in calls])
    return joined


def _join(rules: BatchRules, name: str, values: list[Any], sizes: list[int]) -> Any:
    first = values[0]
    if name in rules.shared or name in rules.padded:
        return first
    if name in rules.layers:
        return type(first)(torch.cat(layers) for layers in zip(*values, strict=True))
    if isinstance(first, dict):
        return {key: _join(rules, f"{name}.{key}", [value[key] for value in values], sizes) for key in first}
    if isinstance(first, list):
        return [entry for value in values for entry in value]
    if not isinstance(first, torch.Tensor) or name in rules.padded.values():
        return first
    if name in rules.expanded:
        values = [value.expand(size, *value.shape[1:]) for value, size in zip(values, sizes, strict=True)]
    return torch.cat(values)


def _pad(sequences: list[tuple[torch.Tensor, torch.Tensor | None]]) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Joins sequences (samples, length, width), some with a mask (samples, length)."""
    longest = max(states.shape[1] for states, _ in sequences)
    if all(mask is None and states.shape[1] == longest for states, mask in sequences):
        return torch.cat([states for states, _ in sequences]), None
    masks = [torch.ones(s.shape[:2], dtype=torch.long, device=s.device) if m is None else m for s, m in sequences]
    return (
        torch.cat([functional.pad(states, (0, 0, 0, longest - states.shape[1])) for states, _ in sequences]),
        torch.cat([functional.pad(mask.long(), (0, longest - mask.shape[1])) for mask in masks]),
    )


def split(output: Any, sizes: Sequence[int], layered: bool = False) -> list[Any]:
    """A model's output for several calls, one for each, of `sizes` samples. `layered`: see BatchRules.

    Raises:
        TypeError: an unknown kind of output.
    """
    if len(sizes) == 1:
        return [output]
    if isinstance(output, torch.Tensor):
        return list(output.split(list(sizes)))
    if isinstance(output, list) and not layered:
        ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
        return [output[end - size : end] for end, size in zip(ends, sizes, strict=True)]
    if isinstance(output, BaseOutput):
        parts = {name: split(value, sizes, layered) for name, value in output.items()}
        return [type(output)(**{name: part[i] for name, part in parts.items()}) for i in range(len(sizes))]
    if isinstance(output, (list, tuple)):
        kind, each = type(output), (split(part, sizes, layered) for part in output)
        return [kind(parts) for parts in zip(*each, strict=True)]
    raise TypeError(f"cannot take a {type(output).__name__} apart")
