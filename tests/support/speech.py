"""Spoken answers as a client asks for them and reads them."""

from collections.abc import Iterator
from typing import Any

import httpx
import sse

LONG_SPEECH = {"temperature": 1, "seed": 3, "max_frames": 2000}  # on the tiny checkpoint: more than a hundred frames


def speech(model: str, **change: Any) -> dict[str, Any]:
    """The body of a streamed request for a long spoken answer, with members changed."""
    return {
        "model": model,
        "messages": [{"role": "user", "content": "Tell me a long story."}],
        "modalities": ["text", "audio"],
        "audio": {"format": "pcm16"},
        "stream": True,
        "temperature": 0,
        "max_tokens": 2000,
        "ignore_eos": True,
        "quartet": {"talker": LONG_SPEECH},
        **change,
    }


def events(response: httpx.Response) -> Iterator[dict[str, Any]]:
    """The server-sent events of an answer, errors among them, as they come; without [DONE]."""
    for _, event in sse.events((0.0, piece) for piece in response.iter_raw()):
        if event is not None:
            yield event
