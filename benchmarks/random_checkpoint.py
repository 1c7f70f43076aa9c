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

from services.common.engine.weights import SINGLE_FILE
from tests.rehearsal.published import NAMES
from tests.rehearsal.support.published_folders import write
from tests.support.weights.checkpoints import omni_checkpoint

# Random numbers are made once and repeated. The length shares no factor with any layer's, so that no two rows agree;
# and each tensor begins elsewhere, so that no two tensors do.
_BLOCK, _SHIFT = 1_000_003, 7919
_STD = 0.02
_ARCHS = {"qwen3-omni-30b": "qwen3-omni"}
_TEXT_HEAD, _CODE_HEADS = "thinker.lm_head.weight", ("talker.codec_head.weight",)
_ONES = (".cluster_usage",)  # counts, by which a codebook's sums are divided


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
    words = _plain_words(folder)
    ends = _ends_of_speech(config["talker_config"])
    _fill(folder / SINGLE_FILE, words, ends)
    return folder


def _with_ids_of(config: dict[str, Any], tiny: Mapping[str, Any]) -> dict[str, Any]:
    """The ids of special tokens are those of the tokenizer that is written."""
    of_text = {key for key in tiny if key.endswith(("_token_id", "_token_index")) and "codec" not in key}
    merged = {key: tiny[key] if key in of_text else value for key, value in config.items()}
    for key, value in config.items():
        if isinstance(value, dict) and isinstance(tiny.get(key), dict):
            merged[key] = _with_ids_of(value, tiny[key])
    return merged | {key: tiny[key] for key in of_text}


def _plain_words(folder: Path) -> int:
    """How many ids of the tokenizer come before its first special one."""
    return min(each["id"] for each in json.loads((folder / "tokenizer.json").read_text())["added_tokens"])


def _ends_of_speech(talker: Mapping[str, Any]) -> list[int]:
    return [talker[key] for key in ("codec_eos_token_id", "tts_codec_end_token_id") if key in talker]


def _fill(file: Path, words: int, ends: list[int]) -> None:
    """Gives the tensors of a file of holes values. Special tokens and the ends of speech are never the likeliest."""
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        tensors = json.loads(opened.read(length))
    data = torch.from_file(str(file), shared=True, size=file.stat().st_size, dtype=torch.uint8)[8 + length :]
    block = (torch.randn(_BLOCK, generator=torch.Generator().manual_seed(0)) * _STD).bfloat16()

    def fill(number: int, name: str) -> None:
        begin, end = tensors[name]["data_offsets"]
        tensor = data[begin:end].view(torch.bfloat16)
        if name.endswith(_ONES) or ("norm" in name and len(tensors[name]["shape"]) == 1 and name.endswith("weight")):
            tensor.fill_(1)
            return
        shifted = block.roll(number * _SHIFT)
        whole = len(tensor) // _BLOCK * _BLOCK
        tensor[:whole].view(-1, _BLOCK).copy_(shifted)
        tensor[whole:].copy_(shifted[: len(tensor) - whole])
        rows = tensor.view(tensors[name]["shape"])
        if name == _TEXT_HEAD:
            rows[words:] = 0
        elif name in _CODE_HEADS:
            rows[ends] = 0

    with ThreadPoolExecutor() as threads:
        list(threads.map(fill, range(len(tensors)), tensors))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=[name for name in NAMES if name in _ARCHS])
    parser.add_argument("folder", type=Path, help="a new directory, on a disk or in memory (/dev/shm)")
    options = parser.parse_args()
    print(make(options.name, options.folder))


if __name__ == "__main__":
    main()
