"""The talker: its decoder stack, its projections, and its code predictor."""

import torch
from torch import nn
from torch.nn import functional as F

from services.common.engine.device import Staging
from services.talker.attention import Attend
from services.talker.family import Prompt, TalkerSpec
from services.talker.layers import DecoderLayer, RMSNorm, Rope, projection
from services.talker.moe import RunExperts
from services.talker.predictor import CodePredictor


class TalkerTransformer(nn.Module):
    """The talker's decoder stack."""

    def __init__(self, spec: TalkerSpec) -> None:
        super().__init__()
        self.layers = nn.ModuleList(DecoderLayer(spec.talker, i, spec.moe) for i in range(spec.talker.layers))
        self.norm = RMSNorm(spec.talker.hidden, spec.talker.norm_eps)
        self.codec_embedding = nn.Embedding(spec.talker.vocab, spec.talker.hidden)
        self.rope = Rope(spec.talker)

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
    """Everything of the talker that has weights. What its checkpoint lacks is None.

    `text_table` holds the embedding of every text id in the talker's space: (text_vocab, hidden). Nothing else is ever
    needed of a text id.
    """

    text_table: torch.Tensor

    def __init__(self, spec: TalkerSpec) -> None:
        super().__init__()
        self.spec = spec
        self.model = TalkerTransformer(spec)
        self.text_projection = projection(spec.text_projection, spec.talker)
        self.state_projection = projection(spec.state_projection, spec.talker)
        self.codec_head = nn.Linear(spec.talker.hidden, spec.talker.vocab, bias=False)
        self.code_predictor = CodePredictor(spec, spec.predictor) if spec.predictor else None
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

    @torch.inference_mode()
    def embed(self, prompt: Prompt, staging: Staging) -> torch.Tensor:
        """The rows of `prompt`: (rows, hidden), on the model's device. `staging` is to there."""
        rows = self.text_table[prompt.text_ids.clamp_min(0).to(self.device)]
        rows[torch.nonzero(prompt.text_ids < 0).flatten().to(self.device)] = 0
        coded = torch.nonzero(prompt.codes >= 0).flatten()
        rows[coded.to(self.device)] += self.embed_codes(prompt.codes[coded].to(self.device))
        if prompt.states is not None:
            picked = torch.cat(list(prompt.states.pieces))[prompt.states.picked]
            rows[prompt.states.places.to(self.device)] += self.project_states(staging.to_device(picked))
        return rows

    def embed_codes(self, codes: torch.Tensor) -> torch.Tensor:
        """Embeddings (rows, hidden) of `codes` (rows,) of group 0."""
        return F.embedding(codes, self.model.codec_embedding.weight)

    def project_states(self, states: torch.Tensor) -> torch.Tensor:
        """(rows, hidden) of a thinker's states (rows, width) of any floating dtype."""
        assert self.state_projection is not None
        return self.state_projection(states.to(self.dtype))

    def project_text(self, embeddings: torch.Tensor) -> torch.Tensor:
        """What `text_table` holds of text embeddings (rows, width)."""
        embeddings = embeddings.to(self.device, self.dtype)
        return embeddings if self.text_projection is None else self.text_projection(embeddings)
