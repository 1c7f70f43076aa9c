"""What goes into a run of the pipeline, and what comes out of it."""

from dataclasses import dataclass, field

from quartet.v1 import code2wav_pb2, talker_pb2, thinker_pb2
from services.common.rpc.errors import StageError


@dataclass(frozen=True)
class Speech:
    """That an answer is to be spoken, and how. `speaker` "" is the talker's default voice."""

    speaker: str
    sampling: talker_pb2.TalkerSampling


@dataclass(frozen=True)
class Job:
    """One answer to be made.

    Attributes:
        start: what the thinker gets; `request_id` names the answer in every stage.
        late_media: files of the media parts of `start` without data, in their order.
        speech: None for text only.
    """

    start: thinker_pb2.GenerateStart
    late_media: list[bytes] = field(default_factory=list)
    speech: Speech | None = None


@dataclass(frozen=True)
class PromptRead:
    """The thinker took the prompt: an answer follows."""

    tokens: thinker_pb2.PromptInfo


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
    """The answer is complete, text and sound.

    Attributes:
        thinker: its summary.
        talker: its summary; None for a text-only answer.
        code2wav: its summary; None for a text-only answer.
    """

    thinker: thinker_pb2.GenerateSummary
    talker: talker_pb2.SpeakSummary | None
    code2wav: code2wav_pb2.DecodeSummary | None


Event = PromptRead | TextDelta | AudioDelta | Finished


class StageFailure(Exception):
    """A stage ended a request.

    Attributes:
        stage: kind of the one that it began in: "thinker", "talker", "code2wav", "dit" or "encoder"; "gateway" for the
            gateway itself.
        error: why.
    """

    def __init__(self, reporter: str, error: StageError) -> None:
        self.stage = error.origin or reporter
        self.error = error
        super().__init__(f"{self.stage}: {error}")
