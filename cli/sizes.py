"""Reads a checkpoint's memory needs from its config and the headers of its weights."""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from cli import hub
from cli.terminal import CommandError
from services.common.engine.hub_faults import hub_fault
from services.demo_models import resolve
from services.registry import ConfigSection, families, family_of, read_config
from services.sizes import Sizes

_STORED = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
_LENGTH_BYTES = 8  # of a safetensors file's header, which is JSON: little endian, at the file's start
_LFS_POINTER = b"version "


class BudgetError(CommandError):
    """The model's sizes cannot be read, or a request is impossible."""


class TooLittleMemory(BudgetError):
    """The model does not fit; `lack` says what is short."""

    def __init__(self, lack: str, remedy: str, short_bytes: int) -> None:
        super().__init__(f"{lack}; {remedy}")
        self.lack, self.short_bytes = lack, short_bytes


def published_sizes() -> Sizes:
    return next(family.part("budget").PUBLISHED for family in families() if family.has("budget"))


def read_sizes(model: str) -> Sizes:
    """Raises BudgetError."""
    folder = Path(resolve(model))
    try:
        config, tensors = (read_config(folder), tensor_bytes(folder)) if folder.is_dir() else _hub(model)
        family = family_of(config)
        if not family.has("budget"):
            raise ValueError(f"{family.name} models do not say what they need of a GPU")
        sizes: Sizes = family.part("budget").sizes(config, tensors)
    except (OSError, ValueError, KeyError) as error:
        raise BudgetError(f"--model {model}: {error}") from None
    if missing := [stage for stage, size in sizes.weights.items() if not size]:
        raise BudgetError(f"{model}: has no weights of {', '.join(missing)}")
    return sizes


def tensor_bytes(folder: Path) -> Iterator[tuple[str, int]]:
    """Yields (name, bytes) of every tensor; names of those in an inner folder begin with its.

    Raises:
        ValueError: there are no safetensors files, or a broken one.
    """
    files = sorted(folder.rglob("*.safetensors"))
    if not files:
        raise ValueError("there are no safetensors files in it")
    for path in files:
        inner = path.relative_to(folder).parent
        for name, entry in read_header(path).items():
            begin, end = entry["data_offsets"]
            yield str(inner / name), end - begin


def stored_dtype(folder: Path) -> str:
    """Dtype of the first weight of the largest file, e.g. "bfloat16"; "float32" without one."""
    for path in sorted(folder.glob("*.safetensors"), key=lambda path: (-path.stat().st_size, path)):
        for entry in read_header(path).values():
            stored: str = entry["dtype"]
            return _STORED.get(stored, stored)
    return "float32"


def read_header(path: Path) -> dict[str, Any]:
    """Reads a safetensors file's entries by tensor name. Raises OSError; ValueError: the file is broken."""
    size = path.stat().st_size
    with path.open("rb") as file:
        begin = file.read(_LENGTH_BYTES)
        if begin == _LFS_POINTER:
            raise ValueError(f"{path.name} is a pointer of Git LFS instead of the file: git lfs pull")
        length = int.from_bytes(begin, "little")
        if _LENGTH_BYTES + length > size:
            raise ValueError(f"{path.name} is cut off, or no safetensors file ({size} bytes): fetch it again")
        try:
            header = json.loads(file.read(length))
            header.pop("__metadata__", None)
            ends = [entry["data_offsets"][1] for entry in header.values()]
        except (ValueError, KeyError, TypeError, AttributeError):
            raise ValueError(f"{path.name} is no safetensors file: fetch it again") from None
    whole = _LENGTH_BYTES + length + max(ends, default=0)
    if size < whole:
        raise ValueError(f"{path.name} is cut off: {size} of {whole} bytes are there: fetch it again")
    return header


def _hub(model: str) -> tuple[ConfigSection, Iterable[tuple[str, int]]]:
    """Of a checkpoint on the hub; of what has been fetched, if that is whole or the hub is out of reach.

    Raises:
        ValueError: the hub does not say.
    """
    from huggingface_hub import constants

    try:
        folder = hub.fetched(model, "config.json").parent
        config = read_config(folder)
        if constants.HF_HUB_OFFLINE or _is_whole(folder) or not hub.is_reached():
            return config, tensor_bytes(folder)
        files = hub.tensor_files(model)
    except Exception as error:  # the hub's client and its HTTP library have no other class in common
        raise ValueError(hub_fault(error)) from None
    stored = (tensor for file in files for tensor in file.tensors.items())
    return config, [(name, tensor.data_offsets[1] - tensor.data_offsets[0]) for name, tensor in stored]


def _is_whole(folder: Path) -> bool:
    """Whether all files of weights have been fetched into a snapshot: then a start asks the hub for no headers."""
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return (folder / "model.safetensors").is_file()
    return all((folder / file).is_file() for file in set(json.loads(index.read_text())["weight_map"].values()))
