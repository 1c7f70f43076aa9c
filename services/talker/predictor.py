"""The code predictor: completes a frame from the talker's state and the code of group 0."""

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

from services.talker.attention import FrameAttention, KeyValueCache
from services.talker.family import TalkerSpec, TransformerSpec
from services.talker.layers import Angles, DecoderLayer, RMSNorm, Rope
from services.talker.sampling import DrawRules, draw


class PredictorTransformer(nn.Module):
    """The code predictor's decoder stack and the embeddings of groups 1 and up, which are as wide as the talker."""

    def __init__(self, spec: TalkerSpec, sizes: TransformerSpec) -> None:
        super().__init__()
        self.layers = nn.ModuleList(DecoderLayer(sizes, i, None) for i in range(sizes.layers))
        self.norm = RMSNorm(sizes.hidden, sizes.norm_eps)
        self.codec_embedding = nn.ModuleList(
            nn.Embedding(sizes.vocab, spec.talker.hidden) for _ in range(spec.num_code_groups - 1)
        )
        self.rope = Rope(sizes)


@dataclass(frozen=True)
class Pass:
    """What differs between the passes of a frame: position, its rotary angles, and what it may look at."""

    place: torch.Tensor  # (1,) int64
    rope: Angles  # (1, head_dim) each
    mask: torch.Tensor  # (1, 1, 1, passes) bool


class CodePredictor(nn.Module):
    """Draws groups 1 and up of a frame, one after the other.

    References run the talker's state and the code of group 0 as a prompt of two; here they are two passes, so that all
    passes have one shape. A predictor of another width than the talker's has a projection of all that it reads.
    """

    def __init__(self, spec: TalkerSpec, sizes: TransformerSpec) -> None:
        super().__init__()
        self.sizes, self.groups = sizes, spec.num_code_groups
        self.model = PredictorTransformer(spec, sizes)
        self.input_projection = (
            nn.Linear(spec.talker.hidden, sizes.hidden) if sizes.hidden != spec.talker.hidden else None
        )
        self.lm_head = nn.ModuleList(
            nn.Linear(self.sizes.hidden, self.sizes.vocab, bias=False) for _ in range(self.groups - 1)
        )
        # Found once: a parameter costs as much to find as a small kernel to run. See `precompute`.
        self._passes: list[Pass] = []
        self._layers: list[DecoderLayer] = []
        self._heads: list[torch.Tensor] = []
        self._embeddings: list[torch.Tensor] = []

    def precompute(self) -> None:
        """To be called once the parameters are loaded."""
        weight = self.model.norm.weight
        places = torch.arange(self.groups, device=weight.device)
        cos, sin = self.model.rope(places.unsqueeze(-1), weight.dtype)
        self._layers = [layer for layer in self.model.layers if isinstance(layer, DecoderLayer)]
        self._heads = list(self.lm_head.parameters())
        self._embeddings = list(self.model.codec_embedding.parameters())
        self._passes = [
            Pass(places[i : i + 1], (cos[i], sin[i]), (places <= i)[None, None, None]) for i in range(self.groups)
        ]

    def new_cache(self, rows: int) -> KeyValueCache:
        """Keys and values of the frames of `rows` rows. Its contents need not outlast a frame."""
        sizes, weight = self.sizes, self.model.norm.weight
        shape = (sizes.layers, rows, sizes.kv_heads, self.groups, sizes.head_dim)
        return KeyValueCache(weight.new_zeros(shape), weight.new_zeros(shape))

    def forward(
        self,
        cache: KeyValueCache,
        hidden: torch.Tensor,
        first: torch.Tensor,
        first_row: torch.Tensor,
        rules: DrawRules,
        noise: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Completes the frames of a batch.

        Args:
            cache: of as many rows.
            hidden: the talker's last states (rows, hidden).
            first: codes of group 0 (rows,) int64.
            first_row: their embeddings (rows, hidden).
            rules: as for `draw`.
            noise: (groups, rows); None if all rows are greedy.

        Returns:
            All codes (rows, groups) int64, and the sum of their embeddings (rows, hidden).
        """
        self._run_layers(hidden, cache, self._passes[0])
        codes, row, total = [first], first_row, first_row
        for group in range(1, self.groups):
            x = self._run_layers(row, cache, self._passes[group])
            logits = F.linear(self.model.norm(x), self._heads[group - 1]).float()
            codes.append(draw(logits, rules, None if noise is None else noise[group]))
            row = F.embedding(codes[-1], self._embeddings[group - 1])
            total = total + row
        return torch.stack(codes, dim=1), total

    def _run_layers(self, x: torch.Tensor, cache: KeyValueCache, at: Pass) -> torch.Tensor:
        """The stack on one position of each row: (rows, the talker's hidden) to (rows, hidden)."""
        if self.input_projection is not None:
            x = self.input_projection(x)
        attend = FrameAttention(cache, at.place, at.mask)
        for layer in self._layers:
            x = layer.forward(x, at.rope, attend)
        return x
