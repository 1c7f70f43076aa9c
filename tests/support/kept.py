"""What tests make once on a machine and find again in their next run: small checkpoints, and references' answers.

It lies in $QUARTET_KEPT_DIR, by default ~/.cache/quartet-tests, by a hash of all that it depends on: what is asked
for, the source that makes it, and the versions of the libraries that do the work. The directory may always be deleted.
"""

import functools
import hashlib
import os
import pickle
import shutil
import tempfile
from collections.abc import Callable, Iterable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from PIL import Image

T = TypeVar("T")

LIBRARIES = ("torch", "transformers", "diffusers", "tokenizers", "safetensors", "numpy", "pillow")
ROOT = Path(os.environ.get("QUARTET_KEPT_DIR") or Path.home() / ".cache" / "quartet-tests")


def kept_folder(make: Callable[[Path], object], *asked: Any) -> Path:
    """The folder that `make` fills, made if it is not kept. Nobody may write into it.

    Args:
        make: is given an empty folder.
        asked: what the content depends on, the files or folders of the source that makes it among them; see `digest`.
    """
    return _kept(make, digest(*asked, _versions()))


def kept_value(make: Callable[[], T], *asked: Any) -> T:
    """What `make` returns, called if that is not kept. `asked` as for `kept_folder`."""

    def write(folder: Path) -> None:
        (folder / "value.pickle").write_bytes(pickle.dumps(make()))

    found = _kept(write, digest(*asked, _versions()))
    return pickle.loads((found / "value.pickle").read_bytes())


def digest(*parts: Any) -> str:
    """A hash of values: numbers, text, bytes, None, arrays, pictures, paths (what the files hold that are there), and
    lists, tuples and mappings of them."""
    state = hashlib.sha256()
    for part in _flat(parts):
        state.update(part)
    return state.hexdigest()[:32]


def _flat(value: Any) -> Iterable[bytes]:
    yield type(value).__name__.encode() + b":"
    if isinstance(value, np.ndarray | Image.Image):
        array = np.asarray(value)
        yield f"{array.dtype}{array.shape}".encode() + array.tobytes()
    elif isinstance(value, Mapping):
        yield from _flat(list(value.items()))
    elif isinstance(value, list | tuple):
        yield str(len(value)).encode()
        for each in value:
            yield from _flat(each)
    elif isinstance(value, Path):
        yield _content(value)
    elif value is None or isinstance(value, str | int | float | bytes):
        yield repr(value).encode()
    else:
        raise TypeError(f"{type(value).__name__}: nothing is kept by such a value")
    yield b";"


@functools.cache
def _content(path: Path) -> bytes:
    """A hash of a file, or of a folder's files and their names."""
    state = hashlib.sha256()
    files = [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.is_file())
    for file in files:
        if file.suffix != ".pyc":
            state.update(str(file.relative_to(path)).encode() + file.read_bytes())
    return state.digest()


@functools.cache
def _versions() -> tuple[str, ...]:
    return tuple(version(library) for library in LIBRARIES)


def _kept(make: Callable[[Path], object], name: str) -> Path:
    """Another process may make the same at the same time: who is first wins, and both are the same."""
    found = ROOT / name
    if not found.exists():
        ROOT.mkdir(parents=True, exist_ok=True)
        making = Path(tempfile.mkdtemp(prefix="making-", dir=ROOT))
        try:
            make(making)
            making.rename(found)
        except OSError:
            if not found.exists():
                raise
        finally:
            shutil.rmtree(making, ignore_errors=True)
    return found
