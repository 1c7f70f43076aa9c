"""Body of `POST /v1/chat/completions`."""

from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    ValidationInfo,
    field_validator,
    model_validator,
)

from gateway.answers import harmless
from gateway.answers.beams import BeamMembers
from gateway.answers.conversation import MediaPart, Message, TextPart
from gateway.answers.diffusion import ImageOptions
from gateway.answers.extensions import NOT_SPOKEN, PROMPT_IDS, ChatMembers, StructuralTagFormat, TextMembers
from gateway.answers.video_frames import VideoFrameMembers
from gateway.errors import invalid
from gateway.pipeline.sampling import TalkerSampling, ThinkerSampling
from gateway.validation import Listed, ModelName, NotNegative, Strict, ignoring

MAX_STOP_STRINGS = 16
MAX_BIASES = 1024  # tokens of logit_bias; each answer has a copy
AudioFormat = Literal["wav", "mp3", "flac", "opus", "aac", "pcm16"]
StopStrings = Annotated[
    Listed[Annotated[str, Field(min_length=1)]],
    Field(max_length=MAX_STOP_STRINGS),
    BeforeValidator(lambda value: [value] if isinstance(value, str) else value),
]


class StreamOptions(Strict):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = Field(default=None, description="with include_usage: in every chunk, so far")
    include_obfuscation: bool | None = Field(default=None, description="accepted; nothing is padded")


class AudioOptions(Strict):
    voice: str | None = Field(default=None, description="one of the model's, in any case; default: its first")
    format: AudioFormat | None = Field(default=None, description="default: wav; a stream: pcm16, the default, or wav")


def _limit(most: int) -> int | None:
    if most == 0:
        raise ValueError("must be 1 or more; -1 is no limit")
    return None if most == -1 else most


# -1 is what many programs send for none.
Limit = Annotated[int, Field(ge=-1, lt=2**31), AfterValidator(_limit)]
_Described = ignoring(Strict, *harmless.CACHING)


class FunctionTool(_Described):
    name: str = Field(min_length=1, max_length=64)
    description: str | None = None
    parameters: dict[str, Any] | None = Field(default=None, description="JSON schema of its arguments")
    strict: bool | None = Field(default=None, description="accepted; arguments of forced calls follow the schema")


class Tool(_Described):
    type: Literal["function"]
    function: FunctionTool


class OtherTool(BaseModel):
    """A tool that may run here. Its class reads its settings."""

    model_config = ConfigDict(extra="allow", strict=True)

    type: str


def _kind_of_tool(tool: Any) -> str:
    kind = tool.get("type") if isinstance(tool, dict) else getattr(tool, "type", None)
    return "function_tool" if kind in (None, "function") else "hosted_tool"


AnyTool = Annotated[
    Annotated[Tool, Tag("function_tool")] | Annotated[OtherTool, Tag("hosted_tool")], Discriminator(_kind_of_tool)
]


class NamedFunction(Strict):
    name: str


class ToolChoice(Strict):
    """`type`: none, auto, required, function, or a tool that runs here."""

    type: str
    function: NamedFunction | None = None

    @model_validator(mode="after")
    def _function_is_named(self) -> Self:
        if (self.type == "function") != (self.function is not None):
            raise ValueError('must be "none", "auto", "required" or {"type": "function", "function": {"name": ...}}')
        return self


class TextFormat(Strict):
    type: Literal["text"]


class JsonObjectFormat(Strict):
    type: Literal["json_object"]


class JsonSchema(Strict):
    name: str = Field(min_length=1)
    json_schema: dict[str, Any] = Field(alias="schema")
    description: str | None = None
    strict: bool | None = Field(default=None, description="accepted; the schema is always followed")


class JsonSchemaFormat(Strict):
    type: Literal["json_schema"]
    json_schema: JsonSchema


class ThinkerOptions(Strict):
    use_audio_in_video: bool | None = Field(default=None, description="hear the sound track of videos; default: no")
    chat_template_kwargs: dict[str, Any] | None = Field(default=None, description="variables for the chat template")


class Code2WavOptions(Strict):
    """Nothing to set yet."""


class QuartetOptions(Strict):
    """Settings per stage that OpenAI's API has no place for."""

    thinker: ThinkerOptions = Field(default_factory=ThinkerOptions)
    talker: TalkerSampling = Field(default_factory=TalkerSampling)
    code2wav: Code2WavOptions = Field(default_factory=Code2WavOptions)
    dit: ImageOptions | None = Field(default=None, description="only for a model that makes images")


class MmProcessorKwargs(Strict):
    """vLLM's spelling of quartet.thinker."""

    use_audio_in_video: bool | None = None


ResponseFormat = Annotated[
    TextFormat | JsonObjectFormat | JsonSchemaFormat | StructuralTagFormat, Field(discriminator="type")
]


class WriterSampling(ThinkerSampling, TextMembers):
    """How text is written, wherever it is asked for."""

    stop: StopStrings | None = None
    logit_bias: dict[NotNegative, Annotated[float, Field(ge=-100, le=100)]] | None = Field(
        default=None, max_length=MAX_BIASES, description=f"at most {MAX_BIASES} tokens"
    )
    response_format: ResponseFormat | None = None
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] | None = Field(default=None, description="lower goes first")

    @field_validator("response_format")
    @classmethod
    def _is_alone(cls, value: ResponseFormat | None, info: ValidationInfo) -> ResponseFormat | None:
        if value is not None and value.type != "text" and info.data.get("structured_outputs") is not None:
            raise ValueError("cannot be beside structured_outputs; send one of the two")
        return value


class TemplateVariables(Strict):
    """Variables of the chat template, as other servers take them."""

    chat_template_kwargs: dict[str, Any] | None = Field(
        default=None, description="vLLM's spelling of quartet.thinker.chat_template_kwargs"
    )
    enable_thinking: bool | None = Field(default=None, description="short for this one of chat_template_kwargs")

    @property
    def template_variables(self) -> dict[str, Any]:
        """Raises ApiError: 400, one is the template itself."""
        thinking = {} if self.enable_thinking is None else {"enable_thinking": self.enable_thinking}
        return thinking | _variables("chat_template_kwargs", self.chat_template_kwargs)


def _variables(field: str, given: dict[str, Any] | None) -> dict[str, Any]:
    if given and "chat_template" in given:  # a program, and nothing limits the time it takes
        raise invalid(f"{field}.chat_template", "is no variable: the template is the model's own")
    return given or {}


class ChatCompletionRequest(
    BeamMembers,
    VideoFrameMembers,
    TemplateVariables,
    ChatMembers,
    ignoring(WriterSampling, *harmless.CHATS, empty=(*harmless.OF_LMDEPLOY, *harmless.OF_VLLM)),
):
    """A chat request: OpenAI's parameters, vLLM's further ones, and `quartet`."""

    model: ModelName = Field(default="", description="default: the one that answers")
    lora: str | None = Field(default=None, description="adapter of the model; it can be named as `model`, too")
    messages: Listed[Message] = Field(min_length=1)
    modalities: Listed[Literal["text", "audio", "image"]] | None = Field(
        default=None,
        description='["text"] or ["text", "audio"]; with "image" of a model that makes images, ["audio"] of a talker',
    )
    audio: AudioOptions | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, Field(ge=1, le=128)] | None = Field(default=None, description="answers, each with seed + index")
    max_tokens: Limit | None = Field(default=None, description="most tokens of the answer; -1: no limit")
    max_completion_tokens: Limit | None = Field(default=None, description="wins over max_tokens")
    logprobs: Annotated[bool | None, BeforeValidator(lambda value: value == "true" or value)] = None  # as vLLM takes it
    parallel_tool_calls: bool | None = Field(default=None, description="false: the answer has one call at most")
    tools: Listed[AnyTool] | None = Field(default=None, description="functions, and tools that hosted_tools has")
    tool_choice: (
        Annotated[ToolChoice, BeforeValidator(lambda value: {"type": value} if isinstance(value, str) else value)]
        | None
    ) = None
    quartet: QuartetOptions = Field(default_factory=QuartetOptions)
    mm_processor_kwargs: MmProcessorKwargs = Field(default_factory=MmProcessorKwargs)

    @property
    def speaks(self) -> bool:
        return "audio" in (self.modalities or ())

    @property
    def audio_format(self) -> AudioFormat:
        default: AudioFormat = "pcm16" if self.stream else "wav"
        return (self.audio and self.audio.format) or default

    @property
    def voice(self) -> str | None:
        return self.audio.voice if self.audio else None

    @property
    def use_audio_in_video(self) -> bool:
        return bool(self.quartet.thinker.use_audio_in_video or self.mm_processor_kwargs.use_audio_in_video)

    @property
    def template_variables(self) -> dict[str, Any]:
        """Those of `quartet` win over others. Raises ApiError: 400, one is the template itself."""
        own = self.quartet.thinker.chat_template_kwargs
        return super().template_variables | _variables("quartet.thinker.chat_template_kwargs", own)

    @property
    def answer_role(self) -> str:
        """Of the answer's message: the last message's if no answer begins after that."""
        return "assistant" if self.asks else self.messages[-1].role

    @property
    def echoed(self) -> str:
        """The text before the answer's own."""
        last = self.messages[-1]
        if not self.echo or last.role != self.answer_role:
            return ""
        return "".join(part.text for part in last.content or () if isinstance(part, TextPart))

    def own_name(self, member: str) -> str:
        is_prompt = self.prompt_ids and member in ("messages", "prompt", "prompt.token_ids")
        return PROMPT_IDS if is_prompt else super().own_name(member)

    def _check_spoken(self) -> None:
        wanted = {name: getattr(self, name) for name in NOT_SPOKEN}
        for name, value in (wanted | {"add_generation_prompt": self.add_generation_prompt is False}).items():
            if value:
                raise invalid(name, "a spoken answer begins after the whole conversation; leave it out, or the audio")

    def check(self) -> None:
        """Raises ApiError: 400 naming the first parameter that contradicts another."""
        most = self.max_completion_tokens or self.max_tokens
        if self.speaks and self.stream and self.audio_format not in ("pcm16", "wav"):
            raise invalid("audio.format", "a stream has pcm16 or wav; leave it out, or set stream to false")
        if self.stream_options is not None and not self.stream:
            raise invalid("stream_options", "only with stream: true")
        self.check_end()
        self.check_beams(self.n or 1)
        if self.stream and self.prompt_logprobs is not None:
            raise invalid("prompt_logprobs", "a stream does not tell them; set stream to false")
        if self.prompt_ids:
            parts = [part for message in self.messages for part in message.content or ()]
            self.check_alone(self.speaks or bool(self.tools) or any(isinstance(part, MediaPart) for part in parts))
        if self.speaks:
            self._check_spoken()
        self.check_logprobs(bool(self.logprobs))
        if self.top_logprobs and not self.logprobs:
            raise invalid("top_logprobs", "only with logprobs: true")
        if self.min_tokens is not None and most is not None and self.min_tokens > most:
            raise invalid("min_tokens", f"{self.min_tokens} is more than the most tokens allowed, {most}")
        if self.tool_choice is not None and self.tool_choice.type not in ("none", "auto") and not self.tools:
            raise invalid("tool_choice", "only with tools")
        named = self.tool_choice and self.tool_choice.function
        if named and named.name not in {tool.function.name for tool in self.tools or () if isinstance(tool, Tool)}:
            raise invalid("tool_choice.function.name", f"{named.name!r} is not one of the tools")
        known = dict.fromkeys(("none", "auto", "required", "function", *(tool.type for tool in self.tools or ())))
        if self.tool_choice is not None and self.tool_choice.type not in known:
            raise invalid("tool_choice.type", f"{self.tool_choice.type[:64]!r} is none; use {', '.join(known)}")
