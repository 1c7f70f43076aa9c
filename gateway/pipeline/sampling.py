"""Sampling parameters of requests and pipeline files."""

from typing import Annotated, Any

from pydantic import Field

from gateway.validation import Listed, NotNegative, Positive, Strict
from services.common import sampling_limits as limits


def _within(limit: limits.Range) -> Any:
    return Field(gt=limit.least, le=limit.most) if limit.excludes_least else Field(ge=limit.least, le=limit.most)


Temperature = Annotated[float, _within(limits.TEMPERATURE)]
Probability = Annotated[float, _within(limits.TOP_P)]
Penalty = Annotated[float, _within(limits.PENALTY)]
MAX_SEED = 2**63 - 1 - 128  # n answers use seed .. seed + n - 1, and those are 64-bit too


class _Sampling(Strict):
    top_p: Probability | None = None
    repetition_penalty: Annotated[float, _within(limits.REPETITION_PENALTY)] | None = Field(
        default=None, description="1 is none"
    )
    seed: Annotated[int, Field(ge=-(2**63), le=MAX_SEED)] | None = None

    def over(self, defaults: "_Sampling") -> dict[str, Any]:
        """The parameters of `defaults`, overridden by those set here."""
        own = self.model_dump(include=set(type(defaults).model_fields), exclude_none=True)
        return defaults.model_dump(exclude_none=True) | own


class TranscriptSampling(_Sampling):
    """How a transcript is sampled. None: the checkpoint's."""

    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = Field(
        default=None, description="tokens kept; 0 or -1 keeps all"
    )
    min_p: Annotated[float, _within(limits.MIN_P)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None


class ThinkerSampling(TranscriptSampling):
    """How text is sampled. None: the pipeline's value, or the checkpoint's."""

    temperature: Temperature | None = Field(default=None, description="0 is greedy")
    max_tokens: Positive | None = Field(default=None, description="most tokens of the answer")
    min_tokens: NotNegative | None = Field(default=None, description="least tokens of the answer")
    ignore_eos: bool | None = Field(default=None, description="continue past end-of-sequence")
    stop_token_ids: Listed[NotNegative] | None = Field(default=None, description="token ids that end the answer")


class TalkerSampling(_Sampling):
    """How codec frames are sampled. None: the pipeline's value, or the checkpoint's."""

    temperature: Temperature | None = Field(default=None, description="0 is greedy for talker and code predictor")
    top_k: NotNegative | None = Field(default=None, description="codes kept; 0 keeps all")
    max_frames: Positive | None = Field(default=None, description="most codec frames")
    predictor_temperature: Temperature | None = Field(default=None, description="of code groups 1 and up")
    predictor_top_k: NotNegative | None = Field(default=None, description="0 keeps all")
    predictor_top_p: Probability | None = None
