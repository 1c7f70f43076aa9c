"""Content blocks of a request."""

from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from gateway.validation import Lenient, Listed, Strict, ignoring

_Block = ignoring(Strict, "cache_control")


def _as_blocks(content: Any) -> Any:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


class TextBlock(ignoring(_Block, "citations", "parsed_output")):
    type: Literal["text"]
    text: str


Texts = Annotated[Listed[TextBlock], BeforeValidator(_as_blocks)]


class Base64Source(Strict):
    type: Literal["base64"]
    media_type: str = Field(description="how the file is read, its data say")
    data: str = Field(min_length=1)


class UrlSource(Strict):
    type: Literal["url"]
    url: str = Field(min_length=1)


class FileSource(Strict):
    """Of an uploaded file; there are none here."""

    type: Literal["file"]
    file_id: str


class ImageBlock(_Block):
    type: Literal["image"]
    source: Annotated[Base64Source | UrlSource | FileSource, Field(discriminator="type")]


class TextSource(Strict):
    type: Literal["text"]
    media_type: Literal["text/plain"] = "text/plain"
    data: str


class ContentSource(Strict):
    type: Literal["content"]
    content: Annotated[
        Listed[Annotated[TextBlock | ImageBlock, Field(discriminator="type")]], BeforeValidator(_as_blocks)
    ]


class Citations(Strict):
    """Whether the answer cites a document. Answers here cite nothing."""

    enabled: bool | None = None

    @model_validator(mode="after")
    def _are_off(self) -> Self:
        if self.enabled:
            raise ValueError("answers here cite nothing; leave citations out")
        return self


class DocumentBlock(_Block):
    type: Literal["document"]
    source: Annotated[TextSource | ContentSource | Base64Source | UrlSource | FileSource, Field(discriminator="type")]
    title: str | None = None
    context: str | None = None
    citations: Citations | None = None


class SearchResultBlock(_Block):
    type: Literal["search_result"]
    source: str
    title: str
    content: Texts
    citations: Citations | None = None


Shown = TextBlock | ImageBlock | DocumentBlock | SearchResultBlock
ShownBlocks = Annotated[Listed[Annotated[Shown, Field(discriminator="type")]], BeforeValidator(_as_blocks)]


class ToolResultBlock(ignoring(_Block, "toolset_name")):
    """The result of a call, for the model."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: ShownBlocks | None = None
    is_error: bool | None = None


class ThinkingBlock(_Block):
    type: Literal["thinking"]
    thinking: str
    signature: str = ""


class ToolUseBlock(ignoring(_Block, "caller", "toolset_name")):
    """An earlier call of the model."""

    type: Literal["tool_use"]
    id: str = Field(min_length=1)
    name: str = Field(min_length=1)
    input: dict[str, Any]


class ForeignBlock(Lenient):
    """Of an answer by another server, whose tools ran there, or whose thought nobody here can read."""

    type: Literal[
        "redacted_thinking",
        "server_tool_use",
        "web_search_tool_result",
        "web_fetch_tool_result",
        "code_execution_tool_result",
        "bash_code_execution_tool_result",
        "text_editor_code_execution_tool_result",
        "tool_search_tool_result",
        "mcp_tool_use",
        "mcp_tool_result",
    ]


UserBlock = Shown | ToolResultBlock
AssistantBlock = TextBlock | ThinkingBlock | ToolUseBlock | ForeignBlock


class SystemTurn(Strict):
    role: Literal["system"]
    content: Texts = Field(min_length=1)


class UserTurn(Strict):
    role: Literal["user"]
    content: Annotated[Listed[Annotated[UserBlock, Field(discriminator="type")]], BeforeValidator(_as_blocks)] = Field(
        min_length=1
    )


# What stands beside the content of an answer that was sent.
_OF_ANSWERS = ("id", "type", "model", "stop_reason", "stop_sequence", "stop_details", "usage", "container")


class AssistantTurn(ignoring(Strict, *_OF_ANSWERS)):
    """An earlier answer, as it was sent or its content alone."""

    role: Literal["assistant"]
    content: Annotated[Listed[Annotated[AssistantBlock, Field(discriminator="type")]], BeforeValidator(_as_blocks)]


Message = Annotated[SystemTurn | UserTurn | AssistantTurn, Field(discriminator="role")]
