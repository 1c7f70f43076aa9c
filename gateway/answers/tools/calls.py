"""Calls of the tools that run here: how the model is told of a tool, and how what it wrote is read."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from gateway.answers.request import FunctionTool, Tool
from gateway.errors import ApiError, invalid

_MAX_PROMPT_CHARACTERS = 1000  # that a model is to write: text encoders read some hundred tokens


def function(name: str, description: str, prompt: str, **more: dict[str, Any]) -> Tool:
    """A tool as the model knows it: a function.

    Args:
        name: of the tool.
        description: what it does, and when it is to be called.
        prompt: what its argument `prompt` says.
        more: schemas of its other arguments.
    """
    asked = {"type": "string", "maxLength": _MAX_PROMPT_CHARACTERS, "description": prompt}
    parameters = {"prompt": asked, **more}
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
        own = f"{place}.{names.get(param, error.param)}"
        error.message, error.param = own + error.message.removeprefix(param), own
        raise
