"""Transcripts in each response format."""

import re
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from gateway.answers.word_times import TimedWord


@dataclass
class Segment:
    """The text between two pauses.

    Attributes:
        begin_s, end_s: from the beginning of the audio.
        speech_probability: mean, as the detector says.
        logprobs: of the tokens, if requested.
        words: with their times, if requested.
    """

    id: int
    begin_s: float
    end_s: float
    speech_probability: float
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    words: list[TimedWord] = field(default_factory=list)

    def verbose(self, temperature: float) -> dict[str, Any]:
        """OpenAI's form, with Whisper's members."""
        encoded = self.text.encode()
        return {
            "id": self.id,
            "seek": round(self.begin_s * 100),
            "start": round(self.begin_s, 3),
            "end": round(self.end_s, 3),
            "text": self.text,
            "tokens": self.token_ids,
            "temperature": temperature,
            "avg_logprob": sum(self.logprobs) / len(self.logprobs) if self.logprobs else 0.0,
            "compression_ratio": len(encoded) / len(zlib.compress(encoded)) if encoded else 0.0,
            "no_speech_prob": round(1.0 - self.speech_probability, 4),
        }


def joined(segments: Sequence[Segment]) -> str:
    return " ".join(segment.text for segment in segments if segment.text)


def srt(segments: Sequence[Segment]) -> str:
    spoken = [segment for segment in segments if segment.text]
    return "".join(
        f"{number}\n{_time(s.begin_s, ',')} --> {_time(s.end_s, ',')}\n{_lines(s.text)}\n\n"
        for number, s in enumerate(spoken, start=1)
    )


def vtt(segments: Sequence[Segment]) -> str:
    spoken = (segment for segment in segments if segment.text)
    return "WEBVTT\n\n" + "".join(
        f"{_time(s.begin_s, '.')} --> {_time(s.end_s, '.')}\n{_lines(s.text).replace('-->', '->')}\n\n" for s in spoken
    )


def _lines(text: str) -> str:
    """Removes empty lines, which would end the subtitle."""
    return re.sub(r"\s*\n\s*", "\n", text)


def _time(seconds: float, point: str) -> str:
    whole, ms = divmod(round(seconds * 1000), 1000)
    return f"{whole // 3600:02}:{whole // 60 % 60:02}:{whole % 60:02}{point}{ms:03}"
