"""`quartet image`: one streamed request; the pictures go to files as they are finished."""

import base64
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from cli.http import ApiError, connect, events, files, form, unreachable
from cli.progress import Report

FORMATS = {".png": "png", ".jpg": "jpeg", ".jpeg": "jpeg", ".webp": "webp"}
_CHANGED_S = 0.02  # a bar need not follow faster


@dataclass(frozen=True)
class Picture:
    """A finished picture: `content` is its file, `size` is "WIDTHxHEIGHT", `output` counts from 0."""

    output: int
    content: bytes
    size: str
    seed: int


@dataclass
class Made:
    """How a request's pictures were made. `timings` are the dit's, in milliseconds; so is `total_ms`, the client's."""

    pictures: int
    num_inference_steps: int
    timings: dict[str, float]
    total_ms: float


def make_pictures(
    url: str,
    body: dict[str, Any],
    images: Sequence[Path],
    mask: Path | None,
    on_picture: Callable[[Picture], None],
    report: Report,
    api_key: str | None = None,
) -> Made:
    """Has the server at `url` make pictures, and calls `on_picture` with each as soon as it is finished.

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
    try:
        with (
            connect(url, api_key) as client,
            client.stream("POST", path, **request) as response,
        ):
            for event in events(response):
                if event["type"] == "quartet.progress":
                    steps.done(event)
                elif event["type"].endswith(".completed"):
                    count, last = count + 1, event
                    on_picture(_picture(event))
    except httpx.HTTPError as error:
        raise unreachable(url, error) from None
    if count != wanted:
        raise ApiError(f"{url}: the answer ended after {count} of {wanted} pictures")
    how = last["quartet"]
    total_ms = (time.perf_counter() - sent_s) * 1000
    return Made(count, how["num_inference_steps"], how["timings"]["dit"], total_ms)


def numbered(file: Path, output: int, count: int) -> Path:
    """The file of one of `count` outputs: a.png, or a-1.png, a-2.png and so on."""
    return file if count == 1 else file.with_name(f"{file.stem}-{output + 1}{file.suffix}")


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


def _picture(event: dict[str, Any]) -> Picture:
    how = event["quartet"]
    return Picture(how["output"], base64.b64decode(event["b64_json"]), event["size"], how["seed"])
