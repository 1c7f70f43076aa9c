"""The talker: its decoder stack, its projections, and its code predictor."""

import torch
from torch import nn

from services.talker.attend import Attend
from services.talker.layers import DecoderLayer, ResizeMlp, RMSNorm, Rope
from services.talker.moe import RunExperts
from services.talker.predictor import CodePredictor
from services.talker.spec import TalkerSpec


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
            if isinstance(module, DecoderLayer | CodePredictor):
                module.precompute()

    def use_experts(self, run_experts: RunExperts) -> None:
        """How layers with experts run them from now on; at first by `grouped_experts`."""
        for layer in self.model.layers:
            assert isinstance(layer, DecoderLayer)
            layer.run_experts = run_experts
