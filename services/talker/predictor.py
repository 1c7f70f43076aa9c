"""The code predictor: completes a frame from the talker's state and the code of group 0.

It can be compiled for a CPU, which spends most of a frame's time on starting small kernels.
"""

from dataclasses import dataclass

import torch
import torch.fx.experimental._config as shapes_config
from torch import nn
from torch.nn import functional as F

from services.common.engine.attention import additive
from services.talker.attention import FrameAttention, KeyValueCache
from services.talker.family import TalkerSpec, TransformerSpec
from services.talker.layers import Angles, DecoderLayer, Rope
from services.talker.sampling import PREPARED_WIDTHS, DrawRules, SamplingRows
from services.talker.steps import TORCH, StepKernels

_COMPILED_ROWS = 4  # any number but 0 and 1, for which torch compiles programs of their own


class PredictorTransformer(nn.Module):
    """The decoder stack, and the embeddings of groups 1 and up, which are as wide as the talker."""

    def __init__(self, spec: TalkerSpec, sizes: TransformerSpec) -> None:
        super().__init__()
        self.layers = nn.ModuleList(DecoderLayer(sizes, i, None) for i in range(sizes.layers))
        self.norm = nn.RMSNorm(sizes.hidden, sizes.norm_eps)
        self.codec_embedding = nn.ModuleList(
            nn.Embedding(sizes.vocab, spec.talker.hidden) for _ in range(spec.num_code_groups - 1)
        )
        self.rope = Rope(sizes)


@dataclass(frozen=True)
class Pass:
    """What differs between the passes of a frame."""

    place: torch.Tensor  # (1,) int64
    rope: Angles  # (1, head_dim) each
    mask: torch.Tensor  # (1, 1, 1, passes), additive


class CodePredictor(nn.Module):
    """Draws groups 1 and up of a frame, one after the other.

    References run the talker's state and the code of group 0 as a prompt of two. Here they are two passes, so that all
    passes have one shape.
    """

    def __init__(self, spec: TalkerSpec, sizes: TransformerSpec) -> None:
        super().__init__()
        self.sizes, self.groups = sizes, spec.num_code_groups
        self.model = PredictorTransformer(spec, sizes)
        width = spec.talker.hidden
        self.input_projection = nn.Linear(width, sizes.hidden) if width != sizes.hidden else None
        self.lm_head = nn.ModuleList(nn.Linear(sizes.hidden, sizes.vocab, bias=False) for _ in range(self.groups - 1))
        # Found once: a parameter costs as much to find as a small kernel to run. See `precompute`.
        self._passes: list[Pass] = []
        self._layers: list[DecoderLayer] = []
        self._heads: list[torch.Tensor] = []
        self.embeddings: list[torch.Tensor] = []

    def precompute(self) -> None:
        weight = self.model.norm.weight
        places = torch.arange(self.groups, device=weight.device)
        cos, sin = self.model.rope(places.unsqueeze(-1), weight.dtype)
        self._layers = [layer for layer in self.model.layers if isinstance(layer, DecoderLayer)]
        self._heads = list(self.lm_head.parameters())
        self.embeddings = list(self.model.codec_embedding.parameters())
        self._passes = [
            Pass(places[i : i + 1], (cos[i], sin[i]), additive((places <= i)[None, None, None], weight.dtype))
            for i in range(self.groups)
        ]

    def new_cache(self, rows: int) -> KeyValueCache:
        """Keys and values of the frames of `rows` rows, needed within a frame only."""
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
        kernels: StepKernels = TORCH,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Completes the frames of a batch.

        Args:
            hidden: the talker's last states (rows, hidden).
            first: codes of group 0 (rows,) int64.
            first_row: their embeddings (rows, hidden).
            noise: (groups, rows); None: all rows are greedy.

        Returns:
            All codes (rows, groups) int64, and the sum of their embeddings (rows, hidden).
        """
        self._run_layers(hidden, cache, self._passes[0], None, kernels)
        codes, row, total, norm = [first], first_row, first_row, self.model.norm.weight
        for group in range(1, self.groups):
            x = self._run_layers(row, cache, self._passes[group], norm, kernels)
            logits = F.linear(x, self._heads[group - 1])
            codes.append(kernels.draw(logits, rules, None if noise is None else noise[group]))
            row = F.embedding(codes[-1], self.embeddings[group - 1])
            total = total + row
        return torch.stack(codes, dim=1), total

    def _run_layers(
        self, x: torch.Tensor, cache: KeyValueCache, at: Pass, norm: torch.Tensor | None, kernels: StepKernels
    ) -> torch.Tensor:
        """The stack on one position of each row, as `RunLayers`: (rows, the talker's hidden) to (rows, hidden)."""
        if self.input_projection is not None:
            x = self.input_projection(x)
        return kernels.run_layers(self._layers, x, at.rope, FrameAttention(cache, at.place, at.mask), norm)


class CompiledPredictor:
    """`CodePredictor.forward` as one program for each of PREPARED_WIDTHS and any number of rows.

    The constructor compiles for about half a minute a program. What would need another program runs eagerly.

    Args:
        predictor: loaded, in float32 or bfloat16 on a CPU.
        slots: most rows.

    Raises:
        RuntimeError: there is no C++ compiler (torch's InvalidCxxCompiler), or it failed.
    """

    def __init__(self, predictor: CodePredictor, slots: int) -> None:
        from torch._inductor import config as inductor_config  # torch.compile takes as long to import as torch itself

        weight = predictor.model.norm.weight
        # One row more than is ever in use, so that those in use are always a part: a whole would be another program.
        self._cache: KeyValueCache = predictor.new_cache(max(slots, _COMPILED_ROWS) + 1)
        self._forward = torch.compile(predictor.forward, fullgraph=True)
        # Sizes that happen to be equal mean nothing; and no worker processes stay behind.
        patched = shapes_config.patch(use_duck_shape=False)  # pyright: ignore[reportAttributeAccessIssue]
        with patched, inductor_config.patch(compile_threads=1):
            for width in PREPARED_WIDTHS:
                self._compile(width, weight, predictor.groups)

    def __call__(
        self,
        hidden: torch.Tensor,
        first: torch.Tensor,
        first_row: torch.Tensor,
        rules: DrawRules,
        noise: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As `CodePredictor.forward`, with rules of one of PREPARED_WIDTHS."""
        rows = len(first)
        if not rules.width:
            noise = None
        if rows == 1:
            hidden, first, first_row = hidden.repeat(2, 1), first.repeat(2), first_row.repeat(2, 1)
            rules = DrawRules(rules.width, *(rule.repeat(2, 1) for rule in rules[1:]))
            noise = None if noise is None else noise.repeat(1, 2)
        with torch.compiler.set_stance("eager_on_recompile"):
            codes, row = self._forward(self._cache.rows(len(first)), hidden, first, first_row, rules, noise)
        return codes[:rows], row[:rows]

    def _compile(self, width: int, like: torch.Tensor, groups: int) -> None:
        """`like` gives hidden size and dtype."""
        from torch._dynamo import mark_dynamic

        cache = self._cache.rows(_COMPILED_ROWS)
        hidden, first_row = (like.new_zeros(_COMPILED_ROWS, len(like)) for _ in range(2))
        first = torch.zeros(_COMPILED_ROWS, dtype=torch.long)
        rules = SamplingRows(_COMPILED_ROWS, like.device).first(_COMPILED_ROWS, width)
        noise = torch.zeros(groups, _COMPILED_ROWS) if width else None
        for tensor in (hidden, first, first_row, *rules[1:]):
            mark_dynamic(tensor, 0)
        for tensor in (cache.keys, cache.values, *([] if noise is None else [noise])):
            mark_dynamic(tensor, 1)
        self._forward(cache, hidden, first, first_row, rules, noise)
