"""What happens while tools run here, beside the pipeline's own events."""

from dataclasses import dataclass
from typing import Any

from gateway.errors import ApiError
from quartet.v1 import thinker_pb2


@dataclass(frozen=True)
class NextTurn:
    """The thinker goes on, having read what a tool made. `tokens`: of the prompt it read for that, by kind."""

    tokens: thinker_pb2.PromptInfo


@dataclass(frozen=True)
class Generating:
    """A stage works on the picture."""


@dataclass(frozen=True)
class Painted:
    """A picture, or a preview of one.

    Attributes:
        image_base64: the file.
        facts: what it is, in OpenAI's names, which is not always what was asked for.
        preview: its number among the previews; None: the picture itself.
    """

    image_base64: str
    facts: dict[str, str]
    preview: int | None = None

    @property
    def url(self) -> str:
        """The file as a data URL."""
        return picture_url(self.image_base64, self.facts["output_format"])


@dataclass(frozen=True)
class Made:
    """What another tool made: `members` of its item."""

    members: dict[str, Any]


@dataclass(frozen=True)
class Failed:
    """It cannot be made."""

    error: ApiError


PaintEvent = Generating | Painted | Failed
MakeEvent = Generating | Made | Failed


def picture_url(image_base64: str, file_format: str) -> str:
    """A picture as a data URL."""
    return f"data:image/{file_format};base64,{image_base64}"
