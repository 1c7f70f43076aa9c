"""Body of `POST /v1/responses`."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from gateway.answers import harmless
from gateway.answers.extensions import TextMembers
from gateway.answers.request import AudioOptions, QuartetOptions, StopStrings, TemplateVariables
from gateway.pipeline.sampling import ThinkerSampling
from gateway.validation import Lenient, Listed, Metadata, ModelName, Positive, ignoring


class TextFormat(Lenient):
    """Free text, any JSON object, or JSON that fits a schema."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    json_schema: dict[str, Any] | None = Field(default=None, alias="schema")
    description: str | None = None
    strict: bool | None = Field(default=None, description="accepted; the schema is always followed")


class TextOptions(Lenient):
    format: TextFormat | None = None
    verbosity: str | None = Field(default=None, description="accepted; without effect")


class ReasoningOptions(Lenient):
    """Accepted; the model decides by itself."""

    effort: str | None = Field(default=None, description="accepted; without effect")
    summary: str | None = Field(default=None, description="accepted; the thought itself is told")


class StreamOptions(Lenient):
    include_obfuscation: bool | None = Field(default=None, description="accepted; nothing is padded")


class ConversationId(Lenient):
    id: str


class ResponseRequest(TemplateVariables, TextMembers, ignoring(ThinkerSampling, *harmless.RESPONSES)):
    """OpenAI's parameters, vLLM's further ones, and chat's for speech."""

    model: ModelName = Field(default="", description="default: the one that writes")
    input: str | Listed[Any] = Field(default=[], description="a text, or items")
    instructions: str | None = Field(default=None, description="a system message before all; not kept for later turns")
    previous_response_id: str | None = Field(default=None, description="answers after that response")
    conversation: (
        Annotated[ConversationId, BeforeValidator(lambda value: {"id": value} if isinstance(value, str) else value)]
        | None
    ) = Field(default=None, description="answers in that conversation, and adds to it")
    store: bool | None = Field(default=None, description="whether it can be got, and answered to, later; default: yes")
    background: bool | None = Field(default=None, description="goes on whether or not the client stays")
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    include: Listed[str] | None = Field(
        default=None, description="message.output_text.logprobs, reasoning.encrypted_content; others without effect"
    )
    enable_response_messages: bool | None = Field(
        default=None, description="the response has input_messages and output_messages, its texts as token ids"
    )
    include_reasoning: bool | None = Field(default=None, description="default: true; as chat's")
    max_output_tokens: Positive | None = Field(default=None, description="of text; wins over max_tokens")
    max_tool_calls: Positive | None = Field(default=None, description="most calls of tools that run here; default: 8")
    metadata: Metadata | None = None
    parallel_tool_calls: bool | None = Field(default=None, description="false: a turn has one call at most")
    prompt: Any = Field(default=None, description="refused: no prompts are kept here")
    prompt_cache_key: str | None = Field(default=None, description="names a conversation, to choose the thinker")
    reasoning: ReasoningOptions | None = None
    safety_identifier: str | None = Field(default=None, description="accepted; without effect")
    service_tier: str | None = Field(default=None, description="accepted; without effect")
    text: TextOptions | None = None
    tools: Listed[Any] | None = Field(
        default=None, description="functions, and tools that run here; others are left out"
    )
    tool_choice: Any = Field(
        default=None, description='"none", "auto", "required", {type: function, name}, {type: image_generation}'
    )
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    truncation: Literal["auto", "disabled"] | None = Field(
        default=None, description="auto: the oldest items are left out of a prompt that is too long; default: disabled"
    )
    user: str | None = Field(default=None, description="accepted; without effect")

    modalities: Listed[Literal["text", "audio"]] | None = Field(default=None, description="as chat's; OpenAI has none")
    audio: AudioOptions | None = Field(default=None, description="as chat's; OpenAI has none")
    stop: StopStrings | None = None
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] | None = Field(default=None, description="as chat's")
    lora: str | None = Field(default=None, description="as chat's")
    quartet: QuartetOptions = Field(default_factory=QuartetOptions)

    @property
    def is_stored(self) -> bool:
        return self.store is not False

    @property
    def wants_logprobs(self) -> bool:
        return bool(self.top_logprobs) or "message.output_text.logprobs" in (self.include or ())

    @property
    def wants_encrypted_reasoning(self) -> bool:
        """Whether reasoning is sent in the form that clients send back."""
        return "reasoning.encrypted_content" in (self.include or ())


class InputTokensRequest(ignoring(ResponseRequest, "personality")):
    """A response whose prompt is counted. Sampling has no effect."""

    input: Annotated[str | Listed[Any], BeforeValidator(lambda value: [] if value is None else value)] = Field(
        default=[], description="a text, or items"
    )
