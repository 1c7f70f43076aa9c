"""Attention on CPUs in which all of a picture sees itself, in models that read pictures so.

vLLM's backend for CPUs ignores where pictures are, and attends causally without a word. Those for GPUs do not.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor
from vllm import _custom_ops as ops
from vllm import envs
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    CPUAttentionMetadata,
    CPUAttentionMetadataBuilder,
)


@dataclass(frozen=True)
class Seeing:
    """Queries of a step that see all of a picture.

    Attributes:
        request: row of the block table.
        begin, end: of their rows in the step.
        keys: what they see of the request: so many tokens, from its beginning to the end of the picture.
    """

    request: int
    begin: int
    end: int
    keys: int


@dataclass
class PrefixMetadata(CPUAttentionMetadata):
    """Of a step with pictures.

    Attributes:
        mm_prefix_range: rows of their queries in the step. It has the name of other backends' ranges: models clear it
            for layers where pictures do not see so.
        seen: the same queries as requests of their own, that are not causal.
    """

    mm_prefix_range: Tensor | None = None
    seen: CPUAttentionMetadata | None = None


class PrefixMetadataBuilder(CPUAttentionMetadataBuilder):
    """Finds the queries of pictures. Steps without them have vLLM's own metadata."""

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> CPUAttentionMetadata:
        made = super().build(common_prefix_len, common_attn_metadata, fast_build)
        ranges = common_attn_metadata.mm_req_doc_ranges
        if not ranges or made.causal is not True:
            return made
        seeing = list(queries_in(ranges, made.query_start_loc.tolist(), made.seq_lens.tolist()))
        if not seeing:
            return made
        members: dict[str, Any] = {each.name: getattr(made, each.name) for each in fields(made)}
        rows = torch.cat([torch.arange(each.begin, each.end) for each in seeing])
        return PrefixMetadata(**members, mm_prefix_range=rows, seen=self._seen(seeing, made))

    def _seen(self, seeing: Sequence[Seeing], made: CPUAttentionMetadata) -> CPUAttentionMetadata:
        """A picture's queries are the last ones of all that they see. So are those of a request that is not causal. The
        runner leaves out pictures that are longer than a window: in others it cuts what is before them alone."""
        counts = torch.tensor([0, *(each.end - each.begin for each in seeing)])
        starts = counts.cumsum(0).to(made.query_start_loc.dtype)
        lengths = torch.tensor([each.keys for each in seeing], dtype=made.seq_lens.dtype)
        return CPUAttentionMetadata(
            num_actual_tokens=int(starts[-1]),
            max_query_len=int(counts.max()),
            query_start_loc=starts,
            max_seq_len=int(lengths.max()),
            seq_lens=lengths,
            block_table=made.block_table[[each.request for each in seeing]].contiguous(),
            slot_mapping=made.slot_mapping,
            scheduler_metadata=ops.cpu_attn_get_scheduler_metadata(
                num_reqs=len(seeing),
                num_heads=self.num_heads,
                num_kv_heads=self.num_kv_heads,
                head_dim=self.head_dim,
                seq_lens=lengths,
                dtype=self.dtype,
                query_start_loc=starts,
                causal=False,
                sliding_window_size=self.window_size,
                isa=self.isa,
                enable_kv_split=envs.VLLM_CPU_ATTN_SPLIT_KV,
                dynamic_causal=None,
                kv_cache_dtype=self.kv_cache_dtype,
            ),
            causal=False,
        )


def queries_in(
    ranges: Mapping[int, Sequence[tuple[int, int]]], starts: Sequence[int], lengths: Sequence[int]
) -> Iterator[Seeing]:
    """The queries of a step that are in one of the `ranges` of their request.

    Args:
        ranges: (first, last) positions by request, `last` included. A step has all that is left of one (see
            `whole_media`).
        starts: where each request's queries begin in the step, and the last one's end.
        lengths: tokens of each request, those of this step included.
    """
    for request, own in ranges.items():
        before = lengths[request] - (starts[request + 1] - starts[request])
        for first, last in own:
            begin, end = max(first, before), min(last + 1, lengths[request])
            if begin < end:
                offset = starts[request] - before
                yield Seeing(request, begin + offset, end + offset, end)


class PrefixImpl(CPUAttentionBackendImpl):
    """Computes a picture's queries once more, with all that they see."""

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: CPUAttentionMetadata | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        options = output_scale, output_block_scale
        made = super().forward(layer, query, key, value, kv_cache, attn_metadata, output, *options)
        if not isinstance(attn_metadata, PrefixMetadata) or attn_metadata.mm_prefix_range is None:
            return made
        rows = attn_metadata.mm_prefix_range
        of_pictures = query[rows]
        empty = output.new_empty(of_pictures.shape)
        seen = super().forward(layer, of_pictures, key, value, kv_cache, attn_metadata.seen, empty, *options)
        output[rows] = seen.view(len(rows), *output.shape[1:])
        return made


class PrefixBackend(CPUAttentionBackend):
    """vLLM's for CPUs, with pictures that see all of themselves."""

    @staticmethod
    def get_impl_cls() -> type[PrefixImpl]:
        return PrefixImpl

    @staticmethod
    def get_builder_cls() -> type[PrefixMetadataBuilder]:
        return PrefixMetadataBuilder
