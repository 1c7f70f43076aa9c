"""`quartet chat`: sends one streamed request; text to the terminal, speech to a WAV file."""

import base64
import time
import wave
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from cli.http import ServerError, check, data_url, events


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
    """Returns a content part with the file as a data URL. `kind` is "image", "audio" or "video"."""
    return {"type": f"{kind}_url", f"{kind}_url": {"url": data_url(file, kind)}}


def ask(
    client: httpx.Client,
    messages: list[dict[str, Any]],
    options: dict[str, Any],
    on_text: Callable[[str], None],
    on_thought: Callable[[str], None] = lambda _: None,
) -> ChatAnswer:
    """Sends a chat request; calls `on_text` and `on_thought` with each piece. Raises ServerError.

    Args:
        options: further members of the request's body.
    """
    models = check(client.get("/v1/models")).json()["data"]
    if not models:
        raise ServerError("no model is served yet: its thinker is not ready")
    answer = ChatAnswer(models[0]["quartet"])
    body = {"model": models[0]["id"], "messages": messages, "stream": True, **options}
    sent_s = time.perf_counter()
    with client.stream("POST", "/v1/chat/completions", json=body) as response:
        for chunk in events(response):
            now_ms = (time.perf_counter() - sent_s) * 1000
            for choice in chunk["choices"]:
                delta = choice["delta"]
                if thought := delta.get("reasoning_content"):
                    on_thought(thought)
                if text := delta.get("content"):
                    answer.ttft_ms = answer.ttft_ms or now_ms
                    answer.text += text
                    on_text(text)
                if data := (delta.get("audio") or {}).get("data"):
                    answer.ttfa_ms = answer.ttfa_ms or now_ms
                    answer.pcm += base64.b64decode(data)
            if facts := chunk.get("quartet"):
                answer.timings, answer.frames = facts["timings"], facts.get("frames") or 0
    answer.total_ms = (time.perf_counter() - sent_s) * 1000
    return answer


def write_wav(answer: ChatAnswer, file: Path) -> None:
    with wave.open(str(file), "wb") as out:
        out.setparams((1, 2, answer.facts["sample_rate_hz"], 0, "NONE", ""))
        out.writeframes(answer.pcm)
