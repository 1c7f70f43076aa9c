"""image_generation in realtime sessions: the tool's settings, and the items of pictures."""

from collections.abc import Sequence

import pybase64

from gateway.answers.gateway import Gateway
from gateway.answers.tools.events import ToolEvent, ToolFailure, ToolImage, ToolProgress, image_url
from gateway.answers.tools.registry import ImageGenerator
from gateway.answers.tools.schema import IMAGE_TOOL, ImageTool
from gateway.dialects.realtime.conversation.items import Item, new_item
from gateway.dialects.realtime.events import RealtimeError, wrong
from gateway.dialects.realtime.output.response_item import ResponseItem
from gateway.dialects.realtime.output.server_events import ServerEvent
from gateway.dialects.realtime.settings.session import Session
from gateway.errors import ApiError
from gateway.validation import validated

PICTURE = "image_generation_call"  # a kind of item; OpenAI's realtime API has none


def image_tool(session: Session, within: str = "session") -> tuple[str, ImageGenerator | None]:
    """(path, tool) of the session's image_generation; None: it has none, or this server does not run it.

    Args:
        within: path of the session's settings.

    Raises:
        RealtimeError: a member is wrong.
    """
    tools = [(f"{within}.tools[{i}]", tool) for i, tool in enumerate(session.all_tools)]
    found = [(place, tool) for place, tool in tools if tool.type == IMAGE_TOOL]
    if not found or not session.draws:
        return "", None
    for place, tool in tools:
        if tool.type == "function" and tool.name == IMAGE_TOOL:
            raise wrong(f"{place}.name", f"{IMAGE_TOOL!r} is the name of a tool that runs here; take another")
    if len(found) > 1:
        place, _ = found[1]
        raise wrong(place, f"{IMAGE_TOOL} is there twice; leave one out")
    place, given = found[0]
    try:
        return place, ImageGenerator(validated(ImageTool, given.model_dump()))
    except ApiError as error:
        raise RealtimeError("invalid_value", f"{place}.{error.message}", f"{place}.{error.param}") from None


def check_tool(gateway: Gateway, session: Session, within: str = "session") -> None:
    """Raises RealtimeError: a member of image_generation is wrong, or the model here cannot follow it."""
    place, tool = image_tool(session, within)
    try:
        if tool is not None:
            tool.check(gateway, place)
    except ApiError as error:
        raise RealtimeError("invalid_value", error.message, error.param) from None


def last_picture(items: Sequence[Item]) -> str | None:
    """URL of the conversation's last picture, made here or sent by the user."""
    for item in reversed(items):
        if item.kind == PICTURE and item.images:
            return image_url(pybase64.b64encode_as_string(item.images[0]), item.members["output_format"])
        if item.role == "user" and item.images:
            return item.content[max(item.images)]["image_url"]
    return None


class PictureOutput(ResponseItem):
    """A picture. Its file is in one event only; the conversation keeps it for the model."""

    def __init__(self, response_id: str, index: int) -> None:
        super().__init__(response_id, index, new_item(PICTURE, "in_progress"))

    def open(self) -> list[ServerEvent]:
        return [*super().open(), self._event(f"{PICTURE}.in_progress")]

    def take(self, event: ToolEvent) -> list[ServerEvent]:
        match event:
            case ToolProgress():
                return [self._event(f"{PICTURE}.generating")]
            case ToolImage(image_base64, facts, None):
                self.item.members |= facts
                self.item.images[0] = pybase64.b64decode(image_base64)
                if self.conversation is not None:
                    self.conversation.has_grown(self.item)
                made = self._event(f"{PICTURE}.completed", result=image_base64, **facts)
                return [made, *self.close("completed")]
            case ToolImage(image_base64, facts, preview):
                members = {"partial_image_index": preview, "partial_image_b64": image_base64, **facts}
                return [self._event(f"{PICTURE}.partial_image", **members)]
            case ToolFailure(error):
                self.item.members["error"] = {"type": error.kind, "code": error.code, "message": error.message}
                return self.close("incomplete")
            case _:
                return []
