"""torch tensors as `quartet.v1.Tensor` messages and back, and the contract of what carries large ones beside them."""

import math
import warnings
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import numpy as np
import torch

from quartet.v1 import stream_pb2, tensor_pb2
from services.common.errors import InvalidInput, StageError

MAX_INLINE_BYTES = 4 * 1024 * 1024
MAX_DIMENSIONS = 8

# DATA_TYPE_FLOAT32 is torch.float32, and so on; 0 is unspecified.
_DTYPES: dict[Any, torch.dtype] = {
    number: getattr(torch, name.removeprefix("DATA_TYPE_").lower())
    for name, number in tensor_pb2.DataType.items()
    if number
}
_DATA_TYPES = {dtype: data_type for data_type, dtype in _DTYPES.items()}

Handle = tensor_pb2.SharedMemory | tensor_pb2.Ucx

# (handle, field that it is in) -> its bytes, read-only.
Resolve = Callable[[Handle, str], memoryview | np.ndarray]
# Called when the consumer is done with a tensor; with an error when the tensor will not arrive.
Notify = Callable[[StageError | None], None]

# torch has no read-only tensors.
warnings.filterwarnings("ignore", "The given buffer is not writable", UserWarning)


def data_type(dtype: torch.dtype) -> tensor_pb2.DataType:
    """Raises ValueError: `dtype` has no DataType."""
    if dtype not in _DATA_TYPES:
        raise ValueError(f"no DataType for {dtype}")
    return _DATA_TYPES[dtype]


def describe(tensor: torch.Tensor, **payload: Any) -> tensor_pb2.Tensor:
    """A message with dtype and shape of `tensor`; `payload`: its elements, or where they are. Raises as `data_type`."""
    return tensor_pb2.Tensor(dtype=data_type(tensor.dtype), shape=tensor.shape, **payload)


def as_bytes(tensor: torch.Tensor) -> np.ndarray:
    """The elements of `tensor` (any shape and device), (bytes,) uint8; no copy if it is contiguous on the CPU."""
    return tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()


def to_message(tensor: torch.Tensor) -> tensor_pb2.Tensor:
    """`tensor` (any shape and device) as an inline message. Raises as `data_type`."""
    return describe(tensor, inline=as_bytes(tensor).tobytes())


def fill(message: tensor_pb2.Tensor, tensor: torch.Tensor) -> None:
    """As `to_message`, into an empty message: part of another one, which saves a copy."""
    message.dtype = data_type(tensor.dtype)
    message.shape.extend(tensor.shape)
    message.inline = as_bytes(tensor).tobytes()


def elements_bytes(message: tensor_pb2.Tensor) -> int:
    """Size of our own message's elements, by dtype and shape: reading an inline payload copies it."""
    return math.prod(message.shape) * _DTYPES[message.dtype].itemsize


def check(message: tensor_pb2.Tensor, size_bytes: int, field: str) -> tuple[torch.dtype, tuple[int, ...]]:
    """dtype and shape of a tensor whose elements take `size_bytes`.

    Raises:
        InvalidInput: names the part of `field` at fault, when the three do not fit together.
    """
    dtype = _DTYPES.get(message.dtype)
    if dtype is None:
        raise InvalidInput(f"{field}.dtype", "must be one of the DataTypes")
    if len(message.shape) > MAX_DIMENSIONS:
        raise InvalidInput(f"{field}.shape", f"has {len(message.shape)} dimensions; at most {MAX_DIMENSIONS} are taken")
    shape = tuple(message.shape)
    if any(size < 0 for size in shape):
        raise InvalidInput(f"{field}.shape", f"has a negative dimension: {list(shape)}")
    needed_bytes = math.prod(shape) * dtype.itemsize
    if size_bytes != needed_bytes:
        payload = message.WhichOneof("payload") or "inline"
        at = f"{field}.{payload}" if payload == "inline" else f"{field}.{payload}.size_bytes"
        raise InvalidInput(at, f"has {size_bytes} bytes, but shape {list(shape)} of {dtype} needs {needed_bytes}")
    return dtype, shape


def to_torch(message: tensor_pb2.Tensor, field: str = "tensor", resolve: Resolve | None = None) -> torch.Tensor:
    """A peer's tensor on the CPU, over the payload itself: read-only.

    Args:
        message: from a peer.
        field: its path, for errors.
        resolve: finds elements that are not in the message; None: they must be.

    Raises:
        InvalidInput: names the part of `field` at fault, when dtype, shape and payload do not fit together.
    """
    payload = message.WhichOneof("payload")
    handle: Handle | None = None if payload in ("inline", None) else getattr(message, payload)
    data: bytes | memoryview | np.ndarray = b"" if handle else message.inline  # each access is a copy
    dtype, shape = check(message, handle.size_bytes if handle else len(data), field)
    if handle:
        if resolve is None:
            raise InvalidInput(f"{field}.{payload}", "is taken in tensor streams only: send the elements inline")
        data = resolve(handle, f"{field}.{payload}")
    try:
        if not len(data):
            return torch.empty(shape, dtype=dtype)
        return torch.frombuffer(data, dtype=dtype).view(shape)
    except RuntimeError as error:  # no elements, but dimensions that torch cannot count
        raise InvalidInput(f"{field}.shape", f"{list(shape)}: {error}") from None


class TransportSession(Protocol):
    """Carries one stream's large tensors to its consumer. For the event loop's thread only.

    Attributes:
        outstanding: tensors that the consumer is not done with.
        obstacle: why nothing can be sent now, e.g. "full"; "" if something may be.
    """

    @property
    def outstanding(self) -> int: ...

    @property
    def obstacle(self) -> str: ...

    def reserve(self, size_bytes: int) -> Any | None:
        """A place for a tensor; None if there is none now, because of `obstacle`."""
        ...

    async def send(self, place: Any, tensor: torch.Tensor, /) -> tensor_pb2.Tensor:
        """Puts `tensor` (on the CPU) into its reserved `place`; returns the message that announces it."""
        ...

    def release(self, lease_ids: Iterable[int]) -> None:
        """The consumer no longer reads these leases.

        Raises:
            InvalidInput: the stream does not hold one of them.
        """

    def consumer_left(self) -> None:
        """The consumer's call has ended: it reads nothing more."""


class Transport(Protocol):
    """Carries tensors of `min_bytes` or more, for all streams of a process. `name` is as in settings and metrics."""

    name: str
    min_bytes: int

    def negotiate(
        self, capabilities: stream_pb2.ConsumerCapabilities, notify: Notify
    ) -> tuple[TransportSession | None, str]:
        """(A session with a new consumer, ""), or (None, why there can be none)."""
        ...

    def close(self) -> None: ...
