"""A hostile client: what it knows of the system, and its manners."""

import contextlib
import itertools
import json
import random
import struct
import time
from dataclasses import dataclass, field
from socket import SO_LINGER, SOL_SOCKET, create_connection
from typing import Any
from urllib.parse import urlsplit

from websockets.sync.client import ClientConnection, connect

from tests.hostile.wire import Answer, Wire, head

JSON_TYPE = "application/json"
ANSWER_WITHIN_S = 30.0  # then it leaves
_ABORT = struct.pack("ii", 1, 0)  # closes by a reset


@dataclass
class Target:
    """The system.

    Attributes:
        url: of the gateway.
        stages: gRPC addresses.
        model: that writes and speaks.
        operations: of the OpenAPI document, by "METHOD path".
        end_s: monotonic time at which all is over.
    """

    url: str
    stages: list[str]
    model: str
    operations: dict[str, Any]
    end_s: float = 0.0


@dataclass
class Attacker:
    """One client, with an address of its own on loopback.

    Attributes:
        key: an API key; "" is none.
        draw: all that it does by chance.
        made: ids of responses and conversations that it has made, with a few of those before.
    """

    target: Target
    key: str
    address: str
    draw: random.Random
    made: list[str] = field(default_factory=list)
    numbers: Any = field(default_factory=itertools.count)

    def headers(self, kind: str = JSON_TYPE) -> dict[str, str]:
        """Seldom without a key, or with a wrong one."""
        key = self.draw.choices([self.key, "", "sk-quartet-wrong"], [0.94, 0.03, 0.03])[0]
        return {"host": "localhost", "content-type": kind} | ({"authorization": f"Bearer {key}"} if key else {})

    def post(self, line: str, body: Any, **more: Any) -> str:
        """Sends JSON, and remembers the id of what came."""
        if isinstance(body, dict):
            body = {"model": self.target.model, **body}
        return self.send(line, json.dumps(body).encode(), **more)

    def send(self, line: str, body: bytes = b"", kind: str = JSON_TYPE, whole: bool = False) -> str:
        """What came of a request. Unless it has to be `whole`, it may be sent in part, or left before its answer."""
        manner = (
            "whole" if whole else self.draw.choices(["whole", "part", "leaves", "slow"], [0.7, 0.08, 0.15, 0.07])[0]
        )
        wire = Wire(self.target.url, 4096 if manner == "slow" else None, self.address)
        wire.socket.settimeout(ANSWER_WITHIN_S)
        headers = self.headers(kind) | {"connection": "close", "content-length": str(len(body))}
        try:
            if manner == "part":
                wire.send(head(line, headers) + body[: self.draw.randrange(len(body) + 1)])
                self.pause(2)
                return self._leave(wire, "sent in part")
            wire.send(head(line, headers))
            wire.send(body)
            if manner != "whole":
                self.pause(5)
                return self._leave(wire, "left")
            return self._outcome(wire.read())
        except TimeoutError:
            return self._leave(wire, f"left after {ANSWER_WITHIN_S:g} s")
        finally:
            wire.close()

    def _leave(self, wire: Wire, outcome: str) -> str:
        if self.draw.random() < 0.5:
            wire.socket.setsockopt(SOL_SOCKET, SO_LINGER, _ABORT)
        return outcome

    def _outcome(self, answer: Answer) -> str:
        if answer.status == 200:
            with contextlib.suppress(ValueError, KeyError, TypeError):
                self.made = [*self.made[-50:], json.loads(answer.body)["id"]]
        if answer.status == 500:
            return f"500 {answer.body[:300]!r}"
        code = answer.error.get("code") or answer.error.get("type") or ""
        return f"{answer.status} {code}".strip()

    def socket(self, path: str) -> ClientConnection:
        """A WebSocket. Raises InvalidStatus, OSError."""
        parts = urlsplit(self.target.url)
        assert parts.hostname
        raw = create_connection((parts.hostname, parts.port), ANSWER_WITHIN_S, (self.address, 0))
        headers = self.headers()
        given = {"authorization": headers["authorization"]} if "authorization" in headers else {}
        url = f"ws{self.target.url.removeprefix('http')}{path}"
        options: Any = {"max_size": None, "compression": None, "close_timeout": 1}
        return connect(url, sock=raw, additional_headers=given, ping_interval=None, **options)  # it may read no pong

    def pause(self, most_s: float) -> None:
        """Waits, but not beyond the end."""
        time.sleep(max(0.0, min(self.draw.uniform(0, most_s), self.target.end_s - time.monotonic())))

    def id(self) -> str:
        """Of something that it made."""
        return self.draw.choice(self.made) if self.made else "x"
