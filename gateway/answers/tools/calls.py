"""Calls of the tools that run here: the functions that the model sees, and the arguments that it wrote."""

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from gateway.answers.gateway import Gateway
from gateway.answers.meter import Meter
from gateway.answers.request import FunctionTool, Tool
from gateway.errors import ApiError, invalid
from gateway.pipeline.kinds import Output
from gateway.pipeline.stage import Stage

_MAX_PROMPT_CHARACTERS = 1000  # that a model is to write: text encoders read some hundred tokens


MAX_CALLS = 8  # of tools that run here, for one request, unless it says otherwise


def hold_nothing() -> Callable[[], None]:
    """A hold where there are no API keys."""
    return lambda: None


@dataclass(frozen=True)
class Rules:
    """How tools run in one answer.

    Attributes:
        max_calls: of tools that run here, over all turns.
        previews: whether the client wants previews of images.
        owner: name of the API key that owns results; None where there are no keys.
        hold: takes a place of the API key's for a job that goes on when the request has ended; returns the function
            that gives the place back.
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
        last_image: URL of the conversation's last image, which an edit or a video begins with; None: there is none.
        request_id: names the call in the stage.
        meter: of the whole request.
        rules: of the whole answer.
    """

    arguments: str
    last_image: str | None
    request_id: str
    meter: Meter
    rules: Rules


def serving_stage(gateway: Gateway, output: Output) -> Stage | None:
    """The stage that makes `output`, if it serves."""
    stage = gateway.pipeline.output(output)
    return None if stage is None or not stage.serving or stage.info is None else stage


def function(name: str, description: str, prompt: str, **more: dict[str, Any]) -> Tool:
    """A tool as the model knows it: a function.

    Args:
        name: of the tool.
        description: what it does, and when it is to be called.
        prompt: what its argument `prompt` says.
        more: schemas of its other arguments.
    """
    prompt_schema = {"type": "string", "maxLength": _MAX_PROMPT_CHARACTERS, "description": prompt}
    parameters = {"prompt": prompt_schema, **more}
    schema = {
        "type": "object",
        "properties": parameters,
        "required": list(parameters),
        "additionalProperties": False,
    }
    return Tool(type="function", function=FunctionTool(name=name, description=description, parameters=schema))


def arguments_of(prompt: str) -> str:
    """The arguments of a call, as a conversation has those of one that was made."""
    return json.dumps({"prompt": prompt}, ensure_ascii=False)


def read(written: str) -> tuple[str, dict[str, Any]]:
    """(prompt, all arguments) of a call, as the model wrote them. Raises ApiError: it wrote something else."""
    try:
        arguments = json.loads(written)
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        arguments = {}
    prompt = arguments.get("prompt")
    if not isinstance(prompt, str) or not prompt.strip():
        raise invalid("prompt", "the call has none")
    return prompt, arguments


@contextmanager
def settings_at(place: str, names: Mapping[str, str]) -> Iterator[None]:
    """Gives refusals of a tool's settings their place in the request; `names` are members that are called otherwise
    there. Raises ApiError."""
    try:
        yield
    except ApiError as error:
        param = error.param or ""
        error.rename(f"{place}.{names.get(param, error.param)}")
        raise
