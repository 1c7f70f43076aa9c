"""Events of a tool that runs here."""

from dataclasses import dataclass
from typing import Any, ClassVar, TypeGuard

from gateway.errors import ApiError
from gateway.pipeline.kinds import Output


class ToolEvent:
    """Whatever a tool makes, or why it fails."""


@dataclass(frozen=True)
class ToolProgress(ToolEvent):
    """A stage works on the call."""


@dataclass(frozen=True)
class ToolImage(ToolEvent):
    """An image, or a preview of one.

    Attributes:
        facts: its format and size in OpenAI's names; they may differ from the request's.
        preview: number of the preview; None: the image itself.
    """

    image_base64: str
    facts: dict[str, str]
    preview: int | None = None
    output: ClassVar[Output] = "image"

    @property
    def members(self) -> dict[str, Any]:
        """Of the call's item."""
        return {"result": self.image_base64, **self.facts}

    @property
    def url(self) -> str:
        return image_url(self.image_base64, self.facts["output_format"])


@dataclass(frozen=True)
class ToolResult(ToolEvent):
    """The result of a tool that makes no image.

    Attributes:
        members: of the call's item; `output` is a text for the model.
        output: what the client gets of it; None: nothing but the item.
    """

    members: dict[str, Any]
    output: Output | None = None


@dataclass(frozen=True)
class ToolFailure(ToolEvent):
    """`output`: what the client does not get."""

    error: ApiError
    output: Output | None

    @property
    def members(self) -> dict[str, Any]:
        """Of the call's item."""
        return {"error": {"type": self.error.kind, "code": self.error.code, "message": self.error.message}}


ToolEnd = ToolImage | ToolResult | ToolFailure


def image_url(image_base64: str, file_format: str) -> str:
    """A data URL."""
    return f"data:image/{file_format};base64,{image_base64}"


def is_last(event: ToolEvent) -> TypeGuard[ToolEnd]:
    """Whether the event ends its call."""
    return isinstance(event, ToolEnd) and not (isinstance(event, ToolImage) and event.preview is not None)
