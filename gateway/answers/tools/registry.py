"""The tools that run in the gateway.

Responses offer all whose output the pipeline makes; of these, chats and realtime sessions offer those that the setting
`hosted_tools` names.
"""

from collections.abc import Container
from typing import Any

from gateway.answers.gateway import Gateway
from gateway.answers.tools.calls import HostedTool
from gateway.answers.tools.generators import ImageGenerator, SoundGenerator, VideoGenerator
from gateway.errors import invalid
from gateway.validation import within

TOOLS: dict[str, type[HostedTool]] = {tool.name: tool for tool in (ImageGenerator, VideoGenerator, SoundGenerator)}


def available(gateway: Gateway) -> set[str]:
    """Names of the tools that Responses offer."""
    return {name for name, tool in TOOLS.items() if tool.output is None or gateway.pipeline.output(tool.output)}


def offered(gateway: Gateway) -> set[str]:
    """Names of the tools that chats and realtime sessions offer."""
    return available(gateway).intersection(gateway.settings.hosted_tools)


def tool_of(item_type: str) -> type[HostedTool] | None:
    """The tool whose calls are items of that type, e.g. "image_generation_call"."""
    return TOOLS.get(item_type.removesuffix("_call")) if item_type.endswith("_call") else None


def read_tool(members: dict[str, Any], place: str, known: Container[str] = ()) -> HostedTool:
    """The tool that a request has at `place`. Raises ApiError: 400 naming a setting, or it is one of those `known`."""
    tool = TOOLS[members["type"]]
    if tool.name in known:
        raise invalid(place, f"{tool.name} is there twice; leave one out")
    return tool(within(tool.schema, members, place))
