"""Sampling parameters of the stages, with their ranges: defaults in a pipeline's YAML, values in a request."""

from typing import Annotated, Any

from pydantic import Field

from gateway.strict import Strict

Temperature = Annotated[float, Field(ge=0, le=2)]
Probability = Annotated[float, Field(gt=0, le=1)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
MAX_SEED = 2**63 - 1 - 128  # n answers use seed .. seed + n - 1, and those are 64-bit too


class _Sampling(Strict):
    def over(self, defaults: "_Sampling") -> dict[str, Any]:
        """The parameters that are set here, or else in `defaults`; those of `defaults`' type alone."""
        own = self.model_dump(include=set(type(defaults).model_fields), exclude_none=True)
        return defaults.model_dump(exclude_none=True) | own


class ThinkerSampling(_Sampling):
    """How text is sampled. None means: as the pipeline says, else as the checkpoint says."""

    temperature: Temperature | None = Field(default=None, description="0 is greedy")
    top_p: Probability | None = None
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = Field(
        default=None, description="tokens kept; 0 or -1 keeps all"
    )
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=10)] | None = Field(default=None, description="1 is none")
    max_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = Field(
        default=None, description="most tokens of the answer"
    )
    min_tokens: Annotated[int, Field(ge=0, lt=2**31)] | None = Field(
        default=None, description="least tokens of the answer"
    )
    seed: Annotated[int, Field(ge=-(2**63), le=MAX_SEED)] | None = None
    ignore_eos: bool | None = Field(default=None, description="continue past end-of-sequence")
    stop_token_ids: list[Annotated[int, Field(ge=0, lt=2**31)]] | None = Field(
        default=None, description="token ids that end the answer"
    )


class TalkerSampling(_Sampling):
    """How codec frames are sampled. None means: as the pipeline says, else as the checkpoint says."""

    temperature: Temperature | None = Field(default=None, description="0 is greedy for talker and code predictor")
    top_k: Annotated[int, Field(ge=0, lt=2**31)] | None = Field(default=None, description="codes kept; 0 keeps all")
    top_p: Probability | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=10)] | None = Field(default=None, description="1 is none")
    seed: Annotated[int, Field(ge=-(2**63), le=MAX_SEED)] | None = None
    max_frames: Annotated[int, Field(ge=1, lt=2**31)] | None = Field(default=None, description="most codec frames")
    predictor_temperature: Temperature | None = Field(default=None, description="of code groups 1 and up")
    predictor_top_k: Annotated[int, Field(ge=0, lt=2**31)] | None = Field(default=None, description="0 keeps all")
    predictor_top_p: Probability | None = None
