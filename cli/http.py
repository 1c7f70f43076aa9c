"""HTTP for the commands: errors, streams, forms."""

import base64
import contextlib
import json
import mimetypes
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import httpx

from cli.terminal import CommandError

TIMEOUT = httpx.Timeout(600, connect=10)
_BLOCK_BYTES = 64 * 1024

File = tuple[str, tuple[str, bytes]]  # (field, (name, content))


class ServerError(CommandError):
    """The server is not reached, refused, or broke off."""


@contextlib.contextmanager
def connect(url: str, api_key: str | None = None) -> Iterator[httpx.Client]:
    """Raises ServerError, also in the block."""
    headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
    with reaching(url), httpx.Client(base_url=url, timeout=TIMEOUT, headers=headers) as client:
        yield client


def address(client: httpx.Client | httpx.AsyncClient, path: str = "") -> str:
    return f"{str(client.base_url).rstrip('/')}{path}"


def socket_of(client: httpx.Client | httpx.AsyncClient, path: str) -> tuple[str, dict[str, str]]:
    """Returns URL and headers of a WebSocket."""
    key = client.headers.get("authorization")
    return f"ws{address(client, path).removeprefix('http')}", {"authorization": key} if key else {}


@contextlib.contextmanager
def reaching(url: str) -> Iterator[None]:
    """Turns a failed request to `url` into a ServerError."""
    try:
        yield
    except httpx.HTTPError as error:
        raise ServerError(f"{url}: {error or type(error).__name__}") from None


def message(body: Mapping[str, Any]) -> str:
    """Returns the text of an error body, with its parameter."""
    error = body["error"]
    param = error.get("param")
    return error["message"] if not param or error["message"].startswith(f"{param}:") else f"{param}: {error['message']}"


def check(response: httpx.Response) -> httpx.Response:
    """Returns a successful response. Raises ServerError otherwise."""
    if response.is_success:
        return response
    try:
        text = message(json.loads(response.read()))
    except (ValueError, KeyError, TypeError):  # not this server's: a proxy's, or another program's
        text = f"{response.request.url}: status {response.status_code}"
    raise ServerError(text)


def model_that(client: httpx.Client, does: str, fits: Callable[[dict[str, Any]], object]) -> str:
    """Returns the first model whose facts fit. Raises ServerError: none `does` it."""
    for model in check(client.get("/v1/models")).json()["data"]:
        if fits(model["quartet"]):
            return model["id"]
    raise ServerError(f"{address(client)} has no model that {does}")


def events(response: httpx.Response) -> Iterator[dict[str, Any]]:
    """Yields the server-sent events of a response. Raises ServerError."""
    for line in check(response).iter_lines():
        if line.startswith("data: {"):
            event = json.loads(line.removeprefix("data: "))
            if "error" in event:
                raise ServerError(message(event))
            yield event


@contextlib.contextmanager
def written(out: Path | None) -> Iterator[BinaryIO]:
    """Opens `out`, or stdout. A block that fails leaves no file."""
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
    """Writes a response's body as it comes. Raises ServerError, OSError."""
    with client.stream(method, path, **request) as response, written(out) as file:
        for block in check(response).iter_bytes(_BLOCK_BYTES):
            file.write(block)
            file.flush()


def files(field: str, paths: Sequence[Path]) -> list[File]:
    """Raises OSError."""
    return [(field, (path.name, path.read_bytes())) for path in paths]


def data_url(file: Path, kind: str) -> str:
    """The file itself; `kind` is "image", "audio" or "video". Raises OSError."""
    media_type = mimetypes.guess_type(file.name)[0] or f"{kind}/*"
    return f"data:{media_type};base64,{base64.b64encode(file.read_bytes()).decode()}"


def given(**members: Any) -> dict[str, Any]:
    """Returns the members that have a value."""
    return {name: value for name, value in members.items() if value is not None}


def payload(body: Mapping[str, Any], uploads: Sequence[File]) -> dict[str, Any]:
    """Returns httpx's arguments: JSON, or with files a form."""
    if not uploads:
        return {"json": body}
    fields = {name: value if isinstance(value, str) else json.dumps(value) for name, value in body.items()}
    return {"data": fields, "files": uploads}
