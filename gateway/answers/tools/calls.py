"""What the model sees of the tools that run here, and their calls."""

import json
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from pydantic import BaseModel

from gateway.access.api_key import ApiKey
from gateway.answers.gateway import Gateway
from gateway.answers.meter import Meter
from gateway.answers.request import FunctionTool, Tool
from gateway.answers.tools.events import ToolEvent
from gateway.pipeline.kinds import Output
from gateway.validation import Strict

MAX_CALLS = 8  # of tools that run here, for one request, unless it says otherwise


@dataclass(frozen=True)
class Rules:
    """How tools run in one answer.

    Attributes:
        max_calls: of tools that run here, over all turns.
        previews: whether the client wants previews of images.
        key: owns results, and holds a place for a job that outlives the request; None where there are no keys.
    """

    max_calls: int = MAX_CALLS
    previews: bool = False
    key: ApiKey | None = None


@dataclass(frozen=True)
class HostedCall:
    """A call of a tool that runs here.

    Attributes:
        arguments: a JSON object.
        last_image: URL of the conversation's last image, which an edit or a video begins with.
        meter: the request's, with an id of the call's own.
    """

    arguments: str
    last_image: str | None
    meter: Meter
    rules: Rules

    def read(self) -> dict[str, Any]:
        return json.loads(self.arguments)


def json_object(text: str) -> str:
    """`text`, or an empty object if it is no JSON object: a model may write anything, and the next prompt has it."""
    try:
        return text if isinstance(json.loads(text), dict) else "{}"
    except (ValueError, RecursionError):
        return "{}"


class NoSettings(Strict):
    type: str


@dataclass(frozen=True)
class HostedTool(ABC):
    """A tool that runs here, with a request's settings.

    Attributes:
        name: its type in requests, and the function that the model sees. Items of its calls are of type `<name>_call`.
        output: the pipeline output that it needs and the client gets; None: its result is a text for the model.
        schema: of the settings.
        done: the result as the model reads it, where that is no text of the call's own.
        failed: what the model reads before the reason of a failure.
    """

    settings: BaseModel
    name: ClassVar[str]
    description: ClassVar[str]
    output: ClassVar[Output | None] = None
    schema: ClassVar[type[BaseModel]] = NoSettings
    done: ClassVar[str] = ""
    failed: ClassVar[str] = "The call failed: "

    def function(self) -> Tool:
        """The tool as the model sees it."""
        described = FunctionTool(name=self.name, description=self.description, parameters=self.parameters())
        return Tool(type="function", function=described)

    @abstractmethod
    def parameters(self) -> dict[str, Any]:
        """JSON schema of the function's arguments."""

    @abstractmethod
    def events(self, gateway: Gateway, call: HostedCall) -> AsyncGenerator[ToolEvent, None]:
        """Runs a call; its last event is the result. Closing the generator ends the work. Raises ApiError."""

    def check(self, gateway: Gateway, place: str) -> None:  # noqa: B027  # a tool without a stage has nothing to check
        """Raises ApiError: 400 naming a setting, below `place`, that cannot be followed here."""

    @classmethod
    def arguments(cls, item: Mapping[str, Any]) -> str:
        """The arguments of a call, of its item."""
        return json_object(item.get("arguments") or "")

    @classmethod
    def result(cls, item: Mapping[str, Any], is_made: bool, reason: str = "") -> str:
        """The result of a call as the model reads it, of its item. `reason`: of a failure whose item has none."""
        if is_made:
            return cls.done or item.get("output") or ""
        error = item.get("error")
        return f"{cls.failed}{error.get('message') if isinstance(error, dict) else reason}"
