"""A small random checkpoint of the toy."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from tests.support.toy_family.talker import LETTERS

CONFIG: dict[str, Any] = {
    "model_type": "toy_speaker",
    "width": 64,
    "depth": 3,
    "heads": 4,
    "sounds": 96,
    "signs": 8,
    "ends": [96, 97],
    "begin": 98,
    "heard": [3, 5, 98],
    "voices": {"low": 99, "high": 100},
    "shortest": 4,
    "frame_rate": 25,
}


def write(folder: Path) -> Path:
    """Writes the checkpoint."""
    generator = torch.Generator().manual_seed(11)

    def random(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return torch.randn(shape, generator=generator) * scale

    width, codes, kv_width = 64, 104, 32
    tensors = {
        "letters.weight": random(LETTERS + 2, width),
        "sounds.weight": random(codes, width),
        "to_sound.weight": random(codes, width, scale=0.2),
        "waves": random(CONFIG["sounds"], 24_000 // CONFIG["frame_rate"], scale=0.1),
        "last_norm.weight": 1 + random(width, scale=0.1),
    }
    for i in range(3):
        for name, rows in (("q", width), ("k", kv_width), ("v", kv_width)):
            tensors[f"blocks.{i}.self_attn.{name}_proj.weight"] = random(rows, width, scale=0.15)
            tensors[f"blocks.{i}.self_attn.{name}_proj.bias"] = random(rows, scale=0.3)
        tensors[f"blocks.{i}.self_attn.o_proj.weight"] = random(width, width, scale=0.15)
        tensors[f"blocks.{i}.mlp.gate_proj.weight"] = random(2 * width, width, scale=0.15)
        tensors[f"blocks.{i}.mlp.up_proj.weight"] = random(2 * width, width, scale=0.15)
        tensors[f"blocks.{i}.mlp.down_proj.weight"] = random(width, 2 * width, scale=0.1)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"blocks.{i}.{norm}.weight"] = 1 + random(width, scale=0.1)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    save_file(tensors, folder / "model.safetensors")
    return folder


def _write_checkpoint(out: Path, size: str) -> None:
    write(out)


ARCHS = {"toy": _write_checkpoint}
