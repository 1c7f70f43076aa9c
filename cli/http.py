"""What the commands that talk to a running server share: its errors, its streams, its forms."""

import contextlib
import json
import mimetypes
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx

TIMEOUT = httpx.Timeout(600, connect=10)

File = tuple[str, tuple[str, bytes, str]]  # (field, (name, content, media type))


class ApiError(Exception):
    """The server cannot be reached, refused, or broke off; the message is the server's where it sent one."""


@contextlib.contextmanager
def connect(url: str, api_key: str | None) -> Iterator[httpx.Client]:
    """A client of the server at `url`, which may ask for a key. Raises ApiError: a request failed on its way."""
    headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
    with reaching(url), httpx.Client(base_url=url, timeout=TIMEOUT, headers=headers) as client:
        yield client


@contextlib.contextmanager
def reaching(url: str) -> Iterator[None]:
    """Names `url` where a request fails on its way. Raises ApiError then."""
    try:
        yield
    except httpx.HTTPError as error:
        raise ApiError(f"{url}: {error or type(error).__name__}") from None


def message(body: Mapping[str, Any]) -> str:
    """The text of an error body, with the parameter at fault."""
    error = body["error"]
    param = error.get("param")
    return error["message"] if not param or error["message"].startswith(f"{param}:") else f"{param}: {error['message']}"


def check(response: httpx.Response) -> httpx.Response:
    """The response, if it is a success. Raises ApiError otherwise, with what the server says."""
    if response.is_success:
        return response
    try:
        text = message(json.loads(response.read()))
    except (ValueError, KeyError, TypeError):  # not this server's: a proxy's, or another program's
        text = f"{response.request.url}: status {response.status_code}"
    raise ApiError(text)


def events(response: httpx.Response) -> Iterator[dict[str, Any]]:
    """The server-sent events of a streamed response. Raises ApiError: refused, or ended by an error."""
    for line in check(response).iter_lines():
        if line.startswith("data: {"):
            event = json.loads(line.removeprefix("data: "))
            if "error" in event:
                raise ApiError(message(event))
            yield event


def given(values: Mapping[str, Any]) -> dict[str, Any]:
    """The members that have a value: the others are the server's to choose."""
    return {name: value for name, value in values.items() if value is not None}


def form(values: Mapping[str, Any]) -> dict[str, str]:
    """A JSON body as the fields of a form: texts as they are, the rest as JSON."""
    return {name: value if isinstance(value, str) else json.dumps(value) for name, value in values.items()}


def files(field: str, paths: Sequence[Path]) -> list[File]:
    """The files of a form."""
    return [(field, (path.name, path.read_bytes(), _media_type(path))) for path in paths]


def _media_type(path: Path) -> str:
    return mimetypes.guess_type(path.name)[0] or "application/octet-stream"
