"""Fetches files from the model hub, without its client's half minute of retries."""

import os
from functools import cache
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import getproxies

from services.common.rpc.probe import listens

CONNECT_S = 5.0


def is_allowed() -> bool:
    """Returns whether the environment allows requests to the hub."""
    return os.environ.get("HF_HUB_OFFLINE", "0").lower() in ("", "0", "false", "no", "off")


def fetched(model: str, file: str) -> Path:
    """Returns the path of `file` of `model`, fetched once a process if needed.

    Raises:
        Exception: whatever the hub's client raises.
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
    """Returns whether the hub takes connections; assumes so behind a proxy."""
    from huggingface_hub import constants

    parts = urlsplit(constants.ENDPOINT)
    if parts.scheme in getproxies():
        return True
    return listens(parts.hostname or "", parts.port or (80 if parts.scheme == "http" else 443), CONNECT_S)
