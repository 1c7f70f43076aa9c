"""Fetches files from the model hub, without its client's half minute of retries."""

from functools import cache
from pathlib import Path
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
def is_reached() -> bool:
    """Whether the hub takes connections; assumed behind a proxy."""
    from huggingface_hub import constants

    parts = urlsplit(constants.ENDPOINT)
    if parts.scheme in getproxies():
        return True
    return listens(parts.hostname or "", parts.port or (80 if parts.scheme == "http" else 443), CONNECT_S)
