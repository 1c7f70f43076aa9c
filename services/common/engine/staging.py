"""Copies between a device and the host that neither wait for an engine's steps nor hold them up."""

from typing import Any

import torch


class Staging:
    """Copies through pinned memory, on a stream of its own; where `device` is the CPU there is nothing to copy. For one
    thread only."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: Any = torch.cuda.Stream(device) if device.type == "cuda" else None

    def to_host(self, tensor: torch.Tensor) -> tuple[torch.Tensor, torch.cuda.Event | None]:
        """A copy of `tensor`, on the device, as it is once what the current stream has been given is done; and the
        event after which it is whole. The current stream goes on meanwhile; it must not write to `tensor` any more."""
        if self._stream is None:
            return tensor, None
        on_host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            on_host.copy_(tensor, non_blocking=True)
            copied = torch.cuda.Event()
            copied.record()
        tensor.record_stream(self._stream)  # its memory is nobody else's until then
        return on_host, copied

    def to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        """`tensor`, on the CPU, on the device; the current stream's next work begins when it is there. The calling
        thread waits for a copy within the host at most; then `tensor` is read no more."""
        if self._stream is None:
            return tensor
        pinned = tensor.pin_memory()
        current = torch.cuda.current_stream(self._device)
        with torch.cuda.stream(self._stream):
            moved = pinned.to(self._device, non_blocking=True)
        current.wait_stream(self._stream)
        moved.record_stream(current)
        return moved
