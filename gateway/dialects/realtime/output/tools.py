"""Tools that run here in realtime sessions: their settings, and the items of their calls."""

from collections.abc import Sequence

import pybase64

from gateway.answers.gateway import Gateway
from gateway.answers.tools.calls import HostedTool
from gateway.answers.tools.events import ToolEvent, ToolFailure, ToolPreview, ToolProgress, ToolResult, made_url
from gateway.answers.tools.registry import read_tool, tool_of
from gateway.dialects.realtime.conversation.items import Item, new_item
from gateway.dialects.realtime.events import RealtimeError, wrong
from gateway.dialects.realtime.output.response_item import ResponseItem
from gateway.dialects.realtime.output.server_events import ServerEvent
from gateway.dialects.realtime.settings.session import Session
from gateway.errors import ApiError


def hosted_tools(session: Session, within: str = "session") -> list[tuple[str, HostedTool]]:
    """(path, tool) of each of the session's tools that run here.

    Args:
        within: path of the session's settings.

    Raises:
        ApiError: a member is wrong.
    """
    given = [(f"{within}.tools[{i}]", tool) for i, tool in enumerate(session.all_tools)]
    hosted: dict[str, tuple[str, HostedTool]] = {}
    for place, tool in given:
        if tool.type in session.hosted_tools:
            hosted[tool.type] = place, read_tool(tool.model_dump(), place, hosted)
    for place, tool in given:
        if tool.type == "function" and tool.name in hosted:
            raise wrong(f"{place}.name", f"{tool.name!r} is the name of a tool that runs here; take another")
    return list(hosted.values())


def check_tools(gateway: Gateway, session: Session, within: str = "session") -> None:
    """Raises RealtimeError: a member of a tool that runs here is wrong, or the model here cannot follow it."""
    try:
        for place, tool in hosted_tools(session, within):
            tool.check(gateway, place)
    except ApiError as error:
        raise RealtimeError("invalid_value", error.message, error.param) from None


def last_image(items: Sequence[Item]) -> str | None:
    """URL of the conversation's last image, made here or sent by the user."""
    for item in reversed(items):
        if tool_of(item.kind) is not None and item.images:
            return made_url(item.members | {"result": pybase64.b64encode_as_string(item.images[0])})
        if item.role == "user" and item.images:
            return item.content[max(item.images)]["image_url"]
    return None


class ToolOutput(ResponseItem):
    """A call of a tool that runs here. A file is in one event only; the conversation keeps an image for the model."""

    def __init__(self, response_id: str, index: int, name: str, members: dict[str, str]) -> None:
        self._kind = f"{name}_call"  # OpenAI's realtime API has no such items
        super().__init__(response_id, index, new_item(self._kind, "in_progress", **members))

    def open(self) -> list[ServerEvent]:
        return [*super().open(), self._event(f"{self._kind}.in_progress")]

    def take(self, event: ToolEvent) -> list[ServerEvent]:
        match event:
            case ToolProgress():
                return [self._event(f"{self._kind}.generating")]
            case ToolPreview(members):
                return [self._event(f"{self._kind}.partial_image", **members)]
            case ToolResult(members):
                self.item.members |= {name: value for name, value in members.items() if name != "result"}
                if event.output == "image":
                    self.item.images[0] = pybase64.b64decode(members["result"])
                if self.conversation is not None:
                    self.conversation.has_grown(self.item)
                return [self._event(f"{self._kind}.completed", **members), *self.close("completed")]
            case ToolFailure():
                self.item.members |= event.members
                return self.close("incomplete")
            case _:
                return []
