"""What goes into a run of the pipeline, and what comes out of it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from quartet.v1 import code2wav_pb2, talker_pb2, thinker_pb2


@dataclass(frozen=True)
class Job:
    """One answer to be made.

    Attributes:
        request_id: names the answer in every stage.
        starts: start messages by kind of stage, of the stages of the pipeline's answer that are needed: GenerateStart,
            SpeakRequest, DecodeRequest. Ids and sources are filled in by the run.
        media: files of the first stage's media parts without data, in their order.
    """

    request_id: str
    starts: Mapping[str, Any]
    media: Sequence[bytes] = ()


def speech(speak: talker_pb2.SpeakRequest) -> dict[str, Any]:
    """Start messages of the stages that speak, as `speak` says."""
    return {"talker": speak, "code2wav": code2wav_pb2.DecodeRequest(sample_format=code2wav_pb2.SAMPLE_FORMAT_PCM16)}


@dataclass(frozen=True)
class PromptRead:
    """The first stage took the request: an answer follows.

    Attributes:
        tokens: of the prompt, by kind; none where no thinker reads it.
        text: what is spoken, where the request says it and no thinker writes it.
    """

    tokens: thinker_pb2.PromptInfo
    text: str = ""


@dataclass(frozen=True)
class TextDelta:
    """New text, token ids, log-probabilities or parts of tool calls."""

    delta: thinker_pb2.GenerateDelta


@dataclass(frozen=True)
class AudioDelta:
    """The next samples, mono PCM16, little-endian."""

    pcm16: bytes


@dataclass(frozen=True)
class Finished:
    """The answer is complete, text and sound: the summaries of the stages, None for those that were not needed."""

    thinker: thinker_pb2.GenerateSummary | None = None
    talker: talker_pb2.SpeakSummary | None = None
    code2wav: code2wav_pb2.DecodeSummary | None = None


Event = PromptRead | TextDelta | AudioDelta | Finished
