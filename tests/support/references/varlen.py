"""torch's `varlen_attn` over SDPA, for any dtype and device. It reads no value on the host: captures can hold it."""

import torch
from torch.nn import functional as F


def varlen_attn(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seq_q: torch.Tensor,
    cu_seq_k: torch.Tensor,
    max_q: int,
    max_k: int,
    *,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
    seqused_k: torch.Tensor,
) -> torch.Tensor:
    """As torch's documentation has it, and its CUDA sources what they refuse, without a block table.

    Raises:
        ValueError: the kernel would refuse it.
    """
    check(query, key, cu_seq_q, cu_seq_k, seqused_k, enable_gqa, window_size)
    tokens = torch.arange(len(query), device=query.device)
    of = torch.searchsorted(cu_seq_q[1:].contiguous(), tokens, right=True)  # the sequence of each query
    used = seqused_k[of]
    # Queries are a sequence's last positions.
    place = used - (cu_seq_q[1:][of] - tokens)
    at = torch.arange(max_k, device=query.device)
    seen = at < used[:, None]
    if window_size == (-1, 0):
        seen = seen & (at <= place[:, None])
    index = (cu_seq_k[of, None] + at).clamp(max=len(key) - 1)
    keys, values = (x[index].transpose(1, 2) for x in (key, value))  # (tokens, kv_heads, max_k, head_dim)
    mixed = F.scaled_dot_product_attention(
        query.unsqueeze(2), keys, values, attn_mask=seen[:, None, None], enable_gqa=enable_gqa
    )
    return mixed.squeeze(2)


def check(
    query: torch.Tensor,
    key: torch.Tensor,
    cu_seq_q: torch.Tensor,
    cu_seq_k: torch.Tensor,
    seqused_k: torch.Tensor,
    enable_gqa: bool,
    window_size: tuple[int, int],
) -> None:
    """Raises ValueError: as `varlen_attn`."""
    sequences = len(seqused_k)
    for name, numbers, count in (
        ("cu_seq_q", cu_seq_q, sequences + 1),
        ("cu_seq_k", cu_seq_k, sequences + 1),
        ("seqused_k", seqused_k, sequences),
    ):
        if numbers.dtype != torch.int32 or numbers.shape != (count,) or not numbers.is_contiguous():
            raise ValueError(f"{name} must be ({count},) int32, contiguous")
    if query.stride(-1) != 1 or key.stride(-1) != 1 or query.shape[-1] % 8:
        raise ValueError("head_dim must be a multiple of 8, and the innermost dimension")
    if query.shape[1] % key.shape[1] or not (enable_gqa or query.shape[1] == key.shape[1]):
        raise ValueError("query heads must be a multiple of those of the keys, with enable_gqa")
    if window_size not in ((-1, -1), (-1, 0)):
        raise ValueError("window_size is for causal attention only")
