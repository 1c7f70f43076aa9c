"""Reads a talker from a checkpoint: which published tensor fills which parameter, or which part of one."""

import torch

from services.common.engine.weights import Checkpoint
from services.talker.family import TEXT_EMBEDDINGS, TalkerFamily, TalkerSpec, read_talker
from services.talker.layers import Attention
from services.talker.model import TalkerModel
from services.talker.moe import Experts, Mlp

_TABLE_ROWS = 4096  # text embeddings projected at a time


@torch.inference_mode()
def load_talker(model: str, device: torch.device, dtype: torch.dtype | None = None) -> tuple[TalkerFamily, TalkerModel]:
    """The talker of checkpoint `model`, a directory or a hub id, on `device`, in `dtype` or the one it is stored in.

    Raises:
        ValueError: no family has such a checkpoint, or tensors are missing, unexpected or of the wrong shape.
    """
    checkpoint = Checkpoint(model)
    family = read_talker(checkpoint.folder)
    weights = family.weights
    checkpoint.select(lambda name: weights.parameter_of(name) is not None)
    talker = empty_model(family.spec, device, dtype or checkpoint.stored_dtype(weights.stored_dtype_of))
    places = _published(talker)
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
    """(text_vocab, hidden) of `embeddings` (text_vocab, width), which are projected a part at a time."""
    if len(embeddings) != talker.spec.text_vocab:
        raise ValueError(f"{len(embeddings)} text ids have embeddings, expected {talker.spec.text_vocab}")
    table = torch.empty(len(embeddings), talker.spec.talker.hidden, dtype=talker.dtype, device=talker.device)
    for part, rows in zip(embeddings.split(_TABLE_ROWS), table.split(_TABLE_ROWS), strict=True):
        rows.copy_(talker.project_text(part))
    return table


@torch.inference_mode()
def empty_model(spec: TalkerSpec, device: torch.device, dtype: torch.dtype) -> TalkerModel:
    """A talker whose parameters have memory but no values, and whose `text_table` is empty."""
    with torch.device("meta"):
        talker = TalkerModel(spec)
    for module in talker.modules():  # the rope tables are real already, all else has no memory yet
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer if buffer.is_meta else buffer.to(device))
    parameters = {name: torch.empty_like(p, dtype=dtype, device=device) for name, p in talker.named_parameters()}
    talker.load_state_dict(parameters, assign=True)
    return talker.requires_grad_(False).eval()


def _published(talker: TalkerModel) -> dict[str, torch.Tensor]:
    """Name of everything there is to load, as `WeightNames.parameter_of` gives it -> its place in the parameters.

    Checkpoints have queries, keys and values apart, gates and up projections apart, and each expert by itself.
    """
    places: dict[str, torch.Tensor] = dict(talker.named_parameters())
    for prefix, module in talker.named_modules():
        if isinstance(module, Attention):
            sizes = [n * module.spec.head_dim for n in (module.spec.heads, module.spec.kv_heads, module.spec.kv_heads)]
            for kind in ("weight", "bias"):
                packed = places.pop(f"{prefix}.qkv_proj.{kind}", None)
                if packed is not None:
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
