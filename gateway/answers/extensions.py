"""Members that vLLM's clients add to OpenAI's requests."""

import json
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from gateway.errors import invalid
from gateway.validation import Listed, NotNegative, Strict, TokenIds, ignoring
from quartet.v1 import thinker_pb2
from services.common.sampling_limits import MAX_LOGPROB_TOKEN_IDS, TOP_LOGPROBS, WHOLE_VOCABULARY

_CONSTRAINTS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
# What vLLM's own dataclass has, too; its engine reads them from its settings only.
_OF_THE_ENGINE = ("disable_any_whitespace", "disable_additional_properties", "whitespace_pattern")
# What the thinker's refusals call members of a chat's response_format, and what they are here.
_OWN_NAMES = {
    "response_format.json_schema.schema": "structured_outputs.json",
    "response_format": "structured_outputs.json_object",
}
_ALIKE = (
    *("skip_special_tokens", "spaces_between_special_tokens", "include_stop_str_in_output"),
    "thinking_token_budget",
)
JsonText = dict[str, Any] | str
PROMPT_IDS = "kv_transfer_params.prompt_token_ids"
TopLogprobs = Annotated[int, Field(ge=WHOLE_VOCABULARY, le=int(TOP_LOGPROBS.most))]


def _text(value: JsonText) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


class StructuredOutputs(ignoring(Strict, empty=_OF_THE_ENGINE)):
    """What the text must be: one of these."""

    json_schema: JsonText | None = Field(default=None, alias="json", description="a JSON schema that it fits")
    regex: str | None = Field(default=None, min_length=1, description="a regular expression that it matches")
    choice: Listed[str] | None = Field(default=None, min_length=1, description="texts, one of which it is")
    grammar: str | None = Field(default=None, min_length=1, description="an EBNF or Lark grammar")
    json_object: Literal[True] | None = Field(default=None, description="any JSON object")
    structural_tag: JsonText | None = Field(default=None, description="XGrammar's; not beside tools")

    @model_validator(mode="after")
    def _is_one(self) -> Self:
        given = self.model_dump(by_alias=True, exclude_none=True).keys() & _CONSTRAINTS
        if len(given) != 1:
            raise ValueError(f"must have one of {', '.join(_CONSTRAINTS)}, not {len(given)}")
        return self

    def fill(self, sampling: thinker_pb2.SamplingParameters) -> None:
        for name in ("json_schema", "structural_tag"):
            if (value := getattr(self, name)) is not None:
                setattr(sampling, name, _text(value))
        for name in ("regex", "grammar", "json_object"):
            if (value := getattr(self, name)) is not None:
                setattr(sampling, name, value)
        if self.choice is not None:
            sampling.choice.texts.extend(self.choice)


# Members of a chat that belong to one prompt and the text after it: not to images, not to several turns.
OF_ONE_TEXT = (
    *("continue_final_message", "echo", "truncate_prompt_tokens", "prompt_logprobs", "return_token_ids"),
    "use_beam_search",
)
NOT_SPOKEN = ("continue_final_message", "echo", "truncate_prompt_tokens", "use_beam_search")


class StructuralTagFormat(Strict):
    """XGrammar's structural tag: `format`, or its older form."""

    type: Literal["structural_tag"]
    format: dict[str, Any] | None = None
    structures: Listed[Any] | None = None
    triggers: Listed[str] | None = None

    def fill(self, sampling: thinker_pb2.SamplingParameters) -> None:
        sampling.structural_tag = self.model_dump_json(exclude_none=True)


class TextMembers(Strict):
    """Of all requests for text."""

    structured_outputs: StructuredOutputs | None = Field(default=None, description="instead of response_format")
    skip_special_tokens: bool | None = Field(default=None, description="default: true; of the text only")
    spaces_between_special_tokens: bool | None = Field(default=None, description="default: true")
    include_stop_str_in_output: bool | None = Field(default=None, description="default: false")
    allowed_token_ids: TokenIds | None = Field(default=None, min_length=1, description="no others are sampled")
    thinking_token_budget: NotNegative | None = Field(default=None, description="most tokens of the reasoning")
    bad_words: Listed[str] | None = Field(default=None, max_length=64, description="they are not written")

    def fill(self, sampling: thinker_pb2.SamplingParameters) -> None:
        sampling.allowed_token_ids.extend(self.allowed_token_ids or ())
        sampling.bad_words.extend(self.bad_words or ())
        for name in _ALIKE:
            if (value := getattr(self, name)) is not None:
                setattr(sampling, name, value)
        if self.structured_outputs is not None:
            self.structured_outputs.fill(sampling)

    def own_name(self, member: str) -> str:
        """The request's own name of what a chat's refusal calls `member`."""
        if self.structured_outputs is not None:
            return _OWN_NAMES.get(member, member)
        return "response_format" if member == "structured_outputs.structural_tag" else member


class LogprobMembers(Strict):
    """Of requests for log-probabilities."""

    logprob_token_ids: TokenIds | None = Field(
        default=None, min_length=1, max_length=MAX_LOGPROB_TOKEN_IDS, description="reported in place of the likeliest"
    )

    def check_logprobs(self, wants: bool, place: str = "") -> None:
        """Raises ApiError: 400, no log-probabilities are wanted."""
        if self.logprob_token_ids and not wants:
            raise invalid(f"{place}logprob_token_ids", "only with logprobs")

    def choose(self, sampling: thinker_pb2.SamplingParameters) -> None:
        sampling.logprob_token_ids.extend(self.logprob_token_ids or ())


class PromptMembers(Strict):
    """Of all requests for text that say how long the prompt may be."""

    truncate_prompt_tokens: Annotated[int, Field(ge=-1, lt=2**31)] | None = Field(
        default=None, description="a longer prompt is cut; -1: to what fits the model"
    )
    truncation_side: Literal["left", "right"] | None = Field(default=None, description="that is cut off")

    def cut(self, start: thinker_pb2.GenerateStart) -> None:
        if self.truncate_prompt_tokens is not None:
            start.truncate_prompt_tokens = self.truncate_prompt_tokens
        if self.truncation_side is not None:
            start.truncation_side = f"TRUNCATION_SIDE_{self.truncation_side.upper()}"  # pyright: ignore


class PromptEnd(Strict):
    """Where the prompt of a conversation ends."""

    add_generation_prompt: bool | None = Field(
        default=None, description="whether it ends where an answer begins; default: true"
    )
    continue_final_message: bool | None = Field(
        default=None, description="whether it ends within the last message, which the answer continues"
    )

    @property
    def asks(self) -> bool:
        """Whether an answer begins after the last message."""
        return self.add_generation_prompt is not False and not self.continue_final_message

    def check_end(self) -> None:
        """Raises ApiError: 400, the two contradict each other."""
        if self.continue_final_message and self.add_generation_prompt:
            raise invalid("continue_final_message", "cannot be beside add_generation_prompt: true; leave that out")

    def end(self, message: thinker_pb2.GenerateStart | thinker_pb2.TokenizeRequest) -> None:
        message.continue_final_message = bool(self.continue_final_message)
        message.no_generation_prompt = self.add_generation_prompt is False


class PromptIds(Strict):
    """vLLM's place for a prompt that another engine has read; its blocks do not come from there."""

    prompt_token_ids: TokenIds | None = Field(default=None, min_length=1, description="instead of the messages")


class ChatMembers(PromptMembers, PromptEnd, LogprobMembers):
    """Of chats."""

    echo: bool | None = Field(default=None, description="the last message before the answer, if it is of the same role")
    include_reasoning: bool | None = Field(default=None, description="default: true")
    return_token_ids: bool | None = Field(default=None, description="choices have token_ids; prompt_token_ids")
    return_tokens_as_token_ids: bool | None = Field(default=None, description="in logprobs a token is token_id:ID")
    top_logprobs: TopLogprobs | None = Field(default=None, description="alternatives a token; -1 is all")
    prompt_logprobs: TopLogprobs | None = Field(
        default=None, description="alternatives of each of the prompt's tokens, -1 is all; not in a stream"
    )

    kv_transfer_params: PromptIds | None = Field(default=None, description="prompt_token_ids alone")

    @property
    def prompt_ids(self) -> list[int]:
        """Of a prompt that stands in place of the messages; []: they are read."""
        return (self.kv_transfer_params and self.kv_transfer_params.prompt_token_ids) or []

    def check_alone(self, has_more: bool) -> None:
        """Of a request with `prompt_ids`. Raises ApiError: 400, a part of it belongs to messages."""
        if has_more or self.continue_final_message or self.echo:
            raise invalid(PROMPT_IDS, "stand for messages of text: no media, tools, speech, echo, continuation")

    def tell(self, start: thinker_pb2.GenerateStart) -> None:
        """Asks for what comes beside the text."""
        self.choose(start.sampling)
        start.wants_prompt_token_ids = bool(self.return_token_ids)
        if self.prompt_logprobs is not None:
            start.sampling.prompt_logprobs = self.prompt_logprobs
