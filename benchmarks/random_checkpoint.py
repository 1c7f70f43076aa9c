"""A checkpoint of a published model's sizes with random weights, where the model itself is not at hand.

What a step costs depends on sizes, not on values, so speed can be measured with it: give it to `quartet up --model` and
to benchmarks. It has the tokenizer of `quartet tiny`. It answers with random words, greedily with no end: each answer
has as many tokens and codec frames as a request allows.
"""

import argparse
import json
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from benchmarks.stages.real_sizes import BLOCK, repeat
from services.common.engine.weights import SINGLE_FILE
from tests.rehearsal.support.published_folders import write
from tests.support.weights.checkpoints import omni_checkpoint

_ARCHS = {"qwen3-omni-30b": "qwen3-omni"}  # whose tokenizer it has
_STD = 0.02
_SHIFT = 7919  # each tensor begins elsewhere in the numbers that are repeated, so that no two tensors are alike
_TEXT_HEAD, _CODE_HEAD = "thinker.lm_head.weight", "talker.codec_head.weight"


def make(name: str, folder: Path) -> Path:
    """Writes the checkpoint `name` into the new directory `folder`, and returns it.

    Raises:
        KeyError: none of `_ARCHS`.
    """
    tiny = json.loads((omni_checkpoint(arch=_ARCHS[name]) / "config.json").read_text())
    write(name, folder)
    file = folder / "config.json"
    config = _with_ids_of(json.loads(file.read_text()), tiny)
    file.write_text(json.dumps(config))
    _fill(folder / SINGLE_FILE, _plain_words(folder), [config["talker_config"]["codec_eos_token_id"]])
    return folder


def _with_ids_of(config: dict[str, Any], tiny: Mapping[str, Any]) -> dict[str, Any]:
    """The ids of special tokens are those of the tokenizer that is written."""
    of_text = {key for key in tiny if key.endswith("_token_id") and "codec" not in key}
    merged = {key: tiny[key] if key in of_text else value for key, value in config.items()}
    for key, value in config.items():
        if isinstance(value, dict) and isinstance(tiny.get(key), dict):
            merged[key] = _with_ids_of(value, tiny[key])
    return merged | {key: tiny[key] for key in of_text}


def _plain_words(folder: Path) -> int:
    """How many ids of the tokenizer come before its first special one."""
    return min(each["id"] for each in json.loads((folder / "tokenizer.json").read_text())["added_tokens"])


def _fill(file: Path, words: int, ends: list[int]) -> None:
    """Gives the tensors of a file of holes values. Special tokens and the ends of speech are never the likeliest."""
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        tensors = json.loads(opened.read(length))
    data = torch.from_file(str(file), shared=True, size=file.stat().st_size, dtype=torch.uint8)[8 + length :]
    block = (torch.randn(BLOCK, generator=torch.Generator().manual_seed(0)) * _STD).bfloat16()

    def fill(number: int, name: str) -> None:
        begin, end = tensors[name]["data_offsets"]
        tensor = data[begin:end].view(torch.bfloat16).view(tensors[name]["shape"])
        if "norm" in name and tensor.dim() == 1 and name.endswith("weight"):
            tensor.fill_(1)
            return
        repeat(block.roll(number * _SHIFT), tensor)
        if name == _TEXT_HEAD:
            tensor[words:] = 0
        elif name == _CODE_HEAD:
            tensor[ends] = 0

    with ThreadPoolExecutor() as threads:
        list(threads.map(fill, range(len(tensors)), tensors))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=list(_ARCHS))
    parser.add_argument("folder", type=Path, help="a new directory, on a disk or in memory (/dev/shm)")
    options = parser.parse_args()
    print(make(options.name, options.folder))


if __name__ == "__main__":
    main()
