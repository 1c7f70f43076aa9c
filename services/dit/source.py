"""Reads what an encoder's process made of a prompt off its tensor stream."""

import asyncio

import torch

from quartet.v1 import dit_pb2
from services.common.rpc.errors import InvalidInput
from services.common.stream.consumer import StreamConsumer
from services.common.stream.rows import Chunk
from services.dit.conditioning import Conditioning, count_tensors, unpack

LAYOUT = "layout"


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
    made = [_unpack(whole, i, device) for i in range(sum(name.endswith(f".{LAYOUT}") for name in whole))]
    count = start.count or 1
    if len(made) == 1:
        return made + [made[0].for_another_seed() for _ in range(1, count)]
    if len(made) != count:
        raise InvalidInput("source", f"the stream is for {len(made)} outputs; this request has {count}")
    return made


def _join(pieces: dict[str, list[torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {name: torch.cat(parts) for name, parts in pieces.items()}


def _unpack(whole: dict[str, torch.Tensor], output: int, device: torch.device) -> Conditioning:
    layout = whole[f"{output}.{LAYOUT}"].numpy().tobytes()
    # a tensor without elements has no rows to send
    tensors = [whole.get(f"{output}.{i}", torch.empty(0)) for i in range(count_tensors(layout))]
    return unpack(layout, tensors, device)
