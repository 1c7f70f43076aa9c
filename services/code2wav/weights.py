"""Finds a checkpoint and reads from it only what code2wav needs, by the published tensor names."""

import json
from pathlib import Path

import torch
from huggingface_hub import hf_hub_download
from safetensors import safe_open

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
PREFIX = "code2wav."


class Checkpoint:
    """A checkpoint's config and the safetensors files that hold `code2wav.*`.

    Args:
        model: a directory, or the id of a repository on the hub, of which only the files needed are fetched.

    Raises:
        ValueError: there is no such checkpoint, or no code2wav in it.
    """

    def __init__(self, model: str) -> None:
        local = Path(model)
        self._repository = None if local.is_dir() else model
        self.folder = local if local.is_dir() else self._file("config.json").parent
        self._files = self._locate()
        if not self._files:
            raise ValueError(f"{model} has no tensors named {PREFIX}*")

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Name without its prefix -> tensor, on the CPU, in the stored dtype."""
        tensors = {}
        for path in sorted(set(self._files.values())):
            with safe_open(path, framework="pt") as file:
                for name, holder in self._files.items():
                    if holder == path:
                        tensors[name.removeprefix(PREFIX)] = file.get_tensor(name)
        return tensors

    def _file(self, name: str) -> Path:
        """Path of the checkpoint's file `name`, fetched if need be."""
        if self._repository is None:
            path = self.folder / name
            if not path.is_file():
                raise ValueError(f"{path} does not exist")
            return path
        try:
            return Path(hf_hub_download(self._repository, name))
        except (OSError, ValueError) as error:
            raise ValueError(f"{self._repository}: not a directory, and {name} not on the hub: {error}") from None

    def _locate(self) -> dict[str, Path]:
        """Name of each code2wav tensor -> the file it is in."""
        try:
            index = self._file(INDEX_FILE)
        except ValueError:  # a checkpoint of one file has no index
            path = self._file(SINGLE_FILE)
            with safe_open(path, framework="pt") as file:
                return {name: path for name in file.keys() if name.startswith(PREFIX)}  # noqa: SIM118, not a dict
        shards = json.loads(index.read_text())["weight_map"]
        return {name: self._file(shard) for name, shard in shards.items() if name.startswith(PREFIX)}
