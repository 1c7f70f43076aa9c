"""Random talker weights with published names."""

import math
from pathlib import Path
from typing import Any

import torch

from services.families.qwen3_tts.talker import WEIGHTS, read_talker
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
    return {WEIGHTS.tensor_of(name): _random(name, shape) for name, shape in shapes.items()}


def _random(name: str, shape: torch.Size) -> torch.Tensor:
    if "embedding" in name:
        return torch.randn(shape)
    if len(shape) >= 2:
        return torch.randn(shape) / math.sqrt(shape[-1])
    if name.endswith("bias"):
        return torch.randn(shape) * 0.1
    return 1 + torch.randn(shape) * 0.1  # norms
