"""Small checkpoints whose thinker has quantized weights, in the formats of the libraries that make published ones."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.support.kept import kept_folder

_WEIGHTS = "model.safetensors"
_ATTENTION = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
# Everything but the attention of the thinker's language model: vLLM has int8 kernels for experts on GPUs only.
_IGNORED = ["re:.*mlp.*", "re:.*lm_head.*", "re:.*visual.*", "re:.*audio_tower.*", "re:.*talker.*", "re:.*code2wav.*"]


_GROUP = 32  # inputs that share a scale where weights have four bits
_PER_WORD = 8  # weights of four bits in an int32
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # output that each four bits of a word are of

Tensors = dict[str, torch.Tensor]


def int8_checkpoint(checkpoint: Path) -> Path:
    """compressed-tensors' W8A8: int8 weights with a scale for each output, activations quantized as they come."""
    return _checkpoint(checkpoint, "int8", _int8, _compressed_config("int", "int-quantized"))


def fp8_checkpoint(checkpoint: Path) -> Path:
    """compressed-tensors' FP8: as int8, in float8_e4m3fn."""
    return _checkpoint(checkpoint, "fp8", _fp8, _compressed_config("float", "float-quantized"))


def awq_checkpoint(checkpoint: Path) -> Path:
    """AutoAWQ's `gemm`: four bits a weight, a scale and a zero for every group of inputs."""
    config = {
        "quant_method": "awq",
        "version": "gemm",
        "bits": 4,
        "group_size": _GROUP,
        "zero_point": True,
        "modules_to_not_convert": ["mlp", "lm_head", "visual", "audio_tower", "talker", "code2wav"],
    }
    return _checkpoint(checkpoint, "awq", _awq, config)


def gptq_checkpoint(checkpoint: Path) -> Path:
    """AutoGPTQ's format: four bits a weight, a scale for every group of inputs, all zeros in the middle."""
    config = {
        "quant_method": "gptq",
        "bits": 4,
        "group_size": _GROUP,
        "sym": True,
        "desc_act": False,
        "lm_head": False,
        "dynamic": {"-:.*mlp.*": {}},
    }
    return _checkpoint(checkpoint, "gptq", _gptq, config)


def _checkpoint(
    checkpoint: Path, method: str, quantized: Callable[[str, torch.Tensor], Tensors], config: dict[str, Any]
) -> Path:
    def make(out: Path) -> None:
        shutil.copytree(checkpoint, out, dirs_exist_ok=True)
        weights = load_file(checkpoint / _WEIGHTS)
        for name in [name for name in weights if _is_quantized(name)]:
            weights |= quantized(name.removesuffix(".weight"), weights.pop(name))
        save_file(weights, out / _WEIGHTS, {"format": "pt"})
        written = json.loads((out / "config.json").read_text())
        written["quantization_config"] = config
        (out / "config.json").write_text(json.dumps(written, indent=2))

    return kept_folder(make, method, checkpoint, Path(__file__))


def _int8(name: str, weight: torch.Tensor) -> Tensors:
    scale = weight.abs().amax(dim=1, keepdim=True) / 127
    rounded = (weight / scale).round().clamp(-127, 127).to(torch.int8)
    return {f"{name}.weight": rounded, f"{name}.weight_scale": scale}


def _fp8(name: str, weight: torch.Tensor) -> Tensors:
    scale = weight.abs().amax(dim=1, keepdim=True) / torch.finfo(torch.float8_e4m3fn).max
    return {f"{name}.weight": (weight / scale).to(torch.float8_e4m3fn), f"{name}.weight_scale": scale}


def _awq(name: str, weight: torch.Tensor) -> Tensors:
    grouped = weight.T.unflatten(0, (-1, _GROUP))  # (groups, inputs, outputs)
    low, high = grouped.amin(dim=1), grouped.amax(dim=1)
    scale = (high - low).clamp_min(1e-6) / 15
    zero = (-low / scale).round().clamp(0, 15)
    rounded = (grouped / scale[:, None] + zero[:, None]).round().clamp(0, 15).flatten(0, 1)
    order = torch.tensor(_AWQ_ORDER)
    return {
        f"{name}.qweight": _packed(rounded.unflatten(1, (-1, _PER_WORD))[..., order]),
        f"{name}.qzeros": _packed(zero.unflatten(1, (-1, _PER_WORD))[..., order]),
        f"{name}.scales": scale.half().contiguous(),
    }


def _gptq(name: str, weight: torch.Tensor) -> Tensors:
    grouped = weight.T.unflatten(0, (-1, _GROUP))
    scale = grouped.abs().amax(dim=1).clamp_min(1e-6) / 7
    rounded = (grouped / scale[:, None] + 8).round().clamp(0, 15).flatten(0, 1)
    zeros = torch.full_like(scale, 7)  # one less than it is, as the format has it
    return {
        f"{name}.qweight": _packed(rounded.unflatten(0, (-1, _PER_WORD)).movedim(1, -1)),
        f"{name}.qzeros": _packed(zeros.unflatten(1, (-1, _PER_WORD))),
        f"{name}.scales": scale.half().contiguous(),
        f"{name}.g_idx": torch.arange(weight.shape[1], dtype=torch.int32) // _GROUP,
    }


def _packed(values: torch.Tensor) -> torch.Tensor:
    """(..., 8) whole numbers below 16 as (...) int32, the first in the lowest bits."""
    words = (values.long() << (4 * torch.arange(_PER_WORD))).sum(dim=-1)
    return words.where(words < 2**31, words - 2**32).int().contiguous()


def _is_quantized(name: str) -> bool:
    return name.startswith("thinker.model.layers.") and name.removesuffix(".weight").endswith(_ATTENTION)


def _compressed_config(type: str, format: str) -> dict[str, Any]:
    of_all = {"num_bits": 8, "type": type, "symmetric": True}
    return {
        "quant_method": "compressed-tensors",
        "format": format,
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
