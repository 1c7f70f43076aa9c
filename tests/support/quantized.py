"""Small checkpoints whose thinker has quantized weights, in the formats of the libraries that make published ones."""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.support.kept import kept_folder

_WEIGHTS = "model.safetensors"
_ATTENTION = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
# Everything but the attention of the thinker's language model: vLLM has int8 kernels for experts on GPUs only.
_IGNORED = ["re:.*mlp.*", "re:.*lm_head.*", "re:.*visual.*", "re:.*audio_tower.*", "re:.*talker.*", "re:.*code2wav.*"]


def int8_checkpoint(checkpoint: Path) -> Path:
    """compressed-tensors' W8A8: int8 weights with a scale for each output, activations quantized as they come."""

    def make(out: Path) -> None:
        shutil.copytree(checkpoint, out, dirs_exist_ok=True)
        weights = load_file(checkpoint / _WEIGHTS)
        for name in [name for name in weights if _is_quantized(name)]:
            weight = weights.pop(name)
            scale = weight.abs().amax(dim=1, keepdim=True) / 127
            weights[name] = (weight / scale).round().clamp(-127, 127).to(torch.int8)
            weights[f"{name}_scale"] = scale
        save_file(weights, out / _WEIGHTS, {"format": "pt"})
        config = json.loads((out / "config.json").read_text())
        config["quantization_config"] = _int8_config()
        (out / "config.json").write_text(json.dumps(config, indent=2))

    return kept_folder(make, "int8", checkpoint, Path(__file__))


def _is_quantized(name: str) -> bool:
    return name.startswith("thinker.model.layers.") and name.removesuffix(".weight").endswith(_ATTENTION)


def _int8_config() -> dict[str, Any]:
    of_all = {"num_bits": 8, "type": "int", "symmetric": True}
    return {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "quantization_status": "compressed",
        "ignore": _IGNORED,
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": of_all | {"strategy": "channel", "dynamic": False},
                "input_activations": of_all | {"strategy": "token", "dynamic": True},
            }
        },
    }
