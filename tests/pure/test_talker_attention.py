"""A talker's prompts in pieces: the same attention, by kernels that a GPU has."""

from typing import Any

import pytest
import torch
from torch.nn import functional as F

from services.talker.layers import KeyValueCache, PrefillAttention, PromptChunk

HEADS, KV_HEADS, WIDTH = 6, 2, 8


def piece(slot: int, begin: int, end: int) -> PromptChunk:
    return PromptChunk(slot, begin, end, torch.zeros(end - begin, 4), torch.zeros(end - begin, 3))


def test_a_prompt_in_pieces_is_the_prompt_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a mask, no call has `enable_gqa`: CUDA would take the MATH path, float32 with the scores written out."""
    options: list[dict[str, Any]] = []
    real: Any = F.scaled_dot_product_attention

    def recorded(*tensors: torch.Tensor, **given: Any) -> torch.Tensor:
        options.append(given)
        return real(*tensors, **given)

    monkeypatch.setattr(F, "scaled_dot_product_attention", recorded)
    torch.manual_seed(0)
    tokens = [12, 5]  # of two prompts
    query, key, value = (torch.randn(sum(tokens), heads, WIDTH) for heads in (HEADS, KV_HEADS, KV_HEADS))

    def run(*steps: list[tuple[PromptChunk, slice]]) -> dict[int, torch.Tensor]:
        """By slot, what the rows of its prompt see; each step has pieces with their rows."""
        cache = KeyValueCache(torch.zeros(1, 2, KV_HEADS, 16, WIDTH), torch.zeros(1, 2, KV_HEADS, 16, WIDTH))
        seen: dict[int, list[torch.Tensor]] = {0: [], 1: []}
        for step in steps:
            pieces = [each for each, _ in step]
            rows = [torch.cat([x[place] for _, place in step]) for x in (query, key, value)]
            mixed = PrefillAttention(cache, pieces, HEADS // KV_HEADS)(0, *rows)
            for each, part in zip(pieces, mixed.split([len(each.rows) for each in pieces]), strict=True):
                seen[each.slot].append(part)
        return {slot: torch.cat(parts) for slot, parts in seen.items()}

    whole = run([(piece(0, 0, 12), slice(0, 12)), (piece(1, 0, 5), slice(12, 17))])
    parts = run(
        [(piece(0, 0, 4), slice(0, 4))],
        [(piece(0, 4, 9), slice(4, 9)), (piece(1, 0, 3), slice(12, 15))],
        [(piece(0, 9, 12), slice(9, 12)), (piece(1, 3, 5), slice(15, 17))],
    )
    for slot in whole:
        torch.testing.assert_close(parts[slot], whole[slot], rtol=0, atol=1e-6)
    assert any(each.get("attn_mask") is not None for each in options)
    assert not any(each.get("attn_mask") is not None and each.get("enable_gqa") for each in options)
