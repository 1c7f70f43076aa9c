"""Finds a checkpoint and reads only the files and tensors that a stage needs."""

import io
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import structlog
import torch
from huggingface_hub import constants, snapshot_download
from huggingface_hub.errors import HFValidationError
from safetensors import SafetensorError, safe_open
from tqdm.auto import tqdm

from services.common.engine.hub_faults import hub_fault
from services.common.revisions import parted

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
CONFIG_FILE = "config.json"
CONFIG_FILES = (CONFIG_FILE, "generation_config.json", f"speech_tokenizer/{CONFIG_FILE}", "spk_dict.pt")  # last: voices
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "vocab.json", "merges.txt")
PROGRESS_S = 10.0

log = structlog.get_logger()


def compute_dtype(config: Mapping[str, Any], stored: torch.dtype) -> torch.dtype:
    """The dtype for `--dtype auto`, as transformers': what config.json says, else the `stored` one.

    Raises:
        ValueError: the field `dtype` of `config` names none of torch's.
    """
    said = config.get("dtype", config.get("torch_dtype"))
    if said is None:
        return stored
    found = getattr(torch, str(said), None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"dtype of config.json is {said!r}, which is none of torch's: bfloat16, say, or float32")
    return found


class Stored(NamedTuple):
    """A tensor in a safetensors file; `dtype` is spelled as there ("I8")."""

    name: str
    dtype: str
    shape: tuple[int, ...]


def stored_tensors(folder: Path) -> Iterator[Stored]:
    """The checkpoint's tensors, none of which is read."""
    for name in _weight_files(folder, lambda tensor: True):
        yield from tensors_in(folder / name)


def _weight_files(folder: Path, wanted: Callable[[str], bool]) -> list[str]:
    """Names of the files of wanted tensors; a checkpoint of one file has no index."""
    index = folder / INDEX_FILE
    if not index.is_file():
        return [SINGLE_FILE]
    file_of = json.loads(index.read_text())["weight_map"]
    return sorted({file for name, file in file_of.items() if wanted(name)})


def tensors_in(path: Path) -> Iterator[Stored]:
    """One safetensors file's tensors. Raises SafetensorError: it is none, or not whole."""
    with safe_open(path, framework="pt") as file:
        for name in file.keys():  # noqa: SIM118, not a dict
            part = file.get_slice(name)
            yield Stored(name, part.get_dtype(), tuple(part.get_shape()))


class _LoggedProgress(tqdm):
    """Progress of a download, as lines of the log."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **{**options, "mininterval": PROGRESS_S, "file": io.StringIO()})

    def display(self, msg: str | None = None, pos: int | None = None) -> None:
        if self.unit == "B" and self.n:
            log.info("fetching", fetched_bytes=int(self.n), all_bytes=int(self.total or 0))


def _repository_of(folder: Path) -> str | None:
    """The repository of a folder in the hub's cache, models--OWNER--NAME/snapshots/COMMIT; None for others."""
    if folder.parent.name != "snapshots":
        return None
    kind, _, repository = folder.parents[1].name.partition("--")
    return repository.replace("--", "/") if kind == "models" else None


class Checkpoint:
    """A checkpoint's config files and the safetensors files that `select` wants.

    From the hub, all files are of one commit, which is looked up once, and each missing file is fetched once.
    If all are here, the hub need not be reached. A directory of the hub's cache stands for its commit.

    Args:
        model: a directory, or the id of a repository on the hub, which may have a revision (services.common.revisions).
        files: glob patterns of files needed beside weights; those without a match are left out.

    Attributes:
        folder: the directory.

    Raises:
        ValueError: there is no such checkpoint.
    """

    def __init__(self, model: str, files: Sequence[str] = CONFIG_FILES) -> None:
        self.model = model
        is_local = Path(model).is_dir()
        self._repository, revision = (_repository_of(Path(model)), None) if is_local else parted(model)
        wanted = [*files, INDEX_FILE, f"*/{INDEX_FILE}"]
        self.folder = Path(model) if is_local else self._download(wanted, revision, constants.HF_HUB_OFFLINE)
        if not (self.folder / CONFIG_FILE).is_file():
            raise ValueError(f"{self.folder / CONFIG_FILE} does not exist")
        self._files: dict[str, Path] = {}  # by name of a wanted tensor

    def fetch(self, wanted: Callable[[str], bool], subfolder: str = "") -> list[Path]:
        """The files of wanted tensors in `subfolder`, fetched from the hub.

        Raises:
            ValueError: one cannot be fetched.
        """
        folder = self.folder / subfolder
        names = _weight_files(folder, wanted)
        missing = [str(Path(subfolder, name)) for name in names if not (folder / name).is_file()]
        if missing and self._repository:
            log.info("fetching weights", model=self._repository, files=missing)
            self._download(missing, revision=self.folder.name)
        return [folder / name for name in names]

    def _download(self, patterns: list[str], revision: str | None, takes_part: bool = False) -> Path:
        """`takes_part`: without the hub, what is here of a commit will do."""
        progress = None if sys.stderr.isatty() else _LoggedProgress  # None: bars
        try:
            repository = self._repository or self.model
            options: dict[str, Any] = {"allow_patterns": patterns, "tqdm_class": progress}
            # a commit that is here in part is looked up on the hub otherwise
            options["local_files_only"] = takes_part
            return Path(snapshot_download(repository, revision=revision, **options))
        except (OSError, httpx.HTTPError, HFValidationError) as error:
            reason = f"{self.model} is neither a directory nor a model that the hub has: {hub_fault(error)}"
            raise ValueError(reason) from None

    def select(self, wanted: Callable[[str], bool], subfolder: str = "") -> None:
        """Fetches the files of wanted tensors in `subfolder`, for `tensors`.

        Raises:
            ValueError: a file is missing or at fault, or there is no wanted tensor.
        """
        for path in self.fetch(wanted, subfolder):
            if not path.is_file():
                raise ValueError(f"{path} does not exist")
            try:
                with safe_open(path, framework="pt") as file:
                    self._files |= {name: path for name in file.keys() if wanted(name)}  # noqa: SIM118, not a dict
            except SafetensorError as error:
                raise ValueError(f"{path} is corrupt or not all there, fetch it again: {error}") from None
        if not self._files:
            raise ValueError(f"{self.model} has none of the tensors this stage needs")

    def stored_dtype(self, name: str) -> torch.dtype:
        with safe_open(self._files[name], framework="pt") as file:
            return file.get_slice(name)[:1].dtype

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Each wanted (name, tensor), on the CPU, in the stored dtype, one at a time."""
        with ExitStack() as stack:
            opened = {path: stack.enter_context(safe_open(path, framework="pt")) for path in set(self._files.values())}
            for name, path in self._files.items():
                yield name, opened[path].get_tensor(name)
