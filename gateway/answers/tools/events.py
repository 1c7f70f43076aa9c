"""Events of a tool that runs here."""

from dataclasses import dataclass
from typing import Any

from gateway.errors import ApiError


@dataclass(frozen=True)
class ToolProgress:
    """A stage works on the call."""


@dataclass(frozen=True)
class ToolImage:
    """An image, or a preview of one.

    Attributes:
        facts: its format and size in OpenAI's names; they may differ from the request's.
        preview: number of the preview; None: the image itself.
    """

    image_base64: str
    facts: dict[str, str]
    preview: int | None = None

    @property
    def url(self) -> str:
        return image_url(self.image_base64, self.facts["output_format"])


@dataclass(frozen=True)
class ToolResult:
    """The result of a tool that makes no image. `members`: of its item in a response."""

    members: dict[str, Any]


@dataclass(frozen=True)
class ToolFailure:
    error: ApiError


ToolEvent = ToolProgress | ToolImage | ToolResult | ToolFailure


def image_url(image_base64: str, file_format: str) -> str:
    """A data URL."""
    return f"data:image/{file_format};base64,{image_base64}"


def is_last(event: ToolEvent) -> bool:
    """Whether the event ends its call."""
    return isinstance(event, ToolResult | ToolFailure) or (isinstance(event, ToolImage) and event.preview is None)
