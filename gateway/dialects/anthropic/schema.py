"""Bodies of `POST /v1/messages` and `/v1/messages/count_tokens`."""

import re
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Discriminator, Field, Tag, field_validator, model_validator

from gateway.answers.request import StopStrings, ThinkerOptions
from gateway.dialects.anthropic.blocks import Message, Texts
from gateway.pipeline.sampling import ThinkerSampling
from gateway.validation import Lenient, Listed, Positive, Strict, ignoring

_NO_SERVERS = "this server calls no others; give their tools as tools, and run them in the client"
_DATED = re.compile(r"_\d{8}$")
# Members that change no answer here.
_OF_TOOLS = ("strict", "cache_control", "input_examples", "defer_loading", "allowed_callers", "eager_input_streaming")
_OF_REQUESTS = (
    *("cache_control", "container", "context_management", "diagnostics", "inference_geo", "metadata"),
    *("service_tier", "speed"),
)


class OwnTool(ignoring(Strict, *_OF_TOOLS)):
    """A function that the client runs."""

    type: Literal["custom"] | None = None
    name: str = Field(min_length=1, max_length=128)
    description: str | None = None
    input_schema: dict[str, Any]


class AnthropicsTool(Lenient):
    """A tool that Anthropic's servers run, or whose schema Anthropic's models know. It is left out."""

    type: str

    @field_validator("type")
    @classmethod
    def _is_dated(cls, kind: str) -> str:
        if not _DATED.search(kind):
            raise ValueError("must be custom, or left out: a tool has a name and an input_schema")
        return kind


def _kind_of_tool(tool: Any) -> str:
    kind = tool.get("type") if isinstance(tool, dict) else getattr(tool, "type", None)
    return "own_tool" if kind in (None, "custom") else "anthropics_tool"


AnyTool = Annotated[
    Annotated[OwnTool, Tag("own_tool")] | Annotated[AnthropicsTool, Tag("anthropics_tool")],
    Discriminator(_kind_of_tool),
]


class CallChoice(Strict):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = Field(default=None, description="of the tool, with type tool")
    disable_parallel_tool_use: bool | None = Field(default=None, description="true: the answer has one call at most")

    @model_validator(mode="after")
    def _tool_is_named(self) -> Self:
        if (self.type == "tool") != (self.name is not None):
            raise ValueError('must have a name if its type is "tool", and only then')
        return self


class Thinking(ignoring(Strict, "budget_tokens")):
    """Whether the answer shows what the model thought."""

    type: Literal["enabled", "adaptive", "between_tools", "disabled"]
    display: Literal["summarized", "omitted"] | None = Field(
        default=None, description="omitted: the block has a signature only, which has the thought"
    )


class JsonFormat(Strict):
    type: Literal["json_schema"]
    json_schema: dict[str, Any] = Field(alias="schema")


class OutputConfig(ignoring(Strict, "effort")):
    format: JsonFormat | None = Field(default=None, description="the answer always follows the schema")


def _refuse_servers(servers: list[Any]) -> list[Any]:
    if servers:
        raise ValueError(_NO_SERVERS)
    return servers


class Options(Strict):
    thinker: ThinkerOptions = Field(default_factory=ThinkerOptions)


class MessagesRequest(ignoring(ThinkerSampling, *_OF_REQUESTS)):
    """Anthropic's parameters, vLLM's further sampling parameters, and `quartet.thinker`."""

    model: str = Field(description="a name from /v1/models; a name of Anthropic's means the model that writes")
    max_tokens: Positive = Field(description="most tokens of the answer")  # pyright: ignore[reportIncompatibleVariableOverride]
    messages: Listed[Message] = Field(min_length=1)
    system: Texts | None = Field(default=None, description="a text, or text blocks")
    stop_sequences: StopStrings | None = Field(default=None, description="end the answer")
    stream: bool | None = None
    thinking: Thinking | None = Field(default=None, description="whether thinking blocks are sent; default: no")
    tools: Listed[AnyTool] | None = Field(default=None, description="functions; Anthropic's own tools are left out")
    tool_choice: CallChoice | None = None
    output_config: OutputConfig | None = None
    output_format: JsonFormat | None = Field(default=None, description="older name of output_config.format")
    quartet: Options = Field(default_factory=Options)
    mcp_servers: Annotated[Listed[Any], AfterValidator(_refuse_servers)] | None = Field(
        default=None, description=f"refused: {_NO_SERVERS}"
    )

    @property
    def shows_thoughts(self) -> bool:
        return self.thinking is not None and self.thinking.type != "disabled"

    @property
    def omits_thoughts(self) -> bool:
        """Whether thoughts are in signatures only."""
        return self.thinking is not None and self.thinking.display == "omitted"

    @property
    def calls_at_once(self) -> int | None:
        """Most calls of the answer; None: any number."""
        return 1 if self.tool_choice is not None and self.tool_choice.disable_parallel_tool_use else None


class CountRequest(MessagesRequest):
    """A message whose prompt is counted. Members about the answer have no effect."""

    max_tokens: Positive | None = None  # pyright: ignore[reportIncompatibleVariableOverride]
