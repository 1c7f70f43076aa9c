"""image_generation in realtime sessions: the tool's settings, and the items of pictures."""

from collections.abc import Sequence

import pybase64

from gateway.answers.gateway import Gateway
from gateway.answers.tools.events import ToolEvent, ToolFailure, ToolImage, ToolProgress, image_url
from gateway.answers.tools.registry import ImageGenerator
from gateway.answers.tools.schema import IMAGE_TOOL, ImageTool
from gateway.dialects.realtime.conversation.items import Item
from gateway.dialects.realtime.events import RealtimeError, new_id
from gateway.dialects.realtime.output.response_item import ResponseItem
from gateway.dialects.realtime.output.server_events import ServerEvent
from gateway.dialects.realtime.settings.session import Session
from gateway.errors import ApiError
from gateway.validation import validated

PICTURE = "image_generation_call"  # a kind of item; OpenAI's realtime API has none


def image_tool(session: Session, within: str = "session") -> ImageTool | None:
    """The settings of the session's tool; None: it has none, or this server does not run it, and it is not used.

    Raises:
        RealtimeError: it cannot be so, naming its member, which is in `within`.
    """
    if not session.draws:
        return None
    found = [(i, tool) for i, tool in enumerate(session.all_tools) if tool.type == IMAGE_TOOL]
    for i, tool in enumerate(session.all_tools):
        place = f"{within}.tools[{i}]"
        if tool.type == "function" and tool.name == IMAGE_TOOL and found:
            message = f"{place}.name: {IMAGE_TOOL!r} is the name of a tool that runs here; take another"
            raise RealtimeError("invalid_value", message, f"{place}.name")
    if len(found) > 1:
        place = f"{within}.tools[{found[1][0]}]"
        raise RealtimeError("invalid_value", f"{place}: {IMAGE_TOOL} is there twice; leave one out", place)
    if not found:
        return None
    index, given = found[0]
    place = f"{within}.tools[{index}]"
    try:
        return validated(ImageTool, given.model_dump())
    except ApiError as error:
        raise RealtimeError("invalid_value", f"{place}.{error.message}", f"{place}.{error.param}") from None


def check_tool(gateway: Gateway, session: Session, within: str = "session") -> None:
    """Refuses a tool that the model here cannot follow, where it is known. Raises RealtimeError: naming its member."""
    if (tool := image_tool(session, within)) is None:
        return
    index = next(i for i, each in enumerate(session.all_tools) if each.type == IMAGE_TOOL)
    try:
        ImageGenerator(tool).check(gateway, f"{within}.tools[{index}]")
    except ApiError as error:
        raise RealtimeError("invalid_value", error.message, error.param) from None


def may_draw(gateway: Gateway) -> bool:
    """Whether image_generation runs in sessions here."""
    return IMAGE_TOOL in gateway.settings.hosted_tools and gateway.pipeline.config.outputs.image is not None


def last_picture(items: Sequence[Item]) -> str | None:
    """URL of the conversation's last picture, made here or sent by the user; None if there is none."""
    for item in reversed(items):
        if item.kind == PICTURE and item.images:
            return image_url(pybase64.b64encode_as_string(item.images[0]), item.members["output_format"])
        if item.role == "user" and item.images:
            return item.content[max(item.images)]["image_url"]
    return None


class PictureOutput(ResponseItem):
    """A picture. Its file is told once, as sound is; the conversation keeps it for the model."""

    def __init__(self, response_id: str, index: int) -> None:
        head = {"id": new_id("item"), "object": "realtime.item", "type": PICTURE, "status": "in_progress"}
        super().__init__(response_id, index, Item(head))
        self._is_closed = False

    def open(self) -> list[ServerEvent]:
        """It is asked for."""
        return [*super().open(), self._event(f"{PICTURE}.in_progress")]

    def take(self, event: ToolEvent) -> list[ServerEvent]:
        """What is to be told of how far it is."""
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

    def close(self, status: str) -> list[ServerEvent]:
        """It is there, or cannot be made; nothing, if that was told before."""
        if self._is_closed:
            return []
        self._is_closed = True
        return super().close(status)
