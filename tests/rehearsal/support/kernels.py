"""What an operator costs on a GPU: the kernels that torch starts for it, and the bytes that they read and write.

The rules are those of torch 2.13's sources; `test_rules.py` asks for a new reading when torch changes. A count is of
eager kernels, as a captured graph has them.
"""

from collections.abc import Sequence
from typing import Any

import torch

from tests.support.references.varlen import check

# Views and the like: no kernel.
_VIEWS = """view _unsafe_view expand slice select permute transpose t unsqueeze squeeze split split_with_sizes unbind
as_strided alias detach unfold _reshape_alias diagonal narrow chunk view_as_real lift_fresh lift"""
_NO_WORK = (
    """empty empty_like empty_strided new_empty new_empty_strided resize_ set_ _local_scalar_dense record_stream"""
)
FREE = frozenset(f"{_VIEWS} {_NO_WORK}".split())
# Composites that CUDA has one kernel for; all others are taken apart before they are counted.
_WHOLE = "linear rms_norm scaled_dot_product_attention conv1d conv_transpose1d layer_norm item is_nonzero"
WHOLE = frozenset(_WHOLE.split())
CONVOLUTIONS = frozenset({"convolution", "conv1d", "conv_transpose1d"})
# Their matrices must be of one dtype.
PRODUCTS = CONVOLUTIONS | {"mm", "addmm", "bmm", "baddbmm", "_grouped_mm", "linear"}
_TABLES = frozenset({"embedding", "index", "index_select", "gather"})
_WRITES_ROWS = frozenset({"scatter_", "index_copy_", "index_put_", "_index_put_impl_", "index_fill_"})
_HALVES = (torch.float16, torch.bfloat16)


def tensor_bytes(tensor: torch.Tensor) -> int:
    """Of a tensor as it is read: what is expanded counts once."""
    count = tensor.element_size()
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        count *= size if stride else 1
    return count


def cost(
    name: str, args: Sequence[Any], inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]
) -> tuple[int, int]:
    """(kernels, bytes) of the operator `name`."""
    if name in FREE:
        return 0, 0
    written = [out for out in outputs if not any(out is given for given in inputs)]
    if name in _TABLES:  # of a table, the rows that are read
        return 1, 2 * sum(map(tensor_bytes, outputs))
    if name in _WRITES_ROWS:
        return 1, 2 * min(map(tensor_bytes, inputs))
    if name == "_grouped_mm":  # the groups that have rows; and a kernel that makes the pointers
        rows, weights = args[0], args[1]
        used = min(weights.shape[0], rows.shape[0])
        read = used * weights.shape[1] * weights.shape[2] * weights.element_size()
        return 2, tensor_bytes(rows) + sum(map(tensor_bytes, outputs)) + read
    if name == "_varlen_attn":  # of the cache, the longest that sequences may be; zeros, which nobody reads, besides
        query, key, sequences, longest = args[0], args[1], args[3].numel() - 1, args[6]
        read = 2 * sequences * longest * key.shape[1] * key.shape[2] * key.element_size()
        return 2, 2 * tensor_bytes(query) + read
    if name == "rotate_and_store":  # of the cache, the new positions
        return 1, 2 * tensor_bytes(args[0])
    moved = sum(map(tensor_bytes, inputs)) + sum(map(tensor_bytes, written))
    if name == "scaled_dot_product_attention" and any(each.dtype == torch.bool for each in inputs):
        return 3, moved  # the mask becomes a bias
    if name == "look_in_place":  # parts, and what they make together
        return 2, moved
    return 1, moved


def attention_path(
    query: torch.Tensor, key: torch.Tensor, mask: torch.Tensor | None, causal: bool, grouped: bool
) -> str:
    """The path that torch takes on sm_80 and newer without cuDNN's: "flash", "memory-efficient" or "MATH".

    Source: torch's aten/src/ATen/native/transformers/cuda/sdp_utils.cpp."""
    same_heads = query.shape[-3] == key.shape[-3]
    square = query.shape[-2] == key.shape[-2]
    has_flash = mask is None and query.dtype in _HALVES and (same_heads or grouped) and query.shape[-1] <= 256
    if has_flash and (square or not causal):
        return "flash"
    if same_heads and query.stride(-1) == key.stride(-1) == 1:
        return "memory-efficient"
    return "MATH"


def check_varlen(major: int, args: Sequence[Any]) -> None:
    """Raises what torch raises for `torch_attn::_varlen_attn(*args)` on a GPU of compute capability `major`.

    With a block table, torch 2.13 may leave rows of the result unwritten: that is refused here.
    """
    given: list[Any] = [*args, None, None]  # defaults at the end are left out
    query, key, _, cu_seq_q, cu_seq_k, _, _, _, _, window, grouped, used, *paged = given
    if major < 8 or query.dtype not in _HALVES:
        raise RuntimeError(f"flash attention of {query.dtype} on sm_{major}x")
    if any(each is not None for each in paged):
        raise NotImplementedError("block tables and splits")
    check(query, key, cu_seq_q, cu_seq_k, used, grouped, tuple(window))
