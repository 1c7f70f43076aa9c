"""What a pipeline's encoders make of a prompt: kept, shared by a request's outputs, packed for another stage."""

import itertools
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

import torch
from google.protobuf.message import DecodeError

from quartet.v1 import encoder_pb2
from services.common.errors import InvalidInput
from services.diffusion.encoding_cache import EncodingCache

_SEEDLESS = "encode_prompt"  # the text encoders' results do not depend on the seed
METHODS = (_SEEDLESS, "generate_prior_tokens")
"""Of pipelines: text encoders, and an autoregressive model of prior tokens."""
_SCALARS = {bool: "boolean", int: "integer", float: "number", str: "text"}
"""Type -> field of ConditioningValue."""


@dataclass
class Conditioning:
    """Results of `METHODS`, each in the order of its calls, which depends on the pipeline's arguments only.

    Attributes:
        cache: where encoders' results of other requests are.
        adapters: those that are on, with their weights.
    """

    results: dict[str, list[Any]] = field(default_factory=dict)
    cache: EncodingCache | None = None
    adapters: Hashable = ()

    def for_another_seed(self) -> "Conditioning":
        """One that shares, now and later, the results that do not depend on the seed."""
        results = {_SEEDLESS: self.results.setdefault(_SEEDLESS, [])}
        return Conditioning(results, self.cache, self.adapters)

    def shares_with(self, other: "Conditioning") -> bool:
        """Whether what one of them computes is the other's, too."""
        own = self.results.get(_SEEDLESS)
        return own is not None and own is other.results.get(_SEEDLESS)

    def attach(self, pipeline: Any, keeps: bool) -> None:
        """Lets `pipeline`, a view for one call, take its results from here; missing ones are computed.

        Args:
            keeps: whether what is computed is kept for the request's other outputs, whose seeds are others.
        """
        if self.cache is not None:
            self.cache.attach(pipeline, self.adapters)
        for name in METHODS if keeps else ():
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
    """A serialized ConditioningLayout, and the tensors that it names by number, each (rows, width).

    Raises:
        TypeError: an unknown kind of result.
    """
    tensors: list[torch.Tensor] = []
    layout = encoder_pb2.ConditioningLayout()
    for name, results in conditioning.results.items():
        layout.results[name].values.extend(_describe(result, tensors) for result in results)
    return layout.SerializeToString(), tensors


def _describe(value: Any, tensors: list[torch.Tensor]) -> encoder_pb2.ConditioningValue:
    """`value` as a message; appends its tensors to `tensors`."""
    if isinstance(value, torch.Tensor):
        is_bool = value.dtype == torch.bool
        flat = value.detach().to(torch.uint8) if is_bool else value.detach()
        tensors.append(flat.reshape(-1, flat.shape[-1] if flat.dim() else 1))
        place = encoder_pb2.ConditioningTensor(index=len(tensors) - 1, shape=value.shape, is_bool=is_bool)
        return encoder_pb2.ConditioningValue(tensor=place)
    if isinstance(value, (list, tuple)):
        values: Any = encoder_pb2.ConditioningValues(values=[_describe(entry, tensors) for entry in value])
        return encoder_pb2.ConditioningValue(**{"list" if isinstance(value, list) else "tuple": values})
    for kind, name in _SCALARS.items():
        if isinstance(value, kind):
            return encoder_pb2.ConditioningValue(**{name: value})
    if value is not None:
        raise TypeError(f"cannot send a {type(value).__name__}")
    return encoder_pb2.ConditioningValue()


def unpack(layout: bytes, tensor_of: Callable[[int], torch.Tensor], device: torch.device) -> Conditioning:
    """The inverse of `pack`, on `device`.

    Args:
        tensor_of: gives the tensor of a number, or raises IndexError.

    Raises:
        InvalidInput: no layout, or tensors that do not fit it.
    """
    try:
        results = encoder_pb2.ConditioningLayout.FromString(layout).results.items()
        built = {name: [_build(each, tensor_of, device) for each in result.values] for name, result in results}
        return Conditioning({name: values for name, values in built.items() if name in METHODS})
    except DecodeError as error:
        raise InvalidInput("source", f"the stream's layout is no ConditioningLayout: {error}") from None
    except (IndexError, RuntimeError) as error:
        raise InvalidInput("source", f"the stream's layout and tensors do not fit together: {error!r}") from None


def _build(value: encoder_pb2.ConditioningValue, tensor_of: Callable[[int], torch.Tensor], device: torch.device) -> Any:
    match value.WhichOneof("value"):
        case None:
            return None
        case "tensor":
            tensor = tensor_of(value.tensor.index).reshape(tuple(value.tensor.shape)).to(device)
            return tensor.bool() if value.tensor.is_bool else tensor
        case "list":
            return [_build(entry, tensor_of, device) for entry in value.list.values]
        case "tuple":
            return tuple(_build(entry, tensor_of, device) for entry in value.tuple.values)
        case name:
            return getattr(value, name)
