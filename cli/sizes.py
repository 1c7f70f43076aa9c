"""What the stages of a Qwen3-Omni checkpoint need of a GPU, from its config and its tensors' own sizes."""

import json
import struct
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

STAGES = ("thinker", "talker", "code2wav")
STATE_LAYERS = 1  # that which the talker reads; --keep-embeddings would be another one
ROPE_BYTES = 3 * 4  # position of a token in time, height and width, int32
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_STORED = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
_AUDIO_TOWER = "thinker.audio_tower."


class BudgetError(Exception):
    """The model's sizes cannot be read, or asked for what cannot be; the message says what to change."""


class TooLittleMemory(BudgetError):
    """The model does not fit.

    Attributes:
        lack: what is too little, and for what.
        short_bytes: how much.
    """

    def __init__(self, lack: str, remedy: str, short_bytes: int) -> None:
        super().__init__(f"{lack}; {remedy}")
        self.lack, self.short_bytes = lack, short_bytes


@dataclass(frozen=True)
class Sizes:
    """What a checkpoint's stages need. Bytes.

    Attributes:
        weights: of each stage.
        unsplit: those of the thinker's weights that tensor parallelism may leave whole on every GPU (the audio tower:
            its 20 heads do not go into 8 parts).
        text_table: the thinker's embeddings of all text tokens as the talker projects them once, when it loads.
        heads, kv_heads: of the thinker's attention.
        kv_per_token: key-value memory of a token of the thinker's context, of all heads.
        states_per_token: what the thinker keeps besides of each token of its key-value cache.
        talker_kv_per_position: key-value memory of a prompt position or frame of the talker.
    """

    weights: Mapping[str, int]
    unsplit: int
    text_table: int
    heads: int
    kv_heads: int
    kv_per_token: int
    states_per_token: int
    talker_kv_per_position: int

    @classmethod
    def of(cls, config: Mapping[str, Any], tensors: Iterable[tuple[str, int]]) -> "Sizes":
        """Those of a checkpoint with `config` and (name, bytes) of its tensors. Raises KeyError: a key is missing."""
        weights: dict[str, int] = dict.fromkeys(STAGES, 0)
        unsplit = 0
        for name, size in tensors:
            stage = name.split(".", 1)[0]
            if stage in weights:
                weights[stage] += size
            unsplit += size if name.startswith(_AUDIO_TOWER) else 0
        thinker, talker = config["thinker_config"]["text_config"], config["talker_config"]["text_config"]
        element = DTYPE_BYTES[config.get("dtype") or config.get("torch_dtype") or "bfloat16"]
        return cls(
            weights=weights,
            unsplit=unsplit,
            text_table=thinker["vocab_size"] * talker["hidden_size"] * element,
            heads=thinker["num_attention_heads"],
            kv_heads=thinker["num_key_value_heads"],
            kv_per_token=_kv_bytes(thinker, element),
            states_per_token=STATE_LAYERS * thinker["hidden_size"] * element + ROPE_BYTES,
            talker_kv_per_position=_kv_bytes(talker, element),
        )


# Qwen3-Omni-30B-A3B-Instruct in bfloat16: sums over its architecture at its config's sizes; 31.7, 3.3 and 0.2 billion
# parameters.
PUBLISHED = Sizes(
    weights={"thinker": 63_438_410_976, "talker": 6_649_192_960, "code2wav": 432_033_154},
    unsplit=1_295_854_336,
    text_table=152_064 * 1024 * 2,
    heads=32,
    kv_heads=4,
    kv_per_token=96 * 1024,
    states_per_token=STATE_LAYERS * 2048 * 2 + ROPE_BYTES,
    talker_kv_per_position=20 * 1024,
)


def read_sizes(model: str) -> Sizes:
    """Sizes of the checkpoint directory or hub id `model`; of one on the hub, only headers are fetched.

    Raises:
        BudgetError: no such checkpoint, or not a Qwen3-Omni one.
    """
    folder = Path(model)
    try:
        if folder.is_dir():
            config = json.loads((folder / "config.json").read_text())
            sizes = Sizes.of(config, tensor_bytes(folder))
        else:
            sizes = Sizes.of(*_hub(model))
    except KeyError as error:
        raise BudgetError(f"{model}: config.json has no {error}; budgets are made for Qwen3-Omni checkpoints") from None
    except (OSError, ValueError) as error:
        raise BudgetError(f"--model {model}: {error}") from None
    if missing := [stage for stage, size in sizes.weights.items() if not size]:
        raise BudgetError(f"{model}: has no weights of {', '.join(missing)}")
    return sizes


def tensor_bytes(folder: Path) -> Iterator[tuple[str, int]]:
    """(name, bytes) of every tensor of the safetensors files in `folder`.

    Raises:
        ValueError: there are none.
    """
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ValueError("there are no safetensors files in it")
    for path in files:
        for name, entry in _header(path).items():
            begin, end = entry["data_offsets"]
            yield name, end - begin


def stored_dtype(folder: Path) -> str:
    """The dtype that weights in `folder` are stored in, e.g. "bfloat16"; "float32" where there are none."""
    for path in sorted(folder.glob("*.safetensors")):
        for entry in _header(path).values():
            stored: str = entry["dtype"]
            return _STORED.get(stored, stored)
    return "float32"


def _header(path: Path) -> dict[str, Any]:
    """What a safetensors file says of its tensors, by name."""
    with path.open("rb") as file:
        try:
            (length,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(length))
        except (struct.error, ValueError):
            raise ValueError(f"{path} is no safetensors file, or not all of one") from None
    header.pop("__metadata__", None)
    return header


def _kv_bytes(config: Mapping[str, Any], element: int) -> int:
    head = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    return 2 * config["num_hidden_layers"] * config["num_key_value_heads"] * head * element


def _hub(model: str) -> tuple[dict[str, Any], Iterator[tuple[str, int]]]:
    from huggingface_hub import get_safetensors_metadata, hf_hub_download

    config = json.loads(Path(hf_hub_download(model, "config.json")).read_text())
    files = get_safetensors_metadata(model).files_metadata.values()
    tensors = (
        (name, tensor.data_offsets[1] - tensor.data_offsets[0])
        for file in files
        for name, tensor in file.tensors.items()
    )
    return config, tensors
