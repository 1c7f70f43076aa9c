"""What the model sees of the tools that run here, and their calls."""

import json
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from pydantic import BaseModel

from gateway.answers.gateway import Gateway
from gateway.answers.meter import Meter
from gateway.answers.request import FunctionTool, Tool
from gateway.answers.tools.events import ToolEvent
from gateway.errors import in_own_terms, invalid
from gateway.pipeline.kinds import Output
from gateway.pipeline.stage import Stage

_MAX_PROMPT_CHARACTERS = 1000  # that a model is to write: text encoders read some hundred tokens


MAX_CALLS = 8  # of tools that run here, for one request, unless it says otherwise


def hold_nothing() -> Callable[[], None]:
    """For a server without API keys."""
    return lambda: None


@dataclass(frozen=True)
class Rules:
    """How tools run in one answer.

    Attributes:
        max_calls: of tools that run here, over all turns.
        previews: whether the client wants previews of images.
        owner: name of the API key that owns results.
        hold: takes a place of the API key's for a job that outlives the request; returns what gives it back.
    """

    max_calls: int = MAX_CALLS
    previews: bool = False
    owner: str | None = None
    hold: Callable[[], Callable[[], None]] = hold_nothing


@dataclass(frozen=True)
class HostedCall:
    """A call of a tool that runs here.

    Attributes:
        arguments: JSON as the model wrote it.
        last_image: URL of the conversation's last image, which an edit or a video begins with.
        meter: the request's, with an id of the call's own.
    """

    arguments: str
    last_image: str | None
    meter: Meter
    rules: Rules

    def read(self) -> tuple[str, dict[str, Any]]:
        """(prompt, all arguments). Raises ApiError: the model wrote something else."""
        try:
            arguments = json.loads(self.arguments)
        except (ValueError, RecursionError):
            arguments = None
        if not isinstance(arguments, dict):
            arguments = {}
        prompt = arguments.get("prompt")
        if not isinstance(prompt, str) or not prompt.strip():
            raise invalid("prompt", "the call has none")
        return prompt, arguments


class HostedTool(ABC):
    """A tool that runs here, with a request's settings.

    Attributes:
        name: its type in requests, and the function that the model sees.
        prompt: describes its argument `prompt`.
        output: the pipeline output that it needs.
        schema: of the settings.
        choice: the setting at fault where the stage's model does not make what it asks for.
        done: the result as the model reads it.
        failed: what the model reads before the reason of a failure.
    """

    name: ClassVar[str]
    description: ClassVar[str]
    prompt: ClassVar[str]
    output: ClassVar[Output]
    schema: ClassVar[type[BaseModel]]
    choice: ClassVar[str]
    done: ClassVar[str]
    failed: ClassVar[str]

    def function(self) -> Tool:
        """The tool as the model sees it."""
        prompt = {"type": "string", "maxLength": _MAX_PROMPT_CHARACTERS, "description": self.prompt}
        arguments = {"prompt": prompt, **self.more_arguments()}
        schema = {
            "type": "object",
            "properties": arguments,
            "required": list(arguments),
            "additionalProperties": False,
        }
        described = FunctionTool(name=self.name, description=self.description, parameters=schema)
        return Tool(type="function", function=described)

    def more_arguments(self) -> dict[str, dict[str, Any]]:
        """Schemas of the arguments beside `prompt`."""
        return {}

    def check(self, gateway: Gateway, place: str) -> None:
        """Raises ApiError: 400 naming a setting, below `place`, that a serving model cannot follow."""
        stage = gateway.pipeline.output(self.output)
        if stage is not None and stage.serving and stage.info is not None:
            with in_own_terms(lambda member: f"{place}.{self.choice if member == 'model' else member}"):
                self.check_with(stage)

    @abstractmethod
    def check_with(self, stage: Stage) -> None:
        """Raises ApiError: 400 naming a member of a request to the serving `stage`."""

    @abstractmethod
    def events(self, gateway: Gateway, call: HostedCall) -> AsyncGenerator[ToolEvent, None]:
        """Runs a call; its last event is the result. Closing the generator ends the work. Raises ApiError."""


def arguments_of(prompt: str) -> str:
    """The arguments of a call that was made."""
    return json.dumps({"prompt": prompt}, ensure_ascii=False)
