"""Events of an answer."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from quartet.v1 import code2wav_pb2, talker_pb2, thinker_pb2


@dataclass(frozen=True, slots=True)
class PromptRead:
    """The first stage took the request.

    Attributes:
        tokens: zeros if no thinker reads the prompt.
        text: the spoken text, if it is the request's own.
    """

    tokens: thinker_pb2.PromptInfo
    text: str = ""


@dataclass(frozen=True, slots=True)
class PromptTokens:
    """Tokens of the prompt, with log-probabilities. They precede every TextDelta."""

    tokens: Sequence[thinker_pb2.TokenLogprob]


@dataclass(frozen=True, slots=True)
class PromptScores:
    """Log-probabilities of chosen tokens at positions of the prompt. They precede every TextDelta."""

    scores: thinker_pb2.PromptScores


@dataclass(slots=True)  # frozen, each would take twice the time
class TextDelta:
    """More of an answer's text.

    Attributes:
        is_plain: it has neither log-probabilities nor calls. Looking there costs each token: protobuf makes an object.
    """

    delta: thinker_pb2.GenerateDelta
    is_plain: bool = False


@dataclass(frozen=True, slots=True)
class WholeBeam:
    """An answer of a search, whole; the best comes first."""

    delta: thinker_pb2.GenerateDelta
    summary: thinker_pb2.GenerateSummary


@dataclass(frozen=True, slots=True)
class TextEnd:
    """The text is complete; its sound may go on."""

    summary: thinker_pb2.GenerateSummary


@dataclass(frozen=True, slots=True)
class CodesDelta:
    """Codec frames. A frame is its codes, group 0 first."""

    frames: list[list[int]]


@dataclass(frozen=True, slots=True)
class AudioDelta:
    """Samples, mono PCM16, little-endian."""

    pcm16: bytes


@dataclass(frozen=True, slots=True)
class Finished:
    """The answer is complete. `summaries` of the stages are by kind."""

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


Event = PromptRead | PromptTokens | PromptScores | TextDelta | WholeBeam | TextEnd | CodesDelta | AudioDelta | Finished
