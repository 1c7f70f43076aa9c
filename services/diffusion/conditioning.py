"""What a pipeline's encoders make of a prompt: kept, shared by a request's outputs, and sent from stage to stage."""

import asyncio
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from google.protobuf.message import DecodeError

from quartet.v1 import dit_pb2, encoder_pb2
from services.common.rpc.errors import InvalidInput
from services.common.stream.consumer import StreamConsumer
from services.common.stream.output_stream import OutputStream
from services.common.stream.rows import Chunk, Rows

# Methods of pipelines that run text encoders, and the one that runs an autoregressive model for prior tokens.
METHODS = ("encode_prompt", "generate_prior_tokens")
# Results that are the same for every seed.
_SEEDLESS = ("encode_prompt",)
_LAYOUT = "layout"


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


def send_conditioning(
    output: OutputStream, made: Sequence[Conditioning], loop: asyncio.AbstractEventLoop
) -> tuple[int, int]:
    """Sends all of it; returns how many tensors and bytes that were. For a thread: tensors are large, and may be on a
    device."""
    count = size_bytes = 0
    for i, conditioning in enumerate(made):
        layout, tensors = pack(conditioning)
        named = {_LAYOUT: torch.frombuffer(bytearray(layout), dtype=torch.uint8)}
        named |= {str(k): tensor for k, tensor in enumerate(tensors)}
        for name, tensor in named.items():
            rows = Rows(f"{i}.{name}", 0, tensor.cpu().contiguous()).compact()
            loop.call_soon_threadsafe(output.put, [rows])
        count += len(tensors)
        size_bytes += sum(tensor.nbytes for tensor in tensors)
    asyncio.run_coroutine_threadsafe(asyncio.sleep(0), loop).result()  # what was put before is there
    return count, size_bytes


async def read_conditioning(
    consumer: StreamConsumer, start: dit_pb2.DitStart, device: torch.device
) -> list[Conditioning]:
    """One for each of the request's outputs, on `device`.

    Raises:
        InvalidInput: the stream is not what an encoder sends.
        StageError: whatever ended it.
    """
    pieces: dict[str, list[torch.Tensor]] = {}
    async with consumer.subscribe(start.source, start.request_id, [], producer="encoder") as messages:
        async for message in messages:
            if isinstance(message, Chunk):
                for row in message.rows:
                    pieces.setdefault(row.name, []).append(row.tensor)
    whole = await asyncio.to_thread(_join, pieces)  # a copy: the encoder's memory is not held for all of the denoising
    made = [_unpack(whole, i, device) for i in range(sum(name.endswith(f".{_LAYOUT}") for name in whole))]
    count = start.count or 1
    if len(made) == 1:
        return made + [made[0].for_another_seed() for _ in range(1, count)]
    if len(made) != count:
        raise InvalidInput("source", f"the stream is for {len(made)} outputs; this request has {count}")
    return made


def _join(pieces: dict[str, list[torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {name: torch.cat(parts) for name, parts in pieces.items()}


def _unpack(whole: dict[str, torch.Tensor], output: int, device: torch.device) -> Conditioning:
    layout = whole[f"{output}.{_LAYOUT}"].numpy().tobytes()
    # a tensor without elements has no rows to send
    tensors = [whole.get(f"{output}.{i}", torch.empty(0)) for i in range(count_tensors(layout))]
    return unpack(layout, tensors, device)
