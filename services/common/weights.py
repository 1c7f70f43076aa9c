"""Finds a checkpoint and reads from it only the files and tensors that a stage needs."""

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import torch
from huggingface_hub import hf_hub_download
from safetensors import safe_open

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
CONFIG_FILE = "config.json"
OPTIONAL_FILES = ("generation_config.json",)


class Checkpoint:
    """A checkpoint's config files and those of its safetensors files that hold wanted tensors.

    Args:
        model: a directory, or the id of a repository on the hub, of which only the files needed are fetched.
        wanted: says of a tensor's name whether it is read.

    Raises:
        ValueError: there is no such checkpoint, or no wanted tensor in it.
    """

    def __init__(self, model: str, wanted: Callable[[str], bool]) -> None:
        self._repository = None if Path(model).is_dir() else model
        self._wanted = wanted
        self.folder = Path(model)
        self.folder = self._file(CONFIG_FILE).parent
        for name in OPTIONAL_FILES:
            self._file(name, required=False)
        self._files = self._locate()
        if not self._files:
            raise ValueError(f"{model} has none of the tensors this stage needs")

    def _file(self, name: str, required: bool = True) -> Path:
        """Path of the checkpoint's file `name`; it may not exist if it is not required."""
        try:
            path = self.folder / name if self._repository is None else Path(hf_hub_download(self._repository, name))
        except OSError as error:
            if required:
                raise ValueError(f"{self._repository} is neither a directory nor a model on the hub: {error}") from None
            return self.folder / name
        if required and not path.is_file():
            raise ValueError(f"{path} does not exist")
        return path

    def _locate(self) -> dict[str, Path]:
        """Wanted tensor name -> file."""
        index = self._file(INDEX_FILE, required=False)
        if not index.is_file():  # a checkpoint of one file has no index
            path = self._file(SINGLE_FILE)
            with safe_open(path, framework="pt") as file:
                return {name: path for name in file.keys() if self._wanted(name)}  # noqa: SIM118, not a dict
        shards = json.loads(index.read_text())["weight_map"]
        return {name: self._file(shard) for name, shard in shards.items() if self._wanted(name)}

    def stored_dtype(self, name: str) -> torch.dtype:
        """Dtype that the tensor `name` is stored in."""
        with safe_open(self._files[name], framework="pt") as file:
            return file.get_slice(name)[:1].dtype

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Each wanted (name, tensor), on the CPU, in the stored dtype, one at a time."""
        with ExitStack() as stack:
            opened = {path: stack.enter_context(safe_open(path, framework="pt")) for path in set(self._files.values())}
            for name, path in self._files.items():
                yield name, opened[path].get_tensor(name)
