"""Requests of `quartet image`, `quartet video` and `quartet sound`."""

import base64
import contextlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from cli.http import File, ServerError, address, check, connect, download, events, payload, reaching
from cli.terminal import CommandError, Report, bar

IMAGE_FORMATS = {".png": "png", ".jpg": "jpeg", ".jpeg": "jpeg", ".webp": "webp"}
VIDEO_FORMATS = {".mp4": "mp4"}
AUDIO_FORMATS = {".wav": "wav", ".flac": "flac", ".mp3": "mp3", ".ogg": "opus", ".opus": "opus", ".aac": "aac"}
POLL_S = 0.5
PATIENCE_S = 60.0  # a job outlives its gateway: that may be back in this time
DELETE_S = 10.0


@dataclass(frozen=True)
class Image:
    """`content` is a file, `size` is "WIDTHxHEIGHT", `output` counts from 0. Only the last image has a number of steps
    and the dit's `timings` in milliseconds.
    """

    output: int
    content: bytes
    size: str
    seed: int
    total_ms: float
    num_inference_steps: int
    timings: dict[str, float]


@contextlib.contextmanager
def client_with_bar(what: str, url: str, api_key: str | None) -> Iterator[tuple[httpx.Client, Report]]:
    """Shows a progress bar, which says `what` at first. Raises CommandError."""
    try:
        with bar(what) as report, connect(url, api_key) as client:
            yield client, report
    except OSError as error:
        raise CommandError(str(error)) from None


def make_images(client: httpx.Client, body: dict[str, Any], uploads: Sequence[File], report: Report) -> Iterator[Image]:
    """Yields each image as soon as it is finished. Raises ServerError.

    Args:
        body: members of POST /v1/images/generations.
        uploads: images to start from, a mask of the first, and control images beside these.
        report: gets the steps of all images together.
    """
    wanted = body.get("n", 1)
    body = body | {"stream": True, "quartet": {**body.get("quartet", {}), "progress": True}}
    path = "/v1/images/edits" if uploads else "/v1/images/generations"
    steps: dict[int, int] = {}  # done, by output
    count = 0
    sent_s = time.perf_counter()
    with client.stream("POST", path, **payload(body, uploads)) as response:
        for event in events(response):
            if event["type"] == "quartet.progress":
                steps[event["output"]] = event["step"]
                done, total = sum(steps.values()), wanted * event["num_inference_steps"]
                report(f"step {done} of {total}" if done < total else "decoding", done / total)
            elif event["type"].endswith(".completed"):
                count, how, content = count + 1, event["quartet"], base64.b64decode(event["b64_json"])
                total_ms = (time.perf_counter() - sent_s) * 1000
                steps_made, timings = how.get("num_inference_steps", 0), how.get("timings", {}).get("dit", {})
                yield Image(how["output"], content, event["size"], how["seed"], total_ms, steps_made, timings)
    if count != wanted:
        raise ServerError(f"{address(client)}: the answer ended after {count} of {wanted} images")


def make_video(
    client: httpx.Client, body: dict[str, Any], uploads: Sequence[File], report: Report, out: Path
) -> dict[str, Any]:
    """Writes a video to `out`; ctrl-C deletes the job. Returns the video's object. Raises ServerError, OSError.

    Args:
        body: members of POST /v1/videos.
        uploads: files that it is made of.
    """
    video = check(client.post("/v1/videos", **payload(body, uploads))).json()
    path = f"/v1/videos/{video['id']}"
    try:
        with reaching(address(client, path)):
            video = _until_ended(client, video, report)
            if video["status"] != "completed":
                raise ServerError(video["error"]["message"])
            download(client, "GET", f"{path}/content", out)
    except KeyboardInterrupt:
        with contextlib.suppress(httpx.HTTPError):
            client.delete(path, timeout=DELETE_S)
        raise
    return video


def _until_ended(client: httpx.Client, video: dict[str, Any], report: Report) -> dict[str, Any]:
    answered_s = time.monotonic()
    while video["status"] in ("queued", "in_progress"):
        if video["status"] == "queued":
            report("waiting", None)
        else:
            report("making the video", video["progress"] / 100)
        time.sleep(POLL_S)
        try:
            response = client.get(f"/v1/videos/{video['id']}")
        except httpx.HTTPError:
            if time.monotonic() - answered_s > PATIENCE_S:
                raise
            report(f"no answer from {address(client)}", None)
            continue
        video, answered_s = check(response).json(), time.monotonic()
    return video
