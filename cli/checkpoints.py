"""Checks that the hub gives a checkpoint, before anything starts. Imports no torch."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from cli import hub
from cli.budget import GIB
from cli.plan import LaunchError
from services.common.engine.hub_faults import hub_fault
from services.common.revisions import parted


def no_permission(file: Path, error: OSError) -> str:
    whose = f"; user {os.getuid()} must be able to read it (chmod, chown)" if isinstance(error, PermissionError) else ""
    return f"{error.filename or file}: {error.strerror}{whose}"


def check_hub(flag: str, model: str, config_file: str) -> Path | None:
    """Fetches `config_file` from the hub and checks the disk's room for the rest. None: the hub is not asked.

    Raises ValueError: the hub does not give it; OSError: the cache is at fault; LaunchError: there is no room.
    """
    try:
        from huggingface_hub import constants
    except ImportError:  # where only a gateway is installed, no stage starts anyway
        return None
    if constants.HF_HUB_OFFLINE:
        return None
    try:
        config = hub.fetched(model, config_file)
    except Exception as error:
        if isinstance(error, OSError) and error.errno is not None and error.filename:
            raise
        raise ValueError(hub_fault(error)) from None
    cache = Path(constants.HF_HUB_CACHE)
    missing = sum(_missing_bytes(model, cache))
    free = shutil.disk_usage(cache).free
    if missing > free:
        raise LaunchError(
            f"{flag} {model}: the disk is full: {missing / GIB:.3g} GiB are to be fetched, {free / GIB:.3g} are free "
            f"in {cache}: make room there, or name another place by HF_HOME"
        )
    return config


def _missing_bytes(model: str, cache: Path) -> Iterator[int]:
    """Sizes of weights that are not in the cache."""
    from huggingface_hub import try_to_load_from_cache

    if not hub.is_reached():
        return
    try:
        sizes = hub.file_sizes(model)
    except Exception:  # not reached; what is here may be all that is needed
        return
    name, revision = parted(model)
    for file, size in sizes.items():
        here = isinstance(try_to_load_from_cache(name, file, cache_dir=cache, revision=revision), str)
        if file.endswith(".safetensors") and not here:
            yield size
