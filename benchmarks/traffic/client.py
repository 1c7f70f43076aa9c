"""Requests speech from a gateway and notes when each piece came. Pieces are parsed only after the load is over: on a
machine that the servers share, a client that parses JSON meanwhile would be part of what it measures.
"""

import base64
import json
import time
from dataclasses import dataclass, field
from typing import Any, Protocol

import httpx

from benchmarks.traffic.answer import Answer, Prompt
from benchmarks.traffic.sse import events

PCM16_BYTES = 2


@dataclass(frozen=True)
class Wish:
    """Parameters of every request.

    Attributes:
        tokens: most text tokens.
        frames: most codec frames.
        temperature: of text and speech; 0 is greedy.
        seed: for temperatures above 0.
    """

    tokens: int
    frames: int
    temperature: float
    seed: int
    path = "/v1/chat/completions"

    def body(self, model: str, prompt: Prompt) -> dict[str, Any]:
        """Body of the POST."""
        return {
            "model": model,
            "messages": [{"role": "user", "content": prompt}],
            "modalities": ["text", "audio"],
            "audio": {"format": "pcm16"},
            "stream": True,
            "stream_options": {"include_usage": True},
            "temperature": self.temperature,
            "seed": self.seed,
            "max_tokens": self.tokens,
            "quartet": {"talker": {"temperature": self.temperature, "max_frames": self.frames}},
        }


class Request(Protocol):
    """A request: path, and the body of the POST."""

    @property
    def path(self) -> str: ...

    def body(self, model: str, prompt: Prompt) -> dict[str, Any]: ...


@dataclass
class Exchange:
    """A request and the bytes of its answer, each piece with its moment."""

    prompt: Prompt
    sent_s: float
    done_s: float = 0.0
    status: int = 0
    pieces: list[tuple[float, bytes]] = field(default_factory=list)
    error: str | None = None

    def answer(self) -> Answer:
        """Reads the pieces. What a server refused or broke off is an answer with an error."""
        answer = Answer(self.prompt, self.sent_s, self.done_s, error=self.error)
        if self.status not in (0, 200):
            answer.error = f"{self.status}: {b''.join(piece for _, piece in self.pieces).decode(errors='replace')}"
            return answer
        finished = False
        for came_s, chunk in events(self.pieces):
            if chunk is None:
                finished = True
                continue
            if "error" in chunk:
                answer.error = f"{chunk['error']['code']}: {chunk['error']['message']}"
                return answer
            _add(answer, chunk, came_s)
        if not finished:
            answer.error = answer.error or "the stream broke off"
        return answer


class Gateway:
    """A gateway at `url`. For one event loop; to be closed."""

    def __init__(self, url: str, wish: Request) -> None:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        self._client = httpx.AsyncClient(base_url=url, timeout=600, limits=limits)
        self._wish = wish
        self._model = ""

    async def facts(self) -> dict[str, Any]:
        """The `quartet` object of its model: sample rate, samples a frame, ...; read before `send`.

        Raises:
            httpx.HTTPError: it cannot be reached.
        """
        response = await self._client.get("/v1/models")
        model = response.raise_for_status().json()["data"][0]
        self._model = model["id"]
        return model["quartet"]

    async def send(self, prompt: Prompt) -> Exchange:
        """One streamed request. Never raises for what the server did: that is in the exchange."""
        body = json.dumps(self._wish.body(self._model, prompt)).encode()
        headers = {"content-type": "application/json"}
        exchange = Exchange(prompt, time.perf_counter())
        try:
            async with self._client.stream("POST", self._wish.path, content=body, headers=headers) as response:
                exchange.status = response.status_code
                async for piece in response.aiter_raw():
                    exchange.pieces.append((time.perf_counter(), piece))
        except httpx.HTTPError as error:
            exchange.error = f"{type(error).__name__}: {error}"
        exchange.done_s = time.perf_counter()
        return exchange

    async def close(self) -> None:
        """Closes its connections."""
        await self._client.aclose()


def _add(answer: Answer, chunk: dict[str, Any], came_s: float) -> None:
    for choice in chunk["choices"]:
        if text := choice["delta"].get("content"):
            answer.text += text
            answer.text_s.append(came_s)
        if data := (choice["delta"].get("audio") or {}).get("data"):
            answer.audio.append((came_s, len(base64.b64decode(data)) // PCM16_BYTES))
    if usage := chunk.get("usage"):
        answer.tokens = usage["completion_tokens_details"]["text_tokens"]
    if quartet := chunk.get("quartet"):
        answer.timings = quartet["timings"]
        answer.frames = quartet.get("frames") or 0
