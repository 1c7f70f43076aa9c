"""Names and shapes of the published checkpoints' tensors, by the references' modules on the meta device."""

import functools
import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from transformers import (
    Qwen2_5OmniConfig,
    Qwen2_5OmniForConditionalGeneration,
    Qwen3OmniMoeConfig,
    Qwen3OmniMoeForConditionalGeneration,
)

from services.families.qwen3_tts import FOLDER
from tests.rehearsal.published import codec_config, config
from tests.support.references import qwen_tts

Shapes = Mapping[str, tuple[int, ...]]
_RENAMED = ("thinker.model.audio_tower.", "thinker.model.visual.")  # transformers from 5.21 on; checkpoints are older


@functools.cache
def tensors(name: str) -> Shapes:
    """Of the checkpoint's own folder. Nobody may change it."""
    return dict(_as_published(reference(config(name))))


@functools.cache
def codec_tensors() -> Shapes:
    """Of the folder of Qwen3-TTS' codec."""
    with torch.device("meta"):
        return _shapes(qwen_tts.new_codec(codec_config()))


def reference(of: Mapping[str, Any]) -> nn.Module:
    """The whole model of a config.json, without values."""
    with torch.device("meta"):
        if of["model_type"] == "qwen3_tts":
            return qwen_tts.new_model(of)
        if of["model_type"] == "qwen2_5_omni":
            return Qwen2_5OmniForConditionalGeneration(Qwen2_5OmniConfig(**of))
        return Qwen3OmniMoeForConditionalGeneration(Qwen3OmniMoeConfig(**of))


def _shapes(module: nn.Module) -> Shapes:
    return {name: tuple(tensor.shape) for name, tensor in module.state_dict().items()}


def _as_published(module: nn.Module) -> Iterator[tuple[str, tuple[int, ...]]]:
    """transformers 5 has a layer's experts in one tensor, and gate and up in one; the files have each by itself."""
    for stated, shape in _shapes(module).items():
        name = stated
        for prefix in _RENAMED:
            name = name.replace(prefix, prefix.replace("model.", ""))
        layer, _, kind = name.rpartition(".")
        if not layer.endswith(".experts"):
            yield name, shape
            continue
        experts, outputs, inputs = shape
        parts = ("gate", "up") if kind == "gate_up_proj" else ("down",)
        for expert in range(experts):
            for part in parts:
                yield f"{layer}.{expert}.{part}_proj.weight", (outputs // len(parts), inputs)


def sizes_in_bytes(name: str) -> list[tuple[str, int]]:
    """(name, bytes) of all tensors as stored: bfloat16, and the codec in float32, under its folder's name."""
    stored = [(tensor, 2 * math.prod(shape)) for tensor, shape in tensors(name).items()]
    if config(name)["model_type"] == "qwen3_tts":
        stored += [(f"{FOLDER}/{tensor}", 4 * math.prod(shape)) for tensor, shape in codec_tensors().items()]
    return stored
