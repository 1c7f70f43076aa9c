"""Events of a tool that runs here."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gateway.errors import ApiError
from gateway.pipeline.kinds import Output


class ToolEvent:
    """How far a call is, or how it ended."""


class ToolProgress(ToolEvent):
    """A stage works on the call."""


@dataclass(frozen=True)
class ToolPreview(ToolEvent):
    """A preview of an image. `members`: of its event in a response."""

    members: dict[str, Any]


@dataclass(frozen=True)
class ToolResult(ToolEvent):
    """The result of a call.

    Attributes:
        members: of the call's item: a file is `result`, a text for the model `output`.
        output: what the client gets; None: nothing but the item.
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


def image_url(image_base64: str, file_format: str) -> str:
    """A data URL."""
    return f"data:image/{file_format};base64,{image_base64}"


def made_url(item: Mapping[str, Any]) -> str:
    """The image of a call's item as a data URL."""
    return image_url(item["result"], item.get("output_format") or "png")
