"""Random talker weights with published names."""

from pathlib import Path
from typing import Any

import torch

from services.families.qwen3_tts.talker import WEIGHTS, read_talker
from services.families.tiny_parts import fill
from services.talker.family import TEXT_EMBEDDINGS
from services.talker.model import empty_model, published_parameters


def talker_tensors(config: dict[str, Any], folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of the talker of `config`, float32, from torch's global generator.

    Args:
        folder: has the tokenizer.
    """
    spec = read_talker(config, folder).spec
    assert spec.text_projection is not None
    model = empty_model(spec, torch.device("meta"), torch.float32)
    shapes = {name: place.shape for name, place in published_parameters(model).items()}
    shapes[TEXT_EMBEDDINGS] = torch.Size((spec.text_vocab, spec.text_projection.inputs))
    tensors = {name: torch.empty(shape) for name, shape in shapes.items()}
    for name, tensor in tensors.items():
        fill(name, tensor)
    return {WEIGHTS.tensor_of(name): tensor for name, tensor in tensors.items()}
