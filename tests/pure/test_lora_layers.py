"""Which of the thinker's layers have a place for adapters, what vLLM takes for it, and what is refused without one."""

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from services.sizes import adapted_bytes, adapter_bytes
from services.thinker.config import ThinkerSettings
from services.thinker.lora_targets import EXPERTS, LINEAR, adapted_layers
from tests.support.weights.lora import adapter
from tests.support.weights.published_sizes import PUBLISHED

ATTENTION = ["o_proj", "qkv_proj"]


def named(folder: Path, *parts: str) -> str:
    """A flag that names an adapter of these layers of a block."""
    tensors = {f"base_model.model.thinker.model.layers.0.{part}.lora_A.weight": torch.zeros(1, 1) for part in parts}
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    return f"--lora={folder.name}={folder}"


def layers(*flags: str, on_cpu: bool = False) -> Sequence[str]:
    return adapted_layers(ThinkerSettings.load(["--model=m", *flags]), on_cpu=on_cpu)


def test_a_place_is_where_the_named_adapters_change_something(tmp_path: Path) -> None:
    sea = named(tmp_path / "sea", "self_attn.q_proj", "self_attn.o_proj")
    hill = named(tmp_path / "hill", "self_attn.v_proj", "mlp.up_proj")
    lake = named(tmp_path / "lake", "mlp.experts.base_layer")
    assert layers(sea) == ATTENTION
    assert layers(sea, hill) == ["gate_up_proj", *ATTENTION]
    assert layers(lake) == sorted(EXPERTS)
    assert layers(lake, sea) == sorted({*EXPERTS, *ATTENTION})


def test_adapters_that_may_come_have_a_place_too(tmp_path: Path) -> None:
    lake = named(tmp_path / "lake", "mlp.gate")
    assert layers("--lora-root=/a") == sorted(LINEAR)
    assert layers("--lora-root=/a", lake) == sorted({*LINEAR, *EXPERTS})
    assert layers("--lora-root=/a", "--lora-experts=true") == sorted({*LINEAR, *EXPERTS})


def test_a_cpu_has_no_place_in_experts(tmp_path: Path) -> None:
    lake = named(tmp_path / "lake", "mlp.experts")
    assert layers(lake, "--lora-experts=true", on_cpu=True) == sorted(LINEAR)


def test_an_adapter_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    tower = named(tmp_path / "tower", "nothing")
    with pytest.raises(ValueError, match=r"^lora tower: .*adapts no layer of the thinker's language model"):
        layers(tower)
    with pytest.raises(ValueError, match=r"^lora sea: /nowhere/adapter_model.safetensors: No such file"):
        layers("--lora=sea=/nowhere")
    (tmp_path / "tower" / "adapter_model.safetensors").write_text("broken")
    with pytest.raises(ValueError, match=r"^lora tower: "):
        layers(tower)


def test_vllm_is_told_these_layers(tmp_path: Path) -> None:
    from services.thinker.execution import _lora_args

    settings = ThinkerSettings.load(["--model=m", "--max-loras=2", named(tmp_path / "sea", "self_attn.k_proj")])
    on_gpu, on_cpu = (_lora_args(settings, on_cpu=each) for each in (False, True))
    assert on_gpu["lora_target_modules"] == ["qkv_proj"]
    assert (on_gpu["max_loras"], on_gpu["max_cpu_loras"], on_gpu["max_lora_rank"]) == (2, 8, 16)
    assert on_cpu["lora_target_modules"] == sorted(LINEAR)
    assert (on_cpu["max_loras"], on_cpu["max_cpu_loras"]) == (9, 9)
    assert _lora_args(ThinkerSettings.load(["--model=m"]), on_cpu=False) == {}


def test_experts_take_kernels_for_adapters_only_where_they_have_a_place() -> None:
    """vLLM chooses them while it builds the model: those of TensorRT-LLM stop without a place."""
    from vllm.config.lora import LoRAConfig

    from services.thinker.plugin.recording import experts_without_adapters

    for targets, kept in ((ATTENTION, False), ([*ATTENTION, *EXPERTS], True), (None, True)):
        config: Any = SimpleNamespace(lora_config=LoRAConfig(target_modules=targets))
        before = config.lora_config
        with experts_without_adapters(config):
            assert (config.lora_config is before) == kept
        assert config.lora_config is before


def test_an_adapter_of_experts_without_a_place_is_refused_by_the_setting(tiny_checkpoint: Path) -> None:
    from services.thinker.lora_files import adapter_digest

    experts = adapter(tiny_checkpoint, 1, targets=("mlp.experts.0.up_proj",))
    with pytest.raises(ValueError, match="is loaded at run time only with --lora-experts"):
        adapter_digest(experts, tiny_checkpoint, LINEAR)
    assert adapter_digest(experts, tiny_checkpoint, [*LINEAR, *EXPERTS])
    assert adapter_digest(adapter(tiny_checkpoint, 1), tiny_checkpoint, ATTENTION)


@pytest.mark.parametrize(("gpus", "experts"), [(1, 2048 + 768 + 1536 + 2048), (4, 2048 + 192 + 384 + 2048)])
def test_experts_take_memory_for_all_of_them(gpus: int, experts: int) -> None:
    """As vLLM's stacked matrices: A of gate and up, A of down, B of gate and up, B of down. Those that tensor
    parallelism does not split are whole on each GPU."""
    assert adapter_bytes(PUBLISHED["30B"], ["experts"], 4, 16, gpus) == 4 * 16 * experts * 2 * 128 * 48
    assert adapter_bytes(PUBLISHED["30B"], ["gate"], 4, 16, gpus) == 4 * 16 * (2048 + 128) * 2 * 48


def test_both_spellings_of_a_config_are_known() -> None:
    config = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
    config |= {"moe_intermediate_size": 4}
    old, new = (adapted_bytes(config | {name: 3}, 2) for name in ("num_experts", "num_local_experts"))
    assert old == new
    assert old["experts"] == (3 * 2 * 8 * 2, 3 * 3 * 4 * 2)


def test_attention_and_dense_layers_take_their_inputs_and_outputs() -> None:
    attention = 3 * 2048 + (32 + 4 + 4) * 128 + 32 * 128 + 2048
    assert adapter_bytes(PUBLISHED["30B"], LINEAR, 4, 16) == 4 * 16 * attention * 2 * 48
    attention = 3 * 3584 + (28 + 4 + 4) * 128 + 28 * 128 + 3584
    dense = 2 * 3584 + 2 * 18_944 + 18_944 + 3584
    assert adapter_bytes(PUBLISHED["7B"], LINEAR, 2, 64) == 2 * 64 * (attention + dense) * 2 * 28
    assert adapter_bytes(PUBLISHED["7B"], [*LINEAR, *EXPERTS], 1, 1) == adapter_bytes(PUBLISHED["7B"], LINEAR, 1, 1)
    split = 3 * 3584 + (attention - 4 * 3584) // 2 + 3584 + 2 * 3584 + 3 * 18_944 // 2 + 3584
    assert adapter_bytes(PUBLISHED["7B"], LINEAR, 1, 1, gpus=2) == split * 2 * 28
