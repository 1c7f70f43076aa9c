"""`quartet chat`: sends one streamed request; text to the terminal, speech to a WAV file."""

import base64
import mimetypes
import time
import wave
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from cli.http import ServerError, check, events


@dataclass
class ChatAnswer:
    """An answer. Milliseconds count from before the request; `pcm` is mono PCM16; `facts` come from /v1/models."""

    facts: dict[str, Any]
    text: str = ""
    pcm: bytes = b""
    ttft_ms: float | None = None
    ttfa_ms: float | None = None
    total_ms: float = 0.0
    frames: int = 0
    timings: dict[str, dict[str, float]] = field(default_factory=dict)

    @property
    def audio_s(self) -> float:
        return len(self.pcm) / 2 / self.facts["sample_rate_hz"] if self.pcm else 0.0


def part(kind: str, file: Path) -> dict[str, Any]:
    """Returns a content part of `kind` ("image", "audio", "video") with the file as a data URL."""
    media_type = mimetypes.guess_type(file.name)[0] or f"{kind}/*"
    data = base64.b64encode(file.read_bytes()).decode()
    return {"type": f"{kind}_url", f"{kind}_url": {"url": f"data:{media_type};base64,{data}"}}


def ask(
    client: httpx.Client,
    content: list[dict[str, Any]],
    options: dict[str, Any],
    on_text: Callable[[str], None],
    on_thought: Callable[[str], None] = lambda _: None,
    before: Sequence[dict[str, Any]] = (),
) -> ChatAnswer:
    """Sends a chat request; calls `on_text` and `on_thought` with each piece. Raises ServerError.

    Args:
        content: parts of the user's message.
        options: further members of the request's body.
        before: messages of the conversation so far.
    """
    models = check(client.get("/v1/models")).json()["data"]
    if not models:
        raise ServerError("no model is served yet: its thinker is not ready")
    model = models[0]
    answer = ChatAnswer(model["quartet"])
    body = {"model": model["id"], "messages": [*before, {"role": "user", "content": content}], "stream": True}
    body |= options
    sent_s = time.perf_counter()
    with client.stream("POST", "/v1/chat/completions", json=body) as response:
        for chunk in events(response):
            now_ms = (time.perf_counter() - sent_s) * 1000
            _add(answer, chunk, now_ms, on_text, on_thought)
    answer.total_ms = (time.perf_counter() - sent_s) * 1000
    return answer


def write_wav(answer: ChatAnswer, file: Path) -> None:
    with wave.open(str(file), "wb") as out:
        out.setnchannels(1)
        out.setsampwidth(2)
        out.setframerate(answer.facts["sample_rate_hz"])
        out.writeframes(answer.pcm)


def _add(
    answer: ChatAnswer,
    chunk: dict[str, Any],
    now_ms: float,
    on_text: Callable[[str], None],
    on_thought: Callable[[str], None],
) -> None:
    for choice in chunk["choices"]:
        if thought := choice["delta"].get("reasoning_content"):
            on_thought(thought)
        if text := choice["delta"].get("content"):
            answer.ttft_ms = answer.ttft_ms or now_ms
            answer.text += text
            on_text(text)
        if data := (choice["delta"].get("audio") or {}).get("data"):
            answer.ttfa_ms = answer.ttfa_ms or now_ms
            answer.pcm += base64.b64decode(data)
    if facts := chunk.get("quartet"):
        answer.timings = facts["timings"]
        answer.frames = facts.get("frames") or 0
