"""`quartet say`: has a running server speak a text, whole or as it is typed."""

import codecs
import contextlib
import json
import os
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import httpx
from websockets.exceptions import ConnectionClosed, WebSocketException
from websockets.sync.client import ClientConnection, connect

from cli.http import ServerError, address, download, message, model_that, socket_of, written
from cli.terminal import Report

_BLOCK_BYTES = 64 * 1024
_OPEN_TIMEOUT_S = 10.0


def model_that_speaks(client: httpx.Client) -> str:
    return model_that(client, "speaks a text", lambda facts: facts.get("max_speech_characters"))


def say(client: httpx.Client, body: dict[str, Any], report: Report, out: Path | None) -> None:
    """`body` is that of POST /v1/audio/speech, less the model. Raises ServerError."""
    body = {"model": model_that_speaks(client), **body}
    report("speaking", None)
    download(client, "POST", "/v1/audio/speech", out, json=body)


def typed(descriptor: int) -> Iterator[str]:
    """Decodes UTF-8 text of an open file as it comes."""
    blocks = iter(lambda: os.read(descriptor, _BLOCK_BYTES), b"")
    return codecs.iterdecode(blocks, "utf-8", errors="replace")


def say_typed(client: httpx.Client, settings: dict[str, Any], texts: Iterable[str], out: Path | None) -> None:
    """Has `texts` spoken while they come, as one utterance. Raises ServerError.

    Args:
        settings: as of the message session.config, less the model.
        texts: read in a thread of its own.
        out: the file; None: stdout.
    """
    config = {"type": "session.config", "model": model_that_speaks(client), **settings}
    url, headers = socket_of(client, "/v1/audio/speech/stream")
    try:
        with connect(url, open_timeout=_OPEN_TIMEOUT_S, additional_headers=headers) as socket, written(out) as file:
            socket.send(json.dumps(config))
            threading.Thread(target=_type, args=(socket, texts), daemon=True).start()
            for block in _audio(socket):
                file.write(block)
                file.flush()
    except (OSError, WebSocketException) as error:
        raise ServerError(f"{address(client)}: {error or type(error).__name__}") from None


def _type(socket: ClientConnection, texts: Iterable[str]) -> None:
    with contextlib.suppress(ConnectionClosed):
        for text in texts:
            socket.send(json.dumps({"type": "input.text", "text": text}))
        socket.send(json.dumps({"type": "input.done"}))


def _audio(socket: ClientConnection) -> Iterator[bytes]:
    for received in socket:
        if isinstance(received, bytes):
            yield received
            continue
        event = json.loads(received)
        if event["type"] == "error":
            raise ServerError(message(event))
        if event["type"] == "session.done":
            return
    raise ServerError("the server broke off")
