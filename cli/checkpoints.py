"""Checks that a checkpoint is available and whole, before anything starts. Imports no torch."""

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from cli import hub
from cli.budget import GIB
from cli.plan import LaunchError, UsageError
from services.common.engine.hub_faults import hub_fault

_LFS_POINTER = b"version "
_HEADER_BYTES = 8  # of a safetensors file: the length of the header, which is JSON, little endian


def check_files(flag: str, model: str, folder: Path) -> None:
    """Compares the length of each safetensors file in `folder` with its header. Raises UsageError."""
    for file in sorted(folder.rglob("*.safetensors")):
        try:
            fault = _fault_of(file)
        except OSError as error:
            raise UsageError(f"{flag} {model}: {no_permission(file, error)}") from None
        if fault:
            raise UsageError(f"{flag} {model}: {file.name} is {fault}")


def no_permission(file: Path, error: OSError) -> str:
    """Describes a file that cannot be read, and the remedy."""
    whose = f"; user {os.getuid()} must be able to read it (chmod, chown)" if isinstance(error, PermissionError) else ""
    return f"{error.filename or file}: {error.strerror}{whose}"


def _fault_of(file: Path) -> str | None:
    size = file.stat().st_size
    with file.open("rb") as opened:
        begin = opened.read(_HEADER_BYTES)
        if begin == _LFS_POINTER:
            return "a pointer of Git LFS instead of the file: git lfs pull"
        length = int.from_bytes(begin, "little")
        if _HEADER_BYTES + length > size:
            return f"cut off, or no safetensors file ({size} bytes): fetch it again"
        try:
            header = json.loads(opened.read(length))
            ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
        except (ValueError, KeyError, TypeError, AttributeError):
            return "no safetensors file: fetch it again"
    whole = _HEADER_BYTES + length + max(ends, default=0)
    return f"cut off: {size} of {whole} bytes are there: fetch it again" if size < whole else None


def check_hub(flag: str, model: str, config_file: str) -> None:
    """Fetches `config_file` from the hub and checks the disk's room for the rest; HF_HUB_OFFLINE skips it.

    Raises:
        UsageError: the hub does not give it.
        LaunchError: there is no room.
    """
    if not hub.is_allowed():
        return
    try:
        hub.fetched(model, config_file)
    except ImportError:  # where only a gateway is installed, no stage starts anyway
        return
    except Exception as error:
        if isinstance(error, OSError) and error.errno is not None and error.filename:
            raise UsageError(f"{flag} {model}: {no_permission(Path(error.filename), error)}") from None
        raise UsageError(f"{flag} {model}: {hub_fault(error)}") from None
    from huggingface_hub import constants

    cache = Path(constants.HF_HUB_CACHE)
    missing = sum(_missing_bytes(model, cache))
    free = shutil.disk_usage(cache).free
    if missing > free:
        raise LaunchError(
            f"{flag} {model}: the disk is full: {missing / GIB:.3g} GiB are to be fetched, {free / GIB:.3g} are free "
            f"in {cache}: make room there, or name another place by HF_HOME"
        )


def _missing_bytes(model: str, cache: Path) -> Iterator[int]:
    """Sizes of weights that are not in the cache, as far as the hub gives them."""
    from huggingface_hub import HfApi, try_to_load_from_cache

    if not hub.is_reached():
        return
    try:
        siblings = HfApi().model_info(model, files_metadata=True, timeout=10).siblings or []
    except Exception:  # not reached; what is here may be all that is needed
        return
    for file in siblings:
        here = isinstance(try_to_load_from_cache(model, file.rfilename, cache_dir=cache), str)
        if file.rfilename.endswith(".safetensors") and not here:
            yield file.size or 0
