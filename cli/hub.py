"""Fetches files from the model hub, without its client's half minute of retries."""

from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies

from services.common.revisions import parted
from services.common.rpc.probe import listens

CONNECT_S = 5.0


def fetched(model: str, file: str) -> Path:
    """Fetches a file once a process, if needed. Raises whatever the hub's client raises."""
    found = _fetch(model, file)
    if isinstance(found, Exception):
        raise found
    return found


@cache
def _fetch(model: str, file: str) -> Path | Exception:
    from huggingface_hub import hf_hub_download

    try:
        name, revision = parted(model)
        return Path(hf_hub_download(name, file, revision=revision, local_files_only=not is_reached()))
    except Exception as error:  # the client's and its HTTP library's have no other class in common
        return error


@cache
def file_sizes(model: str) -> dict[str, int]:
    """Bytes of each file of a repository, asked for once a process. Raises whatever the hub's client raises."""
    from huggingface_hub import HfApi

    name, revision = parted(model)
    files = HfApi().model_info(name, revision=revision, files_metadata=True, timeout=10).siblings or []
    return {file.rfilename: file.size or 0 for file in files}


@cache
def tensors(model: str, file: str) -> dict[str, tuple[str, tuple[int, ...]]]:
    """(dtype, shape) of each tensor of a safetensors file of a repository, by name; asked for once a process. Raises
    whatever the hub's client raises."""
    from huggingface_hub import parse_safetensors_file_metadata

    name, revision = parted(model)
    stored = parse_safetensors_file_metadata(name, file, revision=revision).tensors
    return {tensor: (entry.dtype, tuple(entry.shape)) for tensor, entry in stored.items()}


def tensor_files(model: str) -> list[Any]:
    """What safetensors files of a repository have in them: those that its index names, or all at its top if it has
    none. Raises whatever the hub's client raises."""
    from huggingface_hub import get_safetensors_metadata, parse_safetensors_file_metadata
    from huggingface_hub.errors import NotASafetensorsRepoError

    name, revision = parted(model)
    try:
        return list(get_safetensors_metadata(name, revision=revision).files_metadata.values())
    except NotASafetensorsRepoError:
        files = [file for file in file_sizes(model) if file.endswith(".safetensors") and "/" not in file]
        if not files:
            raise
        return [parse_safetensors_file_metadata(name, file, revision=revision) for file in files]


@cache
def is_reached() -> bool:
    """Whether the hub takes connections; assumed behind a proxy."""
    from huggingface_hub import constants

    parts = urlsplit(constants.ENDPOINT)
    if parts.scheme in getproxies():
        return True
    return listens(parts.hostname or "", parts.port or (80 if parts.scheme == "http" else 443), CONNECT_S)
