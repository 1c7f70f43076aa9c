"""`quartet sound`: one request, one file."""

from pathlib import Path
from typing import Any

import httpx

from cli.http import check, connect, unreachable

FORMATS = {".wav": "wav", ".flac": "flac", ".mp3": "mp3", ".ogg": "opus", ".opus": "opus", ".aac": "aac"}


def make_sound(url: str, body: dict[str, Any], out: Path, api_key: str | None = None) -> int:
    """Has the server at `url` make a sound, writes it to `out`, and returns its seed.

    Args:
        body: members of the request, as of POST /v1/audio/generations.

    Raises:
        ApiError: the server cannot be reached, refused, or broke off.
        OSError: the file cannot be written.
    """
    try:
        with connect(url, api_key) as client:
            response = check(client.post("/v1/audio/generations", json=body))
    except httpx.HTTPError as error:
        raise unreachable(url, error) from None
    out.write_bytes(response.content)
    return int(response.headers["x-quartet-seed"])
