"""Reads a talker from a checkpoint: which published tensor fills which parameter, or which part of one."""

import torch

from services.common.engine.weights import Checkpoint
from services.talker.layers import Attention
from services.talker.model import TalkerModel
from services.talker.moe import Experts, Mlp
from services.talker.spec import TalkerSpec, read_spec

_PREFIX = "talker."
_TEXT_EMBEDDINGS = "thinker.model.embed_tokens.weight"
_STORED_DTYPE_OF = "talker.codec_head.weight"
_TABLE_ROWS = 4096  # text embeddings projected at a time


@torch.inference_mode()
def load_model(model: str, device: torch.device, dtype: torch.dtype | None = None) -> TalkerModel:
    """The talker of checkpoint `model`, a directory or a hub id, on `device`, in `dtype` or the one it is stored in.

    Raises:
        ValueError: tensors are missing, unexpected or of the wrong shape.
    """
    checkpoint = Checkpoint(model)
    checkpoint.select(lambda name: name.startswith(_PREFIX) or name == _TEXT_EMBEDDINGS)
    talker = empty_model(read_spec(checkpoint.folder), device, dtype or checkpoint.stored_dtype(_STORED_DTYPE_OF))
    places = _published(talker)
    embeddings = None
    for name, tensor in checkpoint.tensors():
        if name == _TEXT_EMBEDDINGS:
            embeddings = tensor
            continue
        place = places.pop(name.removeprefix(_PREFIX), None)
        if place is None or place.shape != tensor.shape:
            expected = "no such tensor" if place is None else tuple(place.shape)
            raise ValueError(f"tensor {name} has shape {tuple(tensor.shape)}, expected {expected}")
        place.copy_(tensor)
    if embeddings is None or places:
        raise ValueError(f"the checkpoint lacks {sorted(places) or _TEXT_EMBEDDINGS}")
    talker.text_table = torch.empty(len(embeddings), talker.spec.talker.hidden, dtype=talker.dtype, device=device)
    for part, rows in zip(embeddings.split(_TABLE_ROWS), talker.text_table.split(_TABLE_ROWS), strict=True):
        rows.copy_(talker.text_projection(part.to(device, talker.dtype)))
    talker.precompute()
    return talker


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
    """Published name, less the prefix "talker.", of everything there is to load -> its place in the parameters."""
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
