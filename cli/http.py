"""What the commands that talk to a running server share: its errors, its streams, its forms."""

import contextlib
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import httpx

from cli.terminal import CommandError

TIMEOUT = httpx.Timeout(600, connect=10)
_BLOCK_BYTES = 64 * 1024

File = tuple[str, tuple[str, bytes]]  # (field, (name, content))


class ServerError(CommandError):
    """The server cannot be reached, refused, or broke off; the message is the server's where it sent one."""


@contextlib.contextmanager
def connect(url: str, api_key: str | None = None) -> Iterator[httpx.Client]:
    """A client of the server at `url`, which may ask for a key. Raises ServerError: a request failed on its way."""
    headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
    with reaching(url), httpx.Client(base_url=url, timeout=TIMEOUT, headers=headers) as client:
        yield client


def address(client: httpx.Client, path: str = "") -> str:
    """The URL of the server of `client`, or of `path` there."""
    return f"{str(client.base_url).rstrip('/')}{path}"


def socket_of(client: httpx.Client, path: str) -> tuple[str, dict[str, str]]:
    """URL and headers of a WebSocket to `path` of the server of `client`."""
    key = client.headers.get("authorization")
    return f"ws{address(client, path).removeprefix('http')}", {"authorization": key} if key else {}


@contextlib.contextmanager
def reaching(url: str) -> Iterator[None]:
    """Names `url` where a request fails on its way. Raises ServerError then."""
    try:
        yield
    except httpx.HTTPError as error:
        raise ServerError(f"{url}: {error or type(error).__name__}") from None


def message(body: Mapping[str, Any]) -> str:
    """The text of an error body, with the parameter at fault."""
    error = body["error"]
    param = error.get("param")
    return error["message"] if not param or error["message"].startswith(f"{param}:") else f"{param}: {error['message']}"


def check(response: httpx.Response) -> httpx.Response:
    """The response, if it is a success. Raises ServerError otherwise, with what the server says."""
    if response.is_success:
        return response
    try:
        text = message(json.loads(response.read()))
    except (ValueError, KeyError, TypeError):  # not this server's: a proxy's, or another program's
        text = f"{response.request.url}: status {response.status_code}"
    raise ServerError(text)


def events(response: httpx.Response) -> Iterator[dict[str, Any]]:
    """The server-sent events of a streamed response. Raises ServerError: refused, or ended by an error."""
    for line in check(response).iter_lines():
        if line.startswith("data: {"):
            event = json.loads(line.removeprefix("data: "))
            if "error" in event:
                raise ServerError(message(event))
            yield event


@contextlib.contextmanager
def written(out: Path | None) -> Iterator[BinaryIO]:
    """The file to write, under another name first: speech that breaks off leaves none. None: stdout."""
    if out is None:
        yield sys.stdout.buffer
        return
    part = out.with_name(f".{out.name}.part")
    try:
        with part.open("wb") as file:
            yield file
        part.replace(out)
    finally:
        part.unlink(missing_ok=True)


def download(client: httpx.Client, method: str, path: str, out: Path | None, **request: Any) -> None:
    """Writes a response's body to `out` as it comes; None: stdout. Raises ServerError, OSError."""
    with client.stream(method, path, **request) as response, written(out) as file:
        for block in check(response).iter_bytes(_BLOCK_BYTES):
            file.write(block)
            file.flush()


def files(field: str, paths: Sequence[Path]) -> list[File]:
    """Files of a form; httpx tells their media types from their names. Raises OSError: one cannot be read."""
    return [(field, (path.name, path.read_bytes())) for path in paths]


def payload(body: Mapping[str, Any], uploads: Sequence[File]) -> dict[str, Any]:
    """What httpx sends: JSON, or with files a form, whose fields are texts as they are and the rest as JSON."""
    if not uploads:
        return {"json": body}
    fields = {name: value if isinstance(value, str) else json.dumps(value) for name, value in body.items()}
    return {"data": fields, "files": uploads}
