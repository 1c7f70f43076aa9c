"""What a pipeline's encoders make of a prompt: kept, shared by a request's outputs, and sent from stage to stage."""

import itertools
import json
from collections.abc import Callable
from typing import Any

import torch

from services.common.rpc.errors import InvalidInput

# Methods of pipelines that run text encoders, and the one that runs an autoregressive model for prior tokens.
METHODS = ("encode_prompt", "generate_prior_tokens")
# Results that are the same for every seed.
_SEEDLESS = ("encode_prompt",)


class Conditioning:
    """Results of `METHODS`, each in the order of its calls. A pipeline with the same arguments makes the same calls."""

    def __init__(self, results: dict[str, list[Any]] | None = None) -> None:
        self.results = results if results is not None else {}

    def for_another_seed(self) -> "Conditioning":
        """One that has, and will have, the results in common that do not depend on the seed."""
        for name in _SEEDLESS:
            self.results.setdefault(name, [])
        return Conditioning({name: self.results[name] for name in _SEEDLESS})

    def attach(self, pipeline: Any) -> None:
        """Has `pipeline`, a view for one call, take each result from here; what is missing is computed and kept."""
        for name in METHODS:
            method = getattr(pipeline, name, None)
            if method is not None:
                vars(pipeline)[name] = self._kept(name, method)

    def _kept(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        calls = itertools.count()

        def call(*args: Any, **kwargs: Any) -> Any:
            i, kept = next(calls), self.results.setdefault(name, [])
            if i == len(kept):
                kept.append(method(*args, **kwargs))
            return kept[i]

        return call


def pack(conditioning: Conditioning) -> tuple[bytes, list[torch.Tensor]]:
    """(layout, tensors): JSON that says how the results are built, and the tensors in it by number, each (rows, width).

    Raises:
        TypeError: a result of a kind that no pipeline here returns.
    """
    tensors: list[torch.Tensor] = []

    def describe(value: Any) -> Any:
        if value is None or isinstance(value, (bool, int, float, str)):
            return {"value": value}
        if isinstance(value, torch.Tensor):
            flat = value.detach().to(torch.uint8) if value.dtype == torch.bool else value.detach()
            tensors.append(flat.reshape(-1, flat.shape[-1] if flat.dim() else 1))
            return {
                "tensor": len(tensors) - 1,
                "shape": list(value.shape),
                "bool": value.dtype == torch.bool,
                "rows": tensors[-1].shape[0],
            }
        if isinstance(value, (list, tuple)):
            return {type(value).__name__: [describe(entry) for entry in value]}
        raise TypeError(f"cannot send a {type(value).__name__}")

    layout = {name: [describe(result) for result in results] for name, results in conditioning.results.items()}
    return json.dumps(layout).encode(), tensors


def unpack(layout: bytes, tensors: list[torch.Tensor], device: torch.device) -> Conditioning:
    """What `pack` packed, on `device`.

    Raises:
        InvalidInput: layout and tensors do not fit together.
    """

    def build(node: dict[str, Any]) -> Any:
        if "value" in node:
            return node["value"]
        if "tensor" in node:
            tensor = tensors[node["tensor"]].reshape(node["shape"]).to(device)
            return tensor.bool() if node["bool"] else tensor
        kind, entries = next(iter(node.items()))
        return {"list": list, "tuple": tuple}[kind](build(entry) for entry in entries)

    try:
        content = json.loads(layout)
        return Conditioning(
            {name: [build(node) for node in content.get(name, [])] for name in METHODS if name in content}
        )
    except (ValueError, KeyError, IndexError, TypeError, AttributeError, StopIteration, RuntimeError) as error:
        raise InvalidInput("source", f"the stream's layout and tensors do not fit together: {error!r}") from None


def count_tensors(layout: bytes) -> int:
    """How many tensors a layout names.

    Raises:
        InvalidInput: it is no layout.
    """

    def count(node: Any) -> int:
        if isinstance(node, dict):
            return int("tensor" in node) + sum(count(value) for value in node.values())
        return sum(count(entry) for entry in node) if isinstance(node, list) else 0

    try:
        return count(json.loads(layout))
    except ValueError as error:
        raise InvalidInput("source", f"the stream's layout is no JSON: {error}") from None
