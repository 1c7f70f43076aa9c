"""Conditioning on its way from the encoder to a diffusion stage: each output's layout and tensors as rows."""

import asyncio
from collections.abc import Sequence

import torch

from quartet.v1 import dit_pb2
from services.common.errors import require
from services.common.stream.consumer import StreamConsumer
from services.common.stream.output_stream import OutputStream
from services.common.stream.rows import Chunk, Rows
from services.diffusion.conditioning import Conditioning, pack, unpack

_LAYOUT = "layout"


def send_conditioning(
    output: OutputStream, made: Sequence[Conditioning], loop: asyncio.AbstractEventLoop
) -> tuple[int, int]:
    """Sends all; returns the numbers of tensors and bytes. Blocks: tensors are large, and may be on a device."""
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
    """One for each of the request's outputs, or one for all, on `device`.

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
    # a copy: the encoder's memory is not held for all of the denoising
    whole = await asyncio.to_thread(lambda: {name: torch.cat(parts) for name, parts in pieces.items()})
    made = [_unpack(whole, i, device) for i in range(sum(name.endswith(f".{_LAYOUT}") for name in whole))]
    count = start.count or 1
    require(len(made) in (1, count), "source", f"the stream is for {len(made)} outputs; this request has {count}")
    return made


def _unpack(whole: dict[str, torch.Tensor], output: int, device: torch.device) -> Conditioning:
    layout = whole[f"{output}.{_LAYOUT}"].numpy().tobytes()
    # a tensor without elements has no rows to send
    return unpack(layout, lambda i: whole.get(f"{output}.{i}", torch.empty(0)), device)
