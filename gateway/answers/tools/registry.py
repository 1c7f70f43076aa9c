"""The tools that run here: a tool is one class and one entry of TOOLS."""

from collections.abc import AsyncGenerator
from typing import ClassVar, Protocol

from pydantic import BaseModel

from gateway.answers.gateway import Gateway
from gateway.answers.request import Tool
from gateway.answers.tools.calls import HostedCall
from gateway.answers.tools.events import ToolEvent
from gateway.answers.tools.image import ImageGenerator
from gateway.answers.tools.makers import SoundGenerator, VideoGenerator
from gateway.pipeline.kinds import Output


class HostedTool(Protocol):
    """A tool with a request's settings.

    Attributes:
        name: type of the tool in requests, and name of the function that the model sees.
        output: the pipeline output that the tool needs.
        schema: the settings.
        done: the result as the model reads it.
        failed: what the model reads before the reason of a failure.
    """

    name: ClassVar[str]
    output: ClassVar[Output]
    schema: ClassVar[type[BaseModel]]
    done: ClassVar[str]
    failed: ClassVar[str]

    def function(self) -> Tool:
        """The tool as the model sees it."""
        ...

    def check(self, gateway: Gateway, place: str) -> None:
        """Raises ApiError: 400, a setting below `place` cannot be followed by the model here."""
        ...

    def events(self, gateway: Gateway, call: HostedCall) -> AsyncGenerator[ToolEvent, None]:
        """Runs a call; its last event is the result. Raises ApiError: the call failed."""
        ...


TOOLS = {tool.name: tool for tool in (ImageGenerator, VideoGenerator, SoundGenerator)}


def available(gateway: Gateway) -> set[str]:
    """Names of the tools whose output the pipeline has."""
    return {name for name, tool in TOOLS.items() if gateway.pipeline.output(tool.output) is not None}
