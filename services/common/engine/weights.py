"""Finds a checkpoint and reads from it only the files and tensors that a stage needs."""

import io
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import structlog
import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HFValidationError
from safetensors import safe_open
from tqdm.auto import tqdm

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
CONFIG_FILE = "config.json"
CONFIG_FILES = (CONFIG_FILE, "generation_config.json")
PROGRESS_S = 10.0

log = structlog.get_logger()


def local_folder(model: str, wanted: Callable[[str], bool], files: Sequence[str] = CONFIG_FILES) -> Path:
    """The directory of a checkpoint. Of one on the hub it has what a stage needs, all of one commit.

    The hub is asked once which commit that is; each file that is not here yet is fetched once. A hub that cannot be
    reached is no error as long as everything is here.

    Args:
        model: a directory, which is returned, or the id of a repository on the hub.
        wanted: says of a tensor's name whether the stage needs the file that has it.
        files: glob patterns of the other files it needs; those without a match are left out.

    Raises:
        ValueError: there is no such checkpoint, or what is missing of it cannot be fetched.
    """
    return _with_weights(model, _with_files(model, files), wanted)


def _with_files(model: str, files: Sequence[str]) -> Path:
    """The directory of a checkpoint, with `files` and the index of its weights in it."""
    if Path(model).is_dir():
        return Path(model)
    with _hub_errors(model):
        return Path(snapshot_download(model, allow_patterns=[*files, INDEX_FILE], tqdm_class=_progress()))


def _with_weights(model: str, folder: Path, wanted: Callable[[str], bool]) -> Path:
    """`folder` of `_with_files`, with the files that hold wanted tensors in it."""
    if Path(model).is_dir():
        return folder
    missing = [name for name in _weight_files(folder, wanted) if not (folder / name).is_file()]
    if missing:
        log.info("fetching weights", model=model, files=missing)
        with _hub_errors(model):
            snapshot_download(model, revision=folder.name, allow_patterns=missing, tqdm_class=_progress())
    return folder


@contextmanager
def _hub_errors(model: str) -> Iterator[None]:
    try:
        yield
    except (OSError, httpx.HTTPError, HFValidationError) as error:
        raise ValueError(f"{model} is neither a directory nor a model that the hub has: {error}") from None


class _LoggedProgress(tqdm):
    """How much of a download is here, as lines of the log."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **{**options, "mininterval": PROGRESS_S, "file": io.StringIO()})

    def display(self, msg: str | None = None, pos: int | None = None) -> None:
        """Called every `PROGRESS_S` at most, and at the end."""
        if self.unit == "B" and self.n:
            log.info("fetching", fetched_bytes=int(self.n), all_bytes=int(self.total or 0))


def _progress() -> type[tqdm] | None:
    """What shows the progress of a download: bars on a terminal, else lines of the log."""
    return None if sys.stderr.isatty() else _LoggedProgress


def _weight_files(folder: Path, wanted: Callable[[str], bool]) -> list[str]:
    """Names of the files with wanted tensors. A checkpoint of one file has no index."""
    index = folder / INDEX_FILE
    if not index.is_file():
        return [SINGLE_FILE]
    return sorted({file for name, file in json.loads(index.read_text())["weight_map"].items() if wanted(name)})


class Checkpoint:
    """A checkpoint's config files and, once `select` has said which, those of its safetensors files that a stage needs.

    Args:
        model: a directory, or the id of a repository on the hub, of which only the files needed are fetched.

    Raises:
        ValueError: there is no such checkpoint.
    """

    def __init__(self, model: str) -> None:
        self.model = model
        self.folder = _with_files(model, CONFIG_FILES)
        if not (self.folder / CONFIG_FILE).is_file():
            raise ValueError(f"{self.folder / CONFIG_FILE} does not exist")
        self._files: dict[str, Path] = {}
        """Wanted tensor name -> file."""

    def select(self, wanted: Callable[[str], bool]) -> None:
        """Fetches the files that hold wanted tensors. `wanted` says of a tensor's name whether it is read.

        Raises:
            ValueError: a file is missing, or there is no wanted tensor.
        """
        _with_weights(self.model, self.folder, wanted)
        for path in (self.folder / name for name in _weight_files(self.folder, wanted)):
            if not path.is_file():
                raise ValueError(f"{path} does not exist")
            with safe_open(path, framework="pt") as file:
                self._files |= {name: path for name in file.keys() if wanted(name)}  # noqa: SIM118, not a dict
        if not self._files:
            raise ValueError(f"{self.model} has none of the tensors this stage needs")

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
