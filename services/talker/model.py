"""The talker and its code predictor."""

from collections.abc import Callable

import torch
from torch import nn

from services.talker.attend import Attend, AttendFrame, KeyValueCache
from services.talker.layers import Attention, DecoderLayer, ResizeMlp, RMSNorm, Rope
from services.talker.spec import TalkerSpec

# (logits (rows, codes) float32, group) -> codes (rows,) int64
DrawCode = Callable[[torch.Tensor, int], torch.Tensor]


class TalkerTransformer(nn.Module):
    """The talker's decoder stack. Reference: transformers' `Qwen3OmniMoeTalkerModel`."""

    def __init__(self, spec: TalkerSpec) -> None:
        super().__init__()
        self.layers = nn.ModuleList(DecoderLayer(spec.talker, i, spec.moe) for i in range(spec.talker.layers))
        self.norm = RMSNorm(spec.talker.hidden, spec.talker.norm_eps)
        self.codec_embedding = nn.Embedding(spec.talker.vocab, spec.talker.hidden)
        self.rope = Rope(spec.talker, spec.mrope_section)

    def forward(self, x: torch.Tensor, positions: torch.Tensor, attend: Attend) -> torch.Tensor:
        """Final-normed states (tokens, hidden).

        Args:
            x: (tokens, hidden).
            positions: (tokens, 3), temporal, height, width.
            attend: what attention sees and stores.
        """
        rope = self.rope(positions, x.dtype)
        for layer in self.layers:
            x = layer(x, rope, attend)
        return self.norm(x)


class PredictorTransformer(nn.Module):
    """The code predictor's decoder stack and the embeddings of groups 1 and up."""

    def __init__(self, spec: TalkerSpec) -> None:
        super().__init__()
        sizes = spec.predictor
        self.layers = nn.ModuleList(DecoderLayer(sizes, i, None) for i in range(sizes.layers))
        self.norm = RMSNorm(sizes.hidden, sizes.norm_eps)
        self.codec_embedding = nn.ModuleList(
            nn.Embedding(sizes.vocab, sizes.hidden) for _ in range(spec.num_code_groups - 1)
        )
        self.rope = Rope(sizes)


class CodePredictor(nn.Module):
    """Draws groups 1 and up of a frame, one after the other.

    Reference: transformers' `Qwen3OmniMoeTalkerCodePredictorModelForConditionalGeneration`.
    """

    def __init__(self, spec: TalkerSpec) -> None:
        super().__init__()
        self.sizes, self.groups = spec.predictor, spec.num_code_groups
        self.model = PredictorTransformer(spec)
        self.lm_head = nn.ModuleList(
            nn.Linear(self.sizes.hidden, self.sizes.vocab, bias=False) for _ in range(self.groups - 1)
        )

    def forward(
        self, hidden: torch.Tensor, first: torch.Tensor, first_row: torch.Tensor, draw: DrawCode
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Completes the frames of a batch.

        Args:
            hidden: the talker's last states (rows, hidden).
            first: codes of group 0 (rows,) int64.
            first_row: their embeddings (rows, hidden).
            draw: draws a code from the logits of a group.

        Returns:
            All codes (rows, groups) int64, and the sum of their embeddings (rows, hidden).
        """
        sizes, model = self.sizes, self.model
        shape = (sizes.layers, hidden.shape[0], sizes.kv_heads, self.groups, sizes.head_dim)
        attend = AttendFrame(KeyValueCache(hidden.new_empty(shape), hidden.new_empty(shape)))
        places = torch.arange(self.groups, device=hidden.device)
        cos, sin = model.rope(places.unsqueeze(-1), hidden.dtype)
        codes, row, total = [first], first_row, first_row
        x = torch.stack((hidden, first_row), dim=1)
        for group in range(1, self.groups):
            end = attend.begin + x.shape[1]
            rope = cos[attend.begin : end], sin[attend.begin : end]
            for layer in model.layers:
                x = layer(x, rope, attend)
            logits = self.lm_head[group - 1](model.norm(x[:, -1]))
            codes.append(draw(logits.float(), group))
            row = model.codec_embedding[group - 1](codes[-1])
            total = total + row
            x, attend.begin = row.unsqueeze(1), end
        return torch.stack(codes, dim=1), total


class TalkerModel(nn.Module):
    """Everything of the talker that has weights.

    `text_table` holds the projected text embedding of every token id: (text vocabulary, hidden). Layer 0 of a text
    token is its embedding, so nothing else of a text token is ever needed.
    """

    text_table: torch.Tensor

    def __init__(self, spec: TalkerSpec) -> None:
        super().__init__()
        self.spec = spec
        self.model = TalkerTransformer(spec)
        self.text_projection = ResizeMlp(spec.thinker_hidden, spec.talker)
        self.hidden_projection = ResizeMlp(spec.thinker_hidden, spec.talker)
        self.codec_head = nn.Linear(spec.talker.hidden, spec.talker.vocab, bias=False)
        self.code_predictor = CodePredictor(spec)
        self.register_buffer("text_table", torch.empty(0), persistent=False)

    @property
    def device(self) -> torch.device:
        return self.codec_head.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.codec_head.weight.dtype

    def precompute(self) -> None:
        """To be called once the parameters are loaded."""
        for module in self.modules():
            if isinstance(module, Attention):
                module.precompute()
