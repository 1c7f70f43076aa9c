"""What a request's answers bring, as things happen."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from quartet.v1 import code2wav_pb2, talker_pb2, thinker_pb2


@dataclass(frozen=True, slots=True)
class PromptRead:
    """The first stage took the request: an answer follows.

    Attributes:
        tokens: of the prompt, by kind; none where no thinker reads it.
        text: what is spoken, where the request says it and no thinker writes it.
    """

    tokens: thinker_pb2.PromptInfo
    text: str = ""


@dataclass(frozen=True, slots=True)
class PromptTokens:
    """The next tokens of the prompt, with their log-probabilities, where those are asked for; before any TextDelta."""

    tokens: Sequence[thinker_pb2.TokenLogprob]


@dataclass(frozen=True, slots=True)
class TextDelta:
    """New text, token ids, log-probabilities or parts of tool calls."""

    delta: thinker_pb2.GenerateDelta


@dataclass(frozen=True, slots=True)
class TextEnd:
    """The thinker has written all of the text; its sound may go on."""

    summary: thinker_pb2.GenerateSummary


@dataclass(frozen=True, slots=True)
class CodesDelta:
    """The next codec frames, each its codes, group 0 first: those that the talker sampled, and code2wav decodes."""

    frames: list[list[int]]


@dataclass(frozen=True, slots=True)
class AudioDelta:
    """The next samples, mono PCM16, little-endian."""

    pcm16: bytes


@dataclass(frozen=True, slots=True)
class Finished:
    """The answer is complete, text and sound.

    Attributes:
        summaries: summary of each stage that the job needed, by kind of stage.
    """

    summaries: Mapping[str, Any] = field(default_factory=dict)

    @property
    def thinker(self) -> thinker_pb2.GenerateSummary | None:
        return self.summaries.get("thinker")

    @property
    def talker(self) -> talker_pb2.SpeakSummary | None:
        return self.summaries.get("talker")

    @property
    def code2wav(self) -> code2wav_pb2.DecodeSummary | None:
        return self.summaries.get("code2wav")


Event = PromptRead | PromptTokens | TextDelta | TextEnd | CodesDelta | AudioDelta | Finished
