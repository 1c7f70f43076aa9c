"""Reads a checkpoint's memory needs from its config and the headers of its weights."""

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cli.terminal import CommandError
from services.demo_models import resolve
from services.registry import families, family_of, read_config
from services.sizes import Sizes

_STORED = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}


class BudgetError(CommandError):
    """The model's sizes cannot be read, or a request is impossible."""


class TooLittleMemory(BudgetError):
    """The model does not fit: `lack` names what is short, `short_bytes` how much."""

    def __init__(self, lack: str, remedy: str, short_bytes: int) -> None:
        super().__init__(f"{lack}; {remedy}")
        self.lack, self.short_bytes = lack, short_bytes


def published_sizes() -> Sizes:
    """Sizes of the first family's published model."""
    return next(family.part("budget").PUBLISHED for family in families() if family.has("budget"))


def read_sizes(model: str) -> Sizes:
    """Sizes of a checkpoint directory or hub id. Raises BudgetError."""
    folder = Path(resolve(model))
    try:
        config, tensors = (read_config(folder), tensor_bytes(folder)) if folder.is_dir() else _hub(model)
        family = family_of(config)
        if not family.has("budget"):
            raise ValueError(
                f"{family.name} models have no thinker, whose memory a budget shares out; their sizes: docs/gpus.md. "
                f"What starts here says: quartet doctor --model {model} --stage talker --stage code2wav"
            )
        sizes: Sizes = family.part("budget").sizes(config, tensors)
    except KeyError as error:
        raise BudgetError(f"{model}: config.json has no {error}") from None
    except (OSError, ValueError) as error:
        raise BudgetError(f"--model {model}: {error}") from None
    if missing := [stage for stage, size in sizes.weights.items() if not size]:
        raise BudgetError(f"{model}: has no weights of {', '.join(missing)}")
    return sizes


def tensor_bytes(folder: Path) -> Iterator[tuple[str, int]]:
    """Yields (name, bytes) of every safetensors tensor in `folder`. Raises ValueError: there is none."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ValueError("there are no safetensors files in it")
    for path in files:
        for name, entry in _header(path).items():
            begin, end = entry["data_offsets"]
            yield name, end - begin


def stored_dtype(folder: Path) -> str:
    """Dtype of the first weight in `folder`, e.g. "bfloat16"; "float32" where there is none."""
    for path in sorted(folder.glob("*.safetensors")):
        for entry in _header(path).values():
            stored: str = entry["dtype"]
            return _STORED.get(stored, stored)
    return "float32"


def _header(path: Path) -> dict[str, Any]:
    """Reads a safetensors header: entries by tensor name."""
    with path.open("rb") as file:
        try:
            (length,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(length))
        except (struct.error, ValueError):
            raise ValueError(f"{path} is no safetensors file, or not all of one") from None
    header.pop("__metadata__", None)
    return header


def _hub(model: str) -> tuple[dict[str, Any], Iterator[tuple[str, int]]]:
    from huggingface_hub import get_safetensors_metadata, hf_hub_download

    config = read_config(Path(hf_hub_download(model, "config.json")).parent)
    files = get_safetensors_metadata(model).files_metadata.values()
    tensors = (
        (name, tensor.data_offsets[1] - tensor.data_offsets[0])
        for file in files
        for name, tensor in file.tensors.items()
    )
    return config, tensors
