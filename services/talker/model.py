"""The talker and its code predictor as modules whose parameters bear the published names, less the "talker." prefix."""

import re
from collections.abc import Callable

import torch
from torch import nn

from services.common.weights import Checkpoint
from services.talker.layers import DecoderLayer, ResizeMlp, RMSNorm, Rope
from services.talker.spec import TalkerSpec, read_spec

_PREFIX = "talker."
_TEXT_EMBEDDINGS = "thinker.model.embed_tokens.weight"
_STORED_DTYPE_OF = "talker.codec_head.weight"
_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")
_TABLE_ROWS = 4096  # text embeddings projected at a time

# (logits (rows, codes) float32, group) -> codes (rows,) int64
DrawCode = Callable[[torch.Tensor, int], torch.Tensor]


class TalkerTransformer(nn.Module):
    """The talker's decoder stack. Reference: transformers' `Qwen3OmniMoeTalkerModel`."""

    def __init__(self, spec: TalkerSpec) -> None:
        super().__init__()
        self.layers = nn.ModuleList(DecoderLayer(spec.talker, spec.moe) for _ in range(spec.talker.layers))
        self.norm = RMSNorm(spec.talker.hidden, spec.talker.norm_eps)
        self.codec_embedding = nn.Embedding(spec.talker.vocab, spec.talker.hidden)
        self.rope = Rope(spec.talker, spec.mrope_section)

    def forward(
        self,
        x: torch.Tensor,
        positions: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        write_at: torch.Tensor,
        mask: torch.Tensor,
    ) -> torch.Tensor:
        """Final-normed states (rows, queries, hidden).

        Args:
            x: (rows, queries, hidden).
            positions: (rows, queries, 3), temporal, height, width.
            keys, values: (layers, rows, kv_heads, capacity, head_dim), updated in place.
            write_at, mask: as in `Attention.forward`.
        """
        rope = self.rope(positions, x.dtype)
        for layer, layer_keys, layer_values in zip(self.layers, keys, values, strict=True):
            x = layer(x, rope, layer_keys, layer_values, write_at, mask)
        return self.norm(x)


class PredictorTransformer(nn.Module):
    """The code predictor's decoder stack and the embeddings of groups 1 and up."""

    def __init__(self, spec: TalkerSpec) -> None:
        super().__init__()
        sizes = spec.predictor
        self.layers = nn.ModuleList(DecoderLayer(sizes, None) for _ in range(sizes.layers))
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
        sizes, rows, model = self.sizes, hidden.shape[0], self.model
        shape = (sizes.layers, rows, sizes.kv_heads, self.groups, sizes.head_dim)
        keys, values = hidden.new_empty(shape), hidden.new_empty(shape)
        places = torch.arange(self.groups, device=hidden.device).expand(rows, -1)
        cos, sin = model.rope(places.unsqueeze(-1), hidden.dtype)
        codes, embeddings = [first], [first_row]
        x, begin = torch.stack((hidden, first_row), dim=1), 0
        for group in range(1, self.groups):
            end = group + 1
            mask = (places[:, None, :end] <= places[:, begin:end, None]).unsqueeze(1)
            rope = cos[:, begin:end], sin[:, begin:end]
            for i, layer in enumerate(model.layers):
                x = layer(x, rope, keys[i], values[i], places[:, begin:end], mask)
            logits = self.lm_head[group - 1](model.norm(x[:, -1]))
            codes.append(draw(logits.float(), group))
            embeddings.append(model.codec_embedding[group - 1](codes[-1]))
            x, begin = embeddings[-1].unsqueeze(1), end
        return torch.stack(codes, dim=1), torch.stack(embeddings, dim=1).sum(dim=1)


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


@torch.inference_mode()
def load_model(model: str, device: torch.device, dtype: torch.dtype | None = None) -> TalkerModel:
    """The talker of checkpoint `model`, a directory or a hub id, on `device`, in `dtype` or the one it is stored in.

    Raises:
        ValueError: tensors are missing, unexpected or of the wrong shape.
    """
    checkpoint = Checkpoint(model, _is_wanted)
    dtype = dtype or checkpoint.stored_dtype(_STORED_DTYPE_OF)
    with torch.device("meta"):
        talker = TalkerModel(read_spec(checkpoint.folder))
    for module in talker.modules():  # the rope tables are real already, all else has no memory yet
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer if buffer.is_meta else buffer.to(device))
    parameters = {name: torch.empty_like(p, dtype=dtype, device=device) for name, p in talker.named_parameters()}
    missing = set(parameters)
    embeddings = None
    for name, tensor in checkpoint.tensors():
        if name == _TEXT_EMBEDDINGS:
            embeddings = tensor
            continue
        target, destination = _destination(name.removeprefix(_PREFIX), parameters)
        if destination is None or destination.shape != tensor.shape:
            expected = None if destination is None else tuple(destination.shape)
            raise ValueError(f"tensor {name} has shape {tuple(tensor.shape)}, expected {expected or 'no such tensor'}")
        destination.copy_(tensor)
        missing.discard(target)
    if embeddings is None or missing:
        raise ValueError(f"the checkpoint lacks {sorted(missing) or _TEXT_EMBEDDINGS}")
    talker.load_state_dict(parameters, assign=True)
    rows = [talker.text_projection(part.to(device, dtype)) for part in embeddings.split(_TABLE_ROWS)]
    talker.text_table = torch.cat(rows)
    return talker.eval()


def _is_wanted(name: str) -> bool:
    return name.startswith(_PREFIX) or name == _TEXT_EMBEDDINGS


def _destination(name: str, parameters: dict[str, torch.Tensor]) -> tuple[str, torch.Tensor | None]:
    """Parameter that tensor `name` belongs to, and the part of it that it fills: experts are published one by one."""
    if not (match := _EXPERT.fullmatch(name)):
        return name, parameters.get(name)
    prefix, expert, kind = match[1], int(match[2]), match[3]
    target = f"{prefix}.{'down' if kind == 'down' else 'gate_up'}_proj"
    stacked = parameters.get(target)
    if stacked is None or expert >= stacked.shape[0]:
        return target, None
    if kind == "down":
        return target, stacked[expert]
    return target, stacked[expert].chunk(2)[0 if kind == "gate" else 1]
