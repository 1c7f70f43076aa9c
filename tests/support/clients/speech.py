"""Spoken answers as a client asks for them and reads them."""

from collections.abc import Iterator
from typing import Any

import httpx

from benchmarks.traffic import sse

# What was said once is said again and again, and never that it is the end: minutes of work, unless it is given up.
ENDLESS_SPEECH = {"temperature": 1, "seed": 3, "repetition_penalty": 0.01, "max_frames": 4000}
ENDLESS_TOKENS = 10_000


def speech(model: str, **change: Any) -> dict[str, Any]:
    """The body of a streamed request for a spoken answer that somebody has to end, with members changed."""
    return {
        "model": model,
        "messages": [{"role": "user", "content": "Tell me a long story."}],
        "modalities": ["text", "audio"],
        "audio": {"format": "pcm16"},
        "stream": True,
        "temperature": 0,
        "max_tokens": ENDLESS_TOKENS,
        "ignore_eos": True,
        "quartet": {"talker": ENDLESS_SPEECH},
        **change,
    }


def events(response: httpx.Response) -> Iterator[dict[str, Any]]:
    """The server-sent events of an answer, errors among them, as they come; without [DONE]."""
    for _, event in sse.events((0.0, piece) for piece in response.iter_raw()):
        if event is not None:
            yield event
