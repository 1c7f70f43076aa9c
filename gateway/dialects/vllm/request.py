"""Body of `POST /inference/v1/generate`."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from gateway.answers.completion import SpeechParams
from gateway.answers.conversation import MediaPart
from gateway.answers.extensions import LogprobMembers, TopLogprobs
from gateway.answers.gateway import Gateway
from gateway.answers.request import StreamOptions, WriterSampling
from gateway.dialects.vllm.features import Features
from gateway.errors import invalid
from gateway.validation import Listed, NotNegative, Strict, TokenIds
from quartet.v1 import thinker_pb2
from services.common.sampling_limits import TOP_LOGPROBS

RowId = Annotated[int, Field(ge=-1, lt=2**31)]


class SamplingParams(LogprobMembers, WriterSampling):
    """Sampling parameters under vLLM's names."""

    n: Annotated[int, Field(ge=1, le=128)] | None = None
    logprobs: TopLogprobs | None = Field(default=None, description="alternatives of each token; -1 is all")
    prompt_logprobs: TopLogprobs | None = Field(
        default=None, description="alternatives of each of the prompt's tokens, -1 is all; not in a stream"
    )
    prompt_logprob_token_ids: Listed[Annotated[Listed[RowId], Field(max_length=int(TOP_LOGPROBS.most))]] | None = Field(
        default=None, min_length=1, description="scored at each of the prompt's positions; -1 is none; not in a stream"
    )
    prompt_logprob_start: NotNegative | None = Field(default=None, description="the position of the first of these")
    detokenize: bool | None = Field(default=None, description="false: ids alone are wanted; not beside stop or a text")

    def fill_chosen(self, sampling: thinker_pb2.SamplingParameters) -> None:
        self.choose(sampling)
        sampling.prompt_logprob_start = self.prompt_logprob_start or 0
        for row in self.prompt_logprob_token_ids or ():
            sampling.prompt_logprob_token_ids.add(ids=row)


def _nested(part: Any) -> Any:
    """vLLM has the URL of a medium beside its type."""
    if isinstance(part, dict) and "url" in part and (kind := part.get("type")) not in part:
        url = {"url": part["url"]}
        return {name: value for name, value in part.items() if name != "url"} | {str(kind): url}
    return part


class GenerateRequest(Strict):
    """Token ids, with a placeholder for each medium."""

    token_ids: TokenIds = Field(min_length=1)
    sampling_params: SamplingParams = Field(default_factory=SamplingParams)
    model: str | None = Field(default=None, description="default: the one that writes")
    request_id: str | None = Field(default=None, min_length=1, max_length=128, description="by which it is given up")
    content_parts: (
        Listed[Annotated[Annotated[MediaPart, Field(discriminator="type")], BeforeValidator(_nested)]] | None
    ) = Field(default=None, description="media, as parts of chats, in the order of their placeholders")
    features: Features | None = Field(default=None, description="media of a prompt that /render made")
    reasoning_ended: bool | None = Field(
        default=None, description="false: the prompt ends in a thought, and a structure begins after that"
    )
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] | None = None
    output_mode: Literal["tokens", "text"] | None = Field(default=None, description="text: choices have it, too")
    return_token_ids: bool | None = Field(default=None, description="the prompt's ids are told, as the model reads it")
    speech: SpeechParams | None = Field(default=None, description="what is written is spoken, too; Quartet's own")
    cache_salt: Any = Field(default=None, description="refused: prompts share one prefix cache")
    kv_transfer_params: Any = Field(default=None, description="refused")

    def check(self, gateway: Gateway) -> None:
        """Raises ApiError: 400 naming a member that is not supported."""
        if self.features is not None and self.content_parts:
            raise invalid("features", "cannot be beside content_parts; leave one of the two out")
        if self.kv_transfer_params is not None:
            raise invalid("kv_transfer_params", "KV blocks do not come from elsewhere; leave it out")
        if self.cache_salt is not None:
            raise invalid("cache_salt", "all prompts share one prefix cache; leave it out")
        for name in ("prompt_logprobs", "prompt_logprob_token_ids"):
            if self.stream and getattr(self.sampling_params, name) is not None:
                raise invalid(f"sampling_params.{name}", "a stream does not tell them; set stream to false")
        if self.sampling_params.prompt_logprob_start is not None and not self.sampling_params.prompt_logprob_token_ids:
            raise invalid("sampling_params.prompt_logprob_start", "only with prompt_logprob_token_ids")
        if self.sampling_params.detokenize is False and (self.output_mode == "text" or self.sampling_params.stop):
            raise invalid("sampling_params.detokenize", "stop strings and a text need it; leave it out")
        self.sampling_params.check_logprobs(self.sampling_params.logprobs is not None, "sampling_params.")
        if self.stream_options is not None and not self.stream:
            raise invalid("stream_options", "only with stream: true")
        if self.speech is not None:
            self.speech.check(gateway, bool(self.stream))
