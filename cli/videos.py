"""`quartet video`: makes a job, follows it, fetches its file."""

import contextlib
import time
from pathlib import Path
from typing import Any

import httpx

from cli.http import ApiError, check, connect, files, form, unreachable
from cli.progress import Report

POLL_S = 0.5
PATIENCE_S = 60.0  # a job outlives its gateway: that may be back in this time
DELETE_S = 10.0
_BLOCK_BYTES = 1024 * 1024


def make_video(
    url: str, body: dict[str, Any], image: Path | None, out: Path, report: Report, api_key: str | None = None
) -> dict[str, Any]:
    """Has the server at `url` make a video, and writes it to `out`. Ctrl-C deletes the job.

    Args:
        body: members of the request, as of POST /v1/videos.
        image: the first frame.
        report: is told of the progress.

    Returns:
        The finished video's object.

    Raises:
        ApiError: the server cannot be reached, refused, or could not make it.
        OSError: a file cannot be read or written.
    """
    uploads = files("input_reference", [image] if image else [])
    with connect(url, api_key) as client:
        try:
            request: dict[str, Any] = {"data": form(body), "files": uploads} if uploads else {"json": body}
            video = check(client.post("/v1/videos", **request)).json()
        except httpx.HTTPError as error:
            raise unreachable(url, error) from None
        path = f"/v1/videos/{video['id']}"
        try:
            video = _until_ended(client, url, video, report)
            if video["status"] != "completed":
                raise ApiError(video["error"]["message"])
            _fetch(client, f"{path}/content", out)
        except httpx.HTTPError as error:
            raise unreachable(f"{url}{path}", error) from None
        except KeyboardInterrupt:
            with contextlib.suppress(httpx.HTTPError):
                client.delete(path, timeout=DELETE_S)
            raise
    return video


def _until_ended(client: httpx.Client, url: str, video: dict[str, Any], report: Report) -> dict[str, Any]:
    """The video once it is completed or failed."""
    heard_s = time.monotonic()
    while video["status"] in ("queued", "in_progress"):
        if video["status"] == "queued":
            report("waiting", None)
        else:
            report("making the video", video["progress"] / 100)
        time.sleep(POLL_S)
        try:
            response = client.get(f"/v1/videos/{video['id']}")
        except httpx.HTTPError:
            if time.monotonic() - heard_s > PATIENCE_S:
                raise
            report(f"no answer from {url}", None)
            continue
        video, heard_s = check(response).json(), time.monotonic()
    return video


def _fetch(client: httpx.Client, path: str, out: Path) -> None:
    """Writes the file under another name first: a broken download leaves none."""
    part = out.with_name(f".{out.name}.part")
    try:
        with client.stream("GET", path) as response, part.open("wb") as file:
            for block in check(response).iter_bytes(_BLOCK_BYTES):
                file.write(block)
        part.replace(out)
    finally:
        part.unlink(missing_ok=True)
