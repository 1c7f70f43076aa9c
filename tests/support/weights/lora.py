"""Small adapters in peft's format, and the same model with their change in its weights: what an answer must equal."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from tests.support.kept import kept_folder

ATTENTION = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
_WEIGHTS = "model.safetensors"
_STRENGTH = 0.2  # enough to change most answers


def adapter(
    checkpoint: Path, seed: int, rank: int = 4, prefix: str = "thinker.", targets: Sequence[str] = ATTENTION
) -> Path:
    """An adapter of a Qwen-Omni thinker, of random weights.

    Args:
        checkpoint: a directory with one file of weights.
        seed: of the weights.
        rank: of the change; it is scaled by 2.
        prefix: of the layers' names: "thinker." as peft writes it for the whole model, "" for the thinker alone.
        targets: layers of each block.
    """

    def make(out: Path) -> None:
        weights = load_file(checkpoint / _WEIGHTS)
        generator = torch.Generator().manual_seed(seed)
        tensors = {}
        for name in sorted(weights):
            layer = name.removeprefix("thinker.").removesuffix(".weight")
            if not layer.startswith("model.layers.") or not layer.endswith(tuple(targets)):
                continue
            rows, columns = weights[name].shape
            for half, shape in (("A", (rank, columns)), ("B", (rows, rank))):
                tensors[f"base_model.model.{prefix}{layer}.lora_{half}.weight"] = (
                    torch.randn(shape, generator=generator) * _STRENGTH
                )
        save_file(tensors, out / "adapter_model.safetensors")
        config = {
            "peft_type": "LORA",
            "r": rank,
            "lora_alpha": 2 * rank,
            "target_modules": sorted(target.rpartition(".")[2] for target in targets),
            "bias": "none",
            "task_type": "CAUSAL_LM",
        }
        (out / "adapter_config.json").write_text(json.dumps(config))

    return kept_folder(make, "adapter", checkpoint, seed, rank, prefix, list(targets), Path(__file__))


def merged(checkpoint: Path, adapter: Path) -> Path:
    """The checkpoint with the adapter's change added to its weights."""

    def make(out: Path) -> None:
        shutil.copytree(checkpoint, out, dirs_exist_ok=True)
        weights, change = load_file(checkpoint / _WEIGHTS), load_file(adapter / "adapter_model.safetensors")
        config = json.loads((adapter / "adapter_config.json").read_text())
        for name, b in change.items():
            if name.endswith(".lora_B.weight"):
                a = change[name.replace(".lora_B.", ".lora_A.")]
                layer = name.removeprefix("base_model.model.").removesuffix(".lora_B.weight")
                target = f"thinker.{layer.removeprefix('thinker.')}.weight"
                weights[target] += config["lora_alpha"] / config["r"] * (b.double() @ a.double()).float()
        save_file(weights, out / _WEIGHTS, {"format": "pt"})

    return kept_folder(make, "merged", checkpoint, adapter, Path(__file__))


def adapters_in(folder: Path, checkpoint: Path) -> Path:
    """`folder` with two adapters of the checkpoint, `sea` and `hill`: of two ranks, in both of peft's spellings."""
    shutil.copytree(adapter(checkpoint, 1), folder / "sea")
    shutil.copytree(adapter(checkpoint, 2, rank=8, prefix=""), folder / "hill")
    return folder
