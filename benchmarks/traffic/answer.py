"""What a request came to, whoever answered it: moments and amounts, from which all figures are made."""

from dataclasses import dataclass, field
from typing import Any

Prompt = str | list[dict[str, Any]]
"""Text, or OpenAI's parts of a message."""


@dataclass
class Answer:
    """One request. Moments are seconds of `time.perf_counter`.

    Attributes:
        prompt: its text.
        sent_s: just before it was sent.
        done_s: its end.
        text_s: when each chunk with text came.
        audio: for each chunk with audio when it came, and its samples.
        tokens: of the text, as the server counts them.
        frames: codec frames, as the server counts them.
        timings: by stage, the server's own account in milliseconds.
        error: what went wrong; None if nothing did.
    """

    prompt: Prompt
    sent_s: float
    done_s: float
    text: str = ""
    text_s: list[float] = field(default_factory=list)
    audio: list[tuple[float, int]] = field(default_factory=list)
    tokens: int = 0
    frames: int = 0
    timings: dict[str, dict[str, float | None]] = field(default_factory=dict)
    error: str | None = None

    @property
    def samples(self) -> int:
        """Samples of all its audio."""
        return sum(samples for _, samples in self.audio)

    @property
    def said(self) -> tuple[str, int]:
        """What two answers must share to count as the same: text, and samples of audio."""
        return self.text, self.samples
