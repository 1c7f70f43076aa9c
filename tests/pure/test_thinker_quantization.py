"""What a CPU cannot run of quantized checkpoints, and that it is said before anything is loaded."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from services.thinker.execution import refused_on_cpu

_ATTENTION, _EXPERT = "layers.0.self_attn.q_proj.weight", "layers.0.mlp.experts.3.up_proj.weight"


@pytest.mark.parametrize(
    ("method", "name", "dtype", "reason"),
    [
        ("compressed-tensors", f"thinker.model.{_ATTENTION}", torch.int8, None),
        ("compressed-tensors", f"thinker.model.{_EXPERT}", torch.int8, "the experts are int8"),
        ("compressed-tensors", f"talker.model.{_EXPERT}", torch.int8, None),
        ("awq", "thinker.model.layers.0.self_attn.q_proj.qweight", torch.int32, "the weights are AWQ"),
        ("gptq", "thinker.model.layers.0.self_attn.q_proj.qweight", torch.int32, "the weights are GPTQ"),
        (None, f"thinker.model.{_EXPERT}", torch.bfloat16, None),
    ],
)
def test_what_a_cpu_cannot_run_is_told(
    tmp_path: Path, method: str | None, name: str, dtype: torch.dtype, reason: str | None
) -> None:
    save_file({name: torch.zeros(2, 2, dtype=dtype)}, tmp_path / "model.safetensors")
    config = {"quantization_config": {"quant_method": method}} if method else {}
    told = refused_on_cpu(config, tmp_path, "bfloat16", amx=False)
    assert (told is None) if reason is None else (told is not None and reason in told and "take a GPU" in told)


@pytest.mark.parametrize(
    ("dtype", "amx", "runs"), [("float32", True, False), ("float32", False, True), ("bfloat16", True, True)]
)
def test_int8_with_amx_takes_no_float32(tmp_path: Path, dtype: str, amx: bool, runs: bool) -> None:
    save_file({f"thinker.model.{_ATTENTION}": torch.zeros(2, 2, dtype=torch.int8)}, tmp_path / "model.safetensors")
    config = {"quantization_config": {"quant_method": "compressed-tensors"}}
    told = refused_on_cpu(config, tmp_path, dtype, amx)
    assert (told is None) if runs else (told is not None and "--dtype=bfloat16" in told)
