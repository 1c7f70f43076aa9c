"""`benchmarks/random_checkpoint.py`: which values a checkpoint of published sizes gets."""

import json
from pathlib import Path

import pytest
from safetensors import safe_open
from transformers import AutoTokenizer

from benchmarks import random_checkpoint
from tests.rehearsal.support import published_folders

WORDS = 40
SHAPES = {
    "thinker.lm_head.weight": (100, 30_011),  # longer than the numbers that are repeated
    "thinker.model.embed_tokens.weight": (100, 64),
    "talker.codec_head.weight": (50, 64),
    "talker.model.norm.weight": (64,),
    "talker.model.layers.0.mlp.gate.weight": (64, 64),
}


def test_no_end_is_the_likeliest_and_no_two_tensors_are_alike(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    published_folders._write_holes(file, {name: published_folders.Header("BF16", s) for name, s in SHAPES.items()})
    random_checkpoint._fill(file, WORDS, [7])
    with safe_open(file, "pt") as opened:
        found = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    assert {name: tuple(tensor.shape) for name, tensor in found.items()} == SHAPES
    head, codes = found["thinker.lm_head.weight"], found["talker.codec_head.weight"]
    assert not head[WORDS:].any()
    assert head[:WORDS].any(dim=1).all()
    assert codes.any(dim=1).tolist() == [row != 7 for row in range(50)]
    assert (found["talker.model.norm.weight"] == 1).all()
    starts = {tuple(tensor.flatten()[:8].tolist()) for tensor in found.values()}
    assert len(starts) == len(SHAPES)
    assert found["talker.model.layers.0.mlp.gate.weight"].float().std().item() == pytest.approx(0.02, rel=0.1)


def test_its_ids_are_its_tokenizers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(random_checkpoint, "_fill", lambda *_: None)  # 70 GB; the file is of holes
    folder = random_checkpoint.make("qwen3-omni-30b", tmp_path / "made")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    ids = {
        "<|im_start|>": config["im_start_token_id"],
        "<tts_pad>": config["tts_pad_token_id"],
        "<|audio_pad|>": config["thinker_config"]["audio_token_id"],
        "<|image_pad|>": config["talker_config"]["image_token_id"],
    }
    assert {token: tokenizer.convert_tokens_to_ids(token) for token in ids} == ids
    assert config["thinker_config"]["text_config"]["num_hidden_layers"] == 48
    assert config["talker_config"]["codec_eos_token_id"] == 2150
