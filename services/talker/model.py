"""The talker's decoder stack, projections and code predictor, and how a checkpoint fills them."""

import torch
from torch import nn
from torch.nn import functional as F

from services.common.engine.device import Staging
from services.common.engine.weights import CONFIG_FILES, TOKENIZER_FILES, Checkpoint, compute_dtype
from services.registry import family_of, read_config
from services.talker.attention import Attend
from services.talker.family import TEXT_EMBEDDINGS, TalkerFamily, TalkerModule, TalkerSpec
from services.talker.inputs import Prompt
from services.talker.layers import Attention, DecoderLayer, Rope, projection
from services.talker.moe import Experts, Mlp, RunExperts
from services.talker.predictor import CodePredictor
from services.talker.steps import TORCH, StepKernels

_TABLE_ROWS = 4096  # text embeddings projected at a time


class TalkerTransformer(nn.Module):
    def __init__(self, spec: TalkerSpec) -> None:
        super().__init__()
        self.layers = nn.ModuleList(DecoderLayer(spec.talker, i, spec.moe) for i in range(spec.talker.layers))
        self.norm = nn.RMSNorm(spec.talker.hidden, spec.talker.norm_eps)
        shared = spec.text_projection if spec.shares_projection else None
        self.codec_embedding = nn.Embedding(spec.talker.vocab, shared.inputs if shared else spec.talker.hidden)
        self.rope = Rope(spec.talker)

    def forward(
        self, x: torch.Tensor, positions: torch.Tensor, attend: Attend, kernels: StepKernels = TORCH
    ) -> torch.Tensor:
        """Final-normed states of `x` (tokens, hidden), kept, at `positions` (tokens, 3): time, height, width."""
        layers = [layer for layer in self.layers if isinstance(layer, DecoderLayer)]
        return kernels.run_layers(layers, x, self.rope(positions, x.dtype), attend, self.norm.weight)


class TalkerModel(nn.Module):
    """Everything of the talker that has weights. What its checkpoint lacks is None.

    `text_table` holds the embedding of every text id in the talker's space: (text_vocab, hidden). A shared projection's
    bias is part of it; a row without text begins with the bias.
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
        if shared := self._shared_projection:
            codes = self.model.codec_embedding
            codes.weight = nn.Parameter(F.linear(codes.weight, shared.weight), requires_grad=False)

    @property
    def _shared_projection(self) -> nn.Linear | None:
        projection = self.text_projection
        return projection if self.spec.shares_projection and isinstance(projection, nn.Linear) else None

    def use_experts(self, run_experts: RunExperts) -> None:
        """How layers with experts run them from now on; the default is `grouped_experts`."""
        for layer in self.model.layers:
            assert isinstance(layer, DecoderLayer)
            layer.run_experts = run_experts

    @torch.inference_mode()
    def embed(self, prompt: Prompt, staging: Staging) -> torch.Tensor:
        """The rows of `prompt`: (rows, hidden), on the model's device. `staging` is to there."""
        rows = self.text_table[prompt.text_ids.clamp_min(0).to(self.device)]
        shared = self._shared_projection
        without = 0 if shared is None or shared.bias is None else shared.bias
        rows[torch.nonzero(prompt.text_ids < 0).flatten().to(self.device)] = without
        coded = torch.nonzero(prompt.codes >= 0).flatten()
        rows[coded.to(self.device)] += self.embed_codes(prompt.codes[coded].to(self.device))
        if prompt.states is not None:
            picked = torch.cat(list(prompt.states.pieces))[prompt.states.picked]
            rows[prompt.states.places.to(self.device)] += self.project_states(staging.to_device(picked))
        for row, vector in prompt.vectors:
            rows[row] += vector.to(rows)
        if prompt.frames is not None:
            rows[prompt.frames_at : prompt.frames_at + len(prompt.frames)] += self._embed_frames(prompt.frames)
        return rows

    def embed_codes(self, codes: torch.Tensor) -> torch.Tensor:
        """Embeddings (rows, hidden) of `codes` (rows,) of group 0."""
        return F.embedding(codes, self.model.codec_embedding.weight)

    def _embed_frames(self, frames: torch.Tensor) -> torch.Tensor:
        """(frames, hidden): sums of the embeddings of `frames` (frames, groups)."""
        first, *others = frames.to(self.device).T
        rows = self.embed_codes(first)
        for codes, embedding in zip(others, self.code_predictor.embeddings if self.code_predictor else (), strict=True):
            rows = rows + F.embedding(codes, embedding)
        return rows

    def project_states(self, states: torch.Tensor) -> torch.Tensor:
        """(rows, hidden) of a thinker's states (rows, width) of any floating dtype."""
        if shared := self._shared_projection:
            return F.linear(states.to(self.dtype), shared.weight)
        assert self.state_projection is not None
        return self.state_projection(states.to(self.dtype))

    def project_text(self, embeddings: torch.Tensor) -> torch.Tensor:
        """Rows of `text_table` of text embeddings (rows, width)."""
        embeddings = embeddings.to(self.device, self.dtype)
        return embeddings if self.text_projection is None else self.text_projection(embeddings)


@torch.inference_mode()
def load_talker(model: str, device: torch.device, dtype: torch.dtype | None = None) -> tuple[TalkerFamily, TalkerModel]:
    """The talker of the directory or hub id `model`, in `dtype` or its own.

    Raises:
        ValueError: no family has such a checkpoint, or tensors are missing, unexpected or of the wrong shape.
    """
    checkpoint = Checkpoint(model, (*CONFIG_FILES, *TOKENIZER_FILES))
    config = read_config(checkpoint.folder)
    module: TalkerModule = family_of(config).part("talker", config)  # pyright: ignore[reportAssignmentType]
    family = module.read_talker(config, checkpoint.folder)
    weights = family.weights
    checkpoint.select(lambda name: weights.parameter_of(name) is not None)
    stored = checkpoint.stored_dtype(weights.stored_dtype_of)
    talker = empty_model(family.spec, device, dtype or compute_dtype(config, stored))
    places = published_parameters(talker)
    embeddings = None
    for name, tensor in checkpoint.tensors():
        own = weights.parameter_of(name)
        if own == TEXT_EMBEDDINGS:
            embeddings = tensor
            continue
        place = places.pop(own, None) if own else None
        if place is None or place.shape != tensor.shape:
            expected = "no such tensor" if place is None else tuple(place.shape)
            raise ValueError(f"tensor {name} has shape {tuple(tensor.shape)}, expected {expected}")
        place.copy_(tensor)
    if embeddings is None or places:
        raise ValueError(f"the checkpoint lacks {sorted(places) or TEXT_EMBEDDINGS}")
    talker.text_table = _text_table(talker, embeddings)
    talker.precompute()
    return family, talker


def _text_table(talker: TalkerModel, embeddings: torch.Tensor) -> torch.Tensor:
    """(text_vocab, hidden) of `embeddings` (text_vocab, width), projected part by part."""
    if len(embeddings) != talker.spec.text_vocab:
        raise ValueError(f"{len(embeddings)} text ids have embeddings, expected {talker.spec.text_vocab}")
    table = torch.empty(len(embeddings), talker.spec.talker.hidden, dtype=talker.dtype, device=talker.device)
    for part, rows in zip(embeddings.split(_TABLE_ROWS), table.split(_TABLE_ROWS), strict=True):
        rows.copy_(talker.project_text(part))
    return table


@torch.inference_mode()
def empty_model(spec: TalkerSpec, device: torch.device, dtype: torch.dtype) -> TalkerModel:
    """A talker whose parameters have no values, with an empty `text_table`."""
    with torch.device("meta"):
        talker = TalkerModel(spec)
    for module in talker.modules():  # the rope tables are real already, all else has no memory yet
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer if buffer.is_meta else buffer.to(device))
    parameters = {name: torch.empty_like(p, dtype=dtype, device=device) for name, p in talker.named_parameters()}
    talker.load_state_dict(parameters, assign=True)
    return talker.requires_grad_(False).eval()


def published_parameters(talker: TalkerModel) -> dict[str, torch.Tensor]:
    """The place in the parameters of each name that `WeightNames.parameter_of` gives.

    Checkpoints have queries, keys and values apart, gates and up projections apart, and each expert by itself.
    """
    places: dict[str, torch.Tensor] = dict(talker.named_parameters())
    for prefix, module in talker.named_modules():
        if isinstance(module, Attention):
            sizes = [n * module.spec.head_dim for n in (module.spec.heads, module.spec.kv_heads, module.spec.kv_heads)]
            for kind in ("weight", "bias"):
                if (packed := places.pop(f"{prefix}.qkv_proj.{kind}", None)) is not None:
                    names = [f"{prefix}.{name}_proj.{kind}" for name in "qkv"]
                    places.update(zip(names, packed.split(sizes), strict=True))
        elif isinstance(module, Mlp):
            gate, up = places.pop(f"{prefix}.gate_up_proj.weight").chunk(2)
            places |= {f"{prefix}.gate_proj.weight": gate, f"{prefix}.up_proj.weight": up}
        elif isinstance(module, Experts):
            gate_up, down = places.pop(f"{prefix}.gate_up_proj"), places.pop(f"{prefix}.down_proj")
            for expert in range(len(down)):
                gate, up = gate_up[expert].chunk(2)
                places[f"{prefix}.{expert}.gate_proj.weight"] = gate
                places[f"{prefix}.{expert}.up_proj.weight"] = up
                places[f"{prefix}.{expert}.down_proj.weight"] = down[expert]
    return places
