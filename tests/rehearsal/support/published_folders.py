"""Checkpoints of published sizes as folders: config.json, a tokenizer, and the tensors' names and shapes. Their values
are holes in a file, which take no room.

Thinkers also with quantized weights, in the formats of the tools that make such checkpoints.
"""

import json
import math
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from services.common.engine.weights import SINGLE_FILE
from tests.rehearsal.published import config
from tests.rehearsal.support.published_tensors import tensors
from tests.support.weights.checkpoints import omni_checkpoint

_TINY = {"qwen3_omni_moe": "qwen3-omni", "qwen2_5_omni": "qwen2.5-omni"}  # whose tokenizer is taken, by model_type
_BYTES = {"F8_E4M3": 1, "BF16": 2, "F16": 2, "F32": 4, "I32": 4}
METHODS = ("fp8", "compressed-tensors", "awq", "gptq")
GROUP = 128  # inputs of a scale, of weights with four bits; and a side of a block with eight
_PACKED = 8  # weights of four bits in an int32


class Header(NamedTuple):
    """A tensor, by the names of safetensors."""

    dtype: str
    shape: tuple[int, ...]


def write(name: str, folder: Path, method: str | None = None, layers: int | None = None) -> Path:
    """Writes the published checkpoint `name` into the new directory `folder`, and returns it.

    Args:
        method: one of `METHODS`, for the layers of the language model.
        layers: of the language model, the first ones; None: all.
    """
    whole = json.loads(json.dumps(config(name)))
    shutil.copytree(
        omni_checkpoint(arch=_TINY[whole["model_type"]]),
        folder,
        ignore=shutil.ignore_patterns("*.safetensors", "config.json"),
    )
    stored = dict(headers(name, method, layers))
    if layers is not None:
        whole["thinker_config"]["text_config"]["num_hidden_layers"] = layers
    if method is not None:
        whole["quantization_config"] = _quantization(method, stored)
    (folder / "config.json").write_text(json.dumps(whole))
    _write_holes(folder / SINGLE_FILE, stored)
    return folder


def _write_holes(file: Path, tensors: dict[str, Header]) -> None:
    end, stated = 0, {}
    for name, (dtype, shape) in tensors.items():
        begin, end = end, end + _BYTES[dtype] * math.prod(shape)
        stated[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(stated).encode()
    text += b" " * (-len(text) % 8)  # as safetensors does, so that tensors lie at addresses of their dtype
    with file.open("wb") as out:
        out.write(len(text).to_bytes(8, "little") + text)
        out.truncate(8 + len(text) + end)


def headers(name: str, method: str | None, layers: int | None) -> Iterator[tuple[str, Header]]:
    for tensor, shape in tensors(name).items():
        block = tensor.removeprefix("thinker.model.layers.")
        if layers is not None and block != tensor and int(block.partition(".")[0]) >= layers:
            continue
        module, _, kind = tensor.rpartition(".")
        if method is not None and block != tensor and kind == "weight" and module.endswith("_proj"):
            for part, header in _quantized(method, *shape).items():
                yield f"{module}.{part}", header
        else:
            yield tensor, Header("BF16", shape)


def _quantized(method: str, outputs: int, inputs: int) -> dict[str, Header]:
    """What stands for a weight of (outputs, inputs)."""
    groups, scales = inputs // GROUP, Header("F16", (inputs // GROUP, outputs))
    zeros = Header("I32", (groups, outputs // _PACKED))
    if method == "awq":
        return {"qweight": Header("I32", (inputs, outputs // _PACKED)), "qzeros": zeros, "scales": scales}
    if method == "gptq":
        weight = Header("I32", (inputs // _PACKED, outputs))
        return {"qweight": weight, "qzeros": zeros, "scales": scales, "g_idx": Header("I32", (inputs,))}
    weight = Header("F8_E4M3", (outputs, inputs))
    if method == "fp8":
        return {"weight": weight, "weight_scale_inv": Header("BF16", (-(-outputs // GROUP), -(-inputs // GROUP)))}
    return {"weight": weight, "weight_scale": Header("BF16", (outputs, 1))}


def _quantization(method: str, stored: Mapping[str, Header]) -> dict[str, Any]:
    """`quantization_config` for these tensors."""
    whole = [name.removesuffix(".weight") for name, each in stored.items() if _is_whole_layer(name, each)]
    if method == "fp8":  # as the makers of the models publish theirs
        block = {"fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [GROUP, GROUP]}
        return {"quant_method": "fp8", "modules_to_not_convert": whole, **block}
    if method == "compressed-tensors":
        weights, inputs = {"strategy": "channel", "dynamic": False}, {"strategy": "token", "dynamic": True}
        eight = {"num_bits": 8, "type": "float", "symmetric": True}
        groups = {"targets": ["Linear"], "weights": eight | weights, "input_activations": eight | inputs}
        stated = {"quant_method": method, "format": "float-quantized", "quantization_status": "compressed"}
        return {**stated, "ignore": whole, "config_groups": {"group_0": groups}}
    four = {"quant_method": method, "bits": 4, "group_size": GROUP}
    if method == "awq":  # which layers are whole, vLLM finds in the file
        return {**four, "version": "gemm", "zero_point": True, "modules_to_not_convert": None}
    return {**four, "sym": True, "desc_act": False, "lm_head": False}


def _is_whole_layer(name: str, tensor: Header) -> bool:
    return name.endswith(".weight") and tensor.dtype == "BF16" and len(tensor.shape) > 1
