"""A talker's attention to its cache: by SDPA, by kernels that a GPU has; and over the cache in place, the same."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from services.talker.attention import SDPA, CacheAttention, DecodeAttention, KeyValueCache, PromptChunk, StepAttention
from services.talker.family import TransformerSpec
from services.talker.varlen import in_place_attention, refusal
from tests.support.references.varlen import varlen_attn

HEADS, KV_HEADS, WIDTH = 6, 2, 8
SIZES = TransformerSpec(1, 48, HEADS, KV_HEADS, WIDTH, 48, 64, 1e-6, 1e6, "silu")
CPU = torch.device("cpu")
IN_PLACE = in_place_attention(varlen_attn, DecodeAttention)


def piece(slot: int, begin: int, end: int) -> PromptChunk:
    return PromptChunk(slot, begin, end, torch.zeros(end - begin, 4), torch.zeros(end - begin, 3))


@pytest.mark.parametrize("attention", [SDPA, IN_PLACE], ids=["SDPA", "in place"])
def test_a_prompt_in_pieces_is_the_prompt_at_once(attention: CacheAttention, monkeypatch: pytest.MonkeyPatch) -> None:
    """By SDPA, with a mask, no call has `enable_gqa`: CUDA would take the MATH path, float32, scores written out."""
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
        cache = KeyValueCache.zeros((1, 2, KV_HEADS, 16, WIDTH), torch.float32, CPU, attention.heads_inside)
        seen: dict[int, list[torch.Tensor]] = {0: [], 1: []}
        for step in steps:
            pieces = [each for each, _ in step]
            rows = [torch.cat([x[place] for _, place in step]) for x in (query, key, value)]
            mixed = attention.prompts(cache, pieces, HEADS // KV_HEADS)(0, *rows)
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
    if attention is SDPA:
        assert not any(each.get("attn_mask") is not None and each.get("enable_gqa") for each in options)


def faults() -> dict[str, Callable[..., torch.Tensor]]:
    """What a GPU's varlen_attn might do wrong."""

    def changed(**changes: Callable[[Any], Any]) -> Callable[..., torch.Tensor]:
        def run(*args: Any, **options: Any) -> torch.Tensor:
            return varlen_attn(*args, **options | {name: change(options.get(name)) for name, change in changes.items()})

        return run

    def first_alone(*args: Any, **options: Any) -> torch.Tensor:
        out = varlen_attn(*args, **options)
        out[int(args[3][1]) :] = torch.nan
        return out

    def missing(*args: Any, **options: Any) -> torch.Tensor:
        raise RuntimeError("no kernel image is available\nfor execution on the device")

    return {
        "causal where it is not": changed(window_size=lambda size: (-1, -1)),
        "a position too many": changed(seqused_k=lambda used: used + 1),
        "a position too few": changed(seqused_k=lambda used: (used - 1).clamp(min=1)),
        "the first sequence's rows alone": first_alone,
        "no kernel": missing,
    }


def farther(cache: KeyValueCache, places: torch.Tensor, advances: torch.Tensor, length: int) -> StepAttention:
    return DecodeAttention(cache, (places + 1).clamp(max=length - 1), advances, length)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_in_place_is_taken_if_it_is_sdpa_s(dtype: torch.dtype) -> None:
    assert refusal(IN_PLACE, SIZES, 700, dtype, CPU) is None
    wrong = {name: in_place_attention(run, DecodeAttention) for name, run in faults().items()}
    wrong["steps that see too much"] = in_place_attention(varlen_attn, farther)
    said = {name: refusal(attention, SIZES, 700, dtype, CPU) for name, attention in wrong.items()}
    assert said.pop("no kernel") == "fails here: no kernel image is available"
    assert all(each and each.startswith("differs here by ") for each in said.values()), said
