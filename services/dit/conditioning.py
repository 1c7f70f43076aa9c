"""What a pipeline's encoders make of a prompt: kept, shared by a request's outputs, and sent from stage to stage."""

import itertools
from collections.abc import Callable
from typing import Any

import torch
from google.protobuf.message import DecodeError

from quartet.v1 import encoder_pb2
from services.common.rpc.errors import InvalidInput

# Methods of pipelines that run text encoders, and the one that runs GLM-Image's autoregressive model.
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
    """(layout, tensors): a serialized ConditioningLayout, and the tensors that it names by number, each (rows, width).

    Raises:
        TypeError: a result of a kind that no pipeline here returns.
    """
    tensors: list[torch.Tensor] = []
    layout = encoder_pb2.ConditioningLayout()
    for name, results in conditioning.results.items():
        layout.results[name].values.extend(_describe(result, tensors) for result in results)
    return layout.SerializeToString(), tensors


def _describe(value: Any, tensors: list[torch.Tensor]) -> encoder_pb2.ConditioningValue:
    """`value` as a message; the tensors in it are appended to `tensors`."""
    if isinstance(value, torch.Tensor):
        is_bool = value.dtype == torch.bool
        flat = value.detach().to(torch.uint8) if is_bool else value.detach()
        tensors.append(flat.reshape(-1, flat.shape[-1] if flat.dim() else 1))
        place = encoder_pb2.ConditioningTensor(index=len(tensors) - 1, shape=value.shape, is_bool=is_bool)
        return encoder_pb2.ConditioningValue(tensor=place)
    described = encoder_pb2.ConditioningValue()
    if isinstance(value, list):
        described.list.values.extend(_describe(entry, tensors) for entry in value)
        described.list.SetInParent()  # an empty one is not None
    elif isinstance(value, tuple):
        described.tuple.values.extend(_describe(entry, tensors) for entry in value)
        described.tuple.SetInParent()
    elif isinstance(value, bool):
        described.boolean = value
    elif isinstance(value, int):
        described.integer = value
    elif isinstance(value, float):
        described.number = value
    elif isinstance(value, str):
        described.text = value
    elif value is not None:
        raise TypeError(f"cannot send a {type(value).__name__}")
    return described


def unpack(layout: bytes, tensors: list[torch.Tensor], device: torch.device) -> Conditioning:
    """What `pack` packed, on `device`.

    Raises:
        InvalidInput: layout and tensors do not fit together.
    """
    results = _parse(layout).results
    try:
        return Conditioning(
            {
                name: [_build(value, tensors, device) for value in results[name].values]
                for name in METHODS
                if name in results
            }
        )
    except (IndexError, RuntimeError) as error:
        raise InvalidInput("source", f"the stream's layout and tensors do not fit together: {error!r}") from None


def _build(value: encoder_pb2.ConditioningValue, tensors: list[torch.Tensor], device: torch.device) -> Any:
    match value.WhichOneof("value"):
        case None:
            return None
        case "tensor":
            tensor = tensors[value.tensor.index].reshape(tuple(value.tensor.shape)).to(device)
            return tensor.bool() if value.tensor.is_bool else tensor
        case "list":
            return [_build(entry, tensors, device) for entry in value.list.values]
        case "tuple":
            return tuple(_build(entry, tensors, device) for entry in value.tuple.values)
        case field:
            return getattr(value, field)


def count_tensors(layout: bytes) -> int:
    """How many tensors a layout names.

    Raises:
        InvalidInput: it is no layout.
    """

    def count(value: encoder_pb2.ConditioningValue) -> int:
        return int(value.HasField("tensor")) + sum(map(count, (*value.list.values, *value.tuple.values)))

    return sum(count(value) for results in _parse(layout).results.values() for value in results.values)


def _parse(layout: bytes) -> encoder_pb2.ConditioningLayout:
    try:
        return encoder_pb2.ConditioningLayout.FromString(layout)
    except DecodeError as error:
        raise InvalidInput("source", f"the stream's layout is no ConditioningLayout: {error}") from None
