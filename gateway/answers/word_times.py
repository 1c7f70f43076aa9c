"""When the words of a text are said in a sound, by the pipeline's aligner."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import soxr

from gateway.listening.silero import RATE_HZ
from gateway.media.encode import BYTES_PER_SAMPLE
from gateway.pipeline.aligner import word_times
from gateway.pipeline.stage import Stage
from quartet.v1 import aligner_pb2

NO_ALIGNER = "no aligner is here to find the times of words; have the server started with --aligner-model"


@dataclass(frozen=True)
class TimedWord:
    """A word of a text, without the punctuation around it; when it is said, in seconds."""

    text: str
    begin_s: float
    end_s: float

    def verbose(self) -> dict[str, Any]:
        """OpenAI's form."""
        return {"word": self.text, "start": round(self.begin_s, 3), "end": round(self.end_s, 3)}


async def timed_words(
    aligner: Stage, request_id: str, pcm16: bytes, text: str, language: str, timeout_s: float, begin_s: float = 0.0
) -> list[TimedWord]:
    """The words of `text`, which is said in mono PCM16 at RATE_HZ. Their times are within the sound.

    Args:
        language: ISO 639-1 code; "": not known.
        begin_s: when the sound begins.

    Raises:
        StageError: as `word_times`.
    """
    if not text.strip() or not pcm16:
        return []
    request = aligner_pb2.AlignRequest(request_id=request_id, pcm16=pcm16, text=text, language=language)
    length_ms = len(pcm16) * 1000 / BYTES_PER_SAMPLE / RATE_HZ

    def at(ms: int) -> float:
        return begin_s + min(ms, length_ms) / 1000

    return [
        TimedWord(text[word.text_begin : word.text_end], at(word.begin_ms), at(word.end_ms))
        for word in await word_times(aligner, request, timeout_s)
    ]


def for_aligner(pcm16: bytes, rate_hz: int) -> bytes:
    """Mono PCM16 of `rate_hz` at RATE_HZ. Blocks."""
    samples = np.frombuffer(pcm16, "<i2")
    return pcm16 if rate_hz == RATE_HZ else soxr.resample(samples, rate_hz, RATE_HZ).tobytes()
