"""Asks the model hub for a file, at once or not at all: its client tries for half a minute to reach one."""

import os
from functools import cache
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import getproxies

from services.common.rpc.probe import listens

CONNECT_S = 5.0


def may_be_asked() -> bool:
    """Whether the environment lets it be asked."""
    return os.environ.get("HF_HUB_OFFLINE", "0").lower() in ("", "0", "false", "no", "off")


def fetched(model: str, file: str) -> Path:
    """Where `file` of `model` is, which is fetched if it is not here yet. Asks once a process.

    Raises:
        Exception: what the hub's client raises: it is not given, or not reached and not here.
        ImportError: the client is not installed.
    """
    found = _fetch(model, file)
    if isinstance(found, Exception):
        raise found
    return found


@cache
def _fetch(model: str, file: str) -> Path | Exception:
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(model, file, local_files_only=not is_reached()))
    except Exception as error:  # the client's and its HTTP library's have no other class in common
        return error


@cache
def is_reached() -> bool:
    """Whether the hub takes connections; one behind a proxy is taken to."""
    from huggingface_hub import constants

    parts = urlsplit(constants.ENDPOINT)
    if parts.scheme in getproxies():
        return True
    return listens(parts.hostname or "", parts.port or (80 if parts.scheme == "http" else 443), CONNECT_S)
