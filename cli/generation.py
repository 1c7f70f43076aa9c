"""`quartet image`, `quartet video`, `quartet sound`: has a running server make something, and writes it to files."""

import base64
import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from cli.http import ApiError, check, connect, events, files, form, reaching
from cli.terminal import Report

IMAGE_FORMATS = {".png": "png", ".jpg": "jpeg", ".jpeg": "jpeg", ".webp": "webp"}
VIDEO_FORMATS = {".mp4": "mp4"}
AUDIO_FORMATS = {".wav": "wav", ".flac": "flac", ".mp3": "mp3", ".ogg": "opus", ".opus": "opus", ".aac": "aac"}
POLL_S = 0.5
PATIENCE_S = 60.0  # a job outlives its gateway: that may be back in this time
DELETE_S = 10.0
_CHANGED_S = 0.02  # a bar need not follow faster
_BLOCK_BYTES = 1024 * 1024


@dataclass(frozen=True)
class Image:
    """A finished image: `content` is its file, `size` is "WIDTHxHEIGHT", `output` counts from 0."""

    output: int
    content: bytes
    size: str
    seed: int


@dataclass
class Made:
    """How a request's images were made. `timings` are the dit's, in milliseconds; so is `total_ms`, the client's."""

    num_inference_steps: int
    timings: dict[str, float]
    total_ms: float


def make_images(
    url: str,
    body: dict[str, Any],
    images: Sequence[Path],
    mask: Path | None,
    on_image: Callable[[Image], None],
    report: Report,
    api_key: str | None = None,
) -> Made:
    """Has the server at `url` make images, and calls `on_image` with each as soon as it is finished.

    Args:
        body: members of the request, as of POST /v1/images/generations.
        images: to start from; none: the prompt alone.
        mask: of the first of them.
        report: is told of the steps.

    Raises:
        ApiError: the server cannot be reached, refused, or broke off.
        OSError: a file cannot be read.
    """
    wanted = body.get("n", 1)
    body = body | {"stream": True, "quartet": {"progress": True}}
    path = "/v1/images/generations"
    request: dict[str, Any] = {"json": body}
    if images:
        uploads = files("image[]", images) + files("mask", [mask] if mask else [])
        path, request = "/v1/images/edits", {"data": form(body), "files": uploads}
    steps, count, last = _Steps(wanted, report), 0, {}
    sent_s = time.perf_counter()
    with connect(url, api_key) as client, client.stream("POST", path, **request) as response:
        for event in events(response):
            if event["type"] == "quartet.progress":
                steps.done(event)
            elif event["type"].endswith(".completed"):
                count, last = count + 1, event
                how = event["quartet"]
                on_image(Image(how["output"], base64.b64decode(event["b64_json"]), event["size"], how["seed"]))
    if count != wanted:
        raise ApiError(f"{url}: the answer ended after {count} of {wanted} pictures")
    total_ms = (time.perf_counter() - sent_s) * 1000
    return Made(last["quartet"]["num_inference_steps"], last["quartet"]["timings"]["dit"], total_ms)


class _Steps:
    """Adds up the steps of all outputs."""

    def __init__(self, count: int, report: Report) -> None:
        self._count, self._report = count, report
        self._done: dict[int, int] = {}
        self._reported_s = 0.0

    def done(self, event: dict[str, Any]) -> None:
        """Takes in a progress event."""
        self._done[event["output"]] = event["step"]
        done, total = sum(self._done.values()), self._count * event["num_inference_steps"]
        now_s = time.monotonic()
        if done == total or now_s - self._reported_s > _CHANGED_S:
            self._reported_s = now_s
            what = f"step {done} of {total}" if done < total else "decoding"
            self._report(what, done / total)


def make_video(
    url: str, body: dict[str, Any], image: Path | None, out: Path, report: Report, api_key: str | None = None
) -> dict[str, Any]:
    """Has the server at `url` make a video by a job, follows it, and writes its file to `out`. Ctrl-C deletes the job.

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
    request: dict[str, Any] = {"data": form(body), "files": uploads} if uploads else {"json": body}
    with connect(url, api_key) as client:
        video = check(client.post("/v1/videos", **request)).json()
        path = f"/v1/videos/{video['id']}"
        try:
            with reaching(f"{url}{path}"):
                video = _until_ended(client, url, video, report)
                if video["status"] != "completed":
                    raise ApiError(video["error"]["message"])
                _fetch(client, f"{path}/content", out)
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


def make_audio(url: str, body: dict[str, Any], out: Path, api_key: str | None = None) -> int:
    """Has the server at `url` make a sound, writes it to `out`, and returns its seed.

    Args:
        body: members of the request, as of POST /v1/audio/generations.

    Raises:
        ApiError: the server cannot be reached, refused, or broke off.
        OSError: the file cannot be written.
    """
    with connect(url, api_key) as client:
        response = check(client.post("/v1/audio/generations", json=body))
    out.write_bytes(response.content)
    return int(response.headers["x-quartet-seed"])
