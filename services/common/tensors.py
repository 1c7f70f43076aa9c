"""torch tensors as `quartet.v1.Tensor` messages, and back."""

import math

import torch

from quartet.v1 import tensor_pb2
from services.common.errors import InvalidInput

MAX_INLINE_BYTES = 4 * 1024 * 1024

_DTYPES = {
    tensor_pb2.DATA_TYPE_FLOAT32: torch.float32,
    tensor_pb2.DATA_TYPE_FLOAT16: torch.float16,
    tensor_pb2.DATA_TYPE_BFLOAT16: torch.bfloat16,
    tensor_pb2.DATA_TYPE_INT16: torch.int16,
    tensor_pb2.DATA_TYPE_INT32: torch.int32,
    tensor_pb2.DATA_TYPE_INT64: torch.int64,
    tensor_pb2.DATA_TYPE_UINT8: torch.uint8,
}
_DATA_TYPES = {dtype: data_type for data_type, dtype in _DTYPES.items()}


def to_message(tensor: torch.Tensor) -> tensor_pb2.Tensor:
    """`tensor` (any shape, on any device, a dtype of `DataType`) as an inline message.

    Raises:
        ValueError: a dtype that has no DataType.
    """
    if tensor.dtype not in _DATA_TYPES:
        raise ValueError(f"no DataType for {tensor.dtype}")
    raw = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    return tensor_pb2.Tensor(dtype=_DATA_TYPES[tensor.dtype], shape=tensor.shape, inline=raw)


def to_torch(message: tensor_pb2.Tensor, field: str = "tensor") -> torch.Tensor:
    """The message's tensor on the CPU. It owns its memory.

    Raises:
        InvalidInput: names `field`, when dtype, shape and payload do not fit together.
    """
    dtype = _DTYPES.get(message.dtype)
    if dtype is None:
        raise InvalidInput(f"{field}.dtype", "must be one of the DataTypes")
    if any(size < 0 for size in message.shape):
        raise InvalidInput(f"{field}.shape", f"has a negative dimension: {list(message.shape)}")
    size_bytes = math.prod(message.shape) * dtype.itemsize
    if size_bytes != len(message.inline):
        raise InvalidInput(
            f"{field}.inline",
            f"has {len(message.inline)} bytes, but shape {list(message.shape)} of {dtype} needs {size_bytes}",
        )
    try:
        if not message.inline:
            return torch.empty(tuple(message.shape), dtype=dtype)
        return torch.frombuffer(bytearray(message.inline), dtype=dtype).view(tuple(message.shape))
    except RuntimeError as error:  # no elements, but dimensions that torch cannot count
        raise InvalidInput(f"{field}.shape", f"{list(message.shape)}: {error}") from None
