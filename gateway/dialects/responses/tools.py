"""The tools of a response: functions, and tools that run here. Others are left out."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic import Field

from gateway.answers.request import FunctionTool, NamedFunction, Tool, ToolChoice
from gateway.answers.tools.calls import HostedTool
from gateway.answers.tools.registry import TOOLS, read_tool
from gateway.errors import invalid
from gateway.validation import Lenient, Listed, within

_MODES = ("none", "auto", "required")


class Function(Lenient):
    name: str = Field(min_length=1, max_length=64)
    description: str | None = None
    parameters: dict[str, Any] | None = None


class Namespace(Lenient):
    name: str = Field(min_length=1, max_length=64)
    tools: Listed[dict[str, Any]] = Field(default=[])


class NamedTool(Lenient):
    type: str
    name: str | None = None


@dataclass
class Tools:
    """The tools of a request, each with its path in it, e.g. "tools[0]".

    Attributes:
        public: as in the response.
        functions: in chat's form.
        namespaces: (namespace, name in it) of those of a namespace, by the name that the model reads.
        hosted: tools that run here, by name.
        choice: None: the model decides.
    """

    public: list[dict[str, Any]] = field(default_factory=list)
    functions: list[tuple[Tool, str]] = field(default_factory=list)
    namespaces: dict[str, tuple[str, str]] = field(default_factory=dict)
    hosted: dict[str, tuple[HostedTool, str]] = field(default_factory=dict)
    choice: ToolChoice | None = None


def read_tools(given: Sequence[Any] | None, choice: Any, runs: Collection[str]) -> Tools:
    """Reads functions, and the tools in `runs`. Raises ApiError: 400 naming the tool or the choice."""
    tools = Tools()
    for i, tool in enumerate(given or ()):
        _add(tools, tool, f"tools[{i}]", runs)
    tools.choice = _choice(tools, choice)
    return tools


def _add(tools: Tools, tool: Any, place: str, runs: Collection[str]) -> None:
    if not isinstance(tool, dict) or not isinstance(tool.get("type"), str):
        raise invalid(place, "must be a tool, an object with a type", "invalid_type")
    if tool["type"] == "function":
        function = within(Function, tool, place)
        if function.name in TOOLS:
            raise invalid(f"{place}.name", f"{function.name!r} is the name of a tool that runs here; take another")
        tools.functions.append((_described(function), place))
        tools.public.append({"strict": True, "description": None, "parameters": None, **tool})
    elif tool["type"] == "namespace":
        space = within(Namespace, tool, place)
        for j, inner in enumerate(space.tools):
            if inner.get("type") == "function":
                name = within(Function, inner, f"{place}.tools[{j}]").name
                function = within(Function, inner | {"name": flat_name(space.name, name)}, f"{place}.tools[{j}]")
                tools.namespaces[function.name] = space.name, name
                tools.functions.append((_described(function), f"{place}.tools[{j}]"))
        tools.public.append(tool)
    elif tool["type"] in runs:
        if tool["type"] in tools.hosted:
            raise invalid(place, f"{tool['type']} is there twice")
        tools.hosted[tool["type"]] = read_tool(tool, place), place
        tools.public.append(tool)


def _described(function: Function) -> Tool:
    described = FunctionTool(name=function.name, description=function.description, parameters=function.parameters)
    return Tool(type="function", function=described)


def flat_name(namespace: str | None, name: str) -> str:
    """A function's name as the model reads it, as vLLM writes it, too."""
    return f"{namespace}__{name}" if namespace else name


def _choice(tools: Tools, choice: Any) -> ToolChoice | None:
    if choice is None:
        return None
    if isinstance(choice, str):
        if choice not in _MODES:
            raise invalid("tool_choice", f"must be {', '.join(_MODES)}, or an object with a type")
        if choice == "required" and not tools.public:
            raise invalid("tool_choice", "there is no tool to call: give functions, or say auto")
        return ToolChoice(type=choice) if tools.public else None
    if not isinstance(choice, dict):
        raise invalid("tool_choice", "must be a text, or an object with a type", "invalid_type")
    named = within(NamedTool, choice, "tool_choice")
    if named.type == "allowed_tools":
        return _allowed(tools, choice)
    runs_here = named.type in TOOLS
    name = _meant(tools, named.name) if named.type == "function" else named.type if runs_here else None
    if runs_here and name not in tools.hosted:
        raise invalid("tool_choice", f"{name} is not among the tools, or this server does not make that")
    if name is None or (not runs_here and name not in {tool.function.name for tool, _ in tools.functions}):
        param = "tool_choice.name" if named.type == "function" else "tool_choice.type"
        raise invalid(param, f"{(named.name or named.type)[:64]!r} is not one of the tools that are of use here")
    return ToolChoice(type="function", function=NamedFunction(name=name))


def _meant(tools: Tools, name: str | None) -> str | None:
    """The function as the model reads it: of a namespace, if one alone has the name."""
    flat = [flat for flat, (_, own) in tools.namespaces.items() if own == name]
    return flat[0] if len(flat) == 1 and name not in {tool.function.name for tool, _ in tools.functions} else name


def _allowed(tools: Tools, choice: dict[str, Any]) -> ToolChoice | None:
    """Keeps the tools that `choice` allows."""
    allowed = choice.get("tools")
    if not isinstance(allowed, list) or not all(isinstance(tool, dict) for tool in allowed):
        raise invalid("tool_choice.tools", "must be a list of tools")
    names = [
        _meant(tools, tool.get("name")) if tool.get("type") == "function" else tool.get("type") for tool in allowed
    ]
    tools.functions = [(tool, place) for tool, place in tools.functions if tool.function.name in names]
    tools.hosted = {name: tool for name, tool in tools.hosted.items() if name in names}
    mode = choice.get("mode", "auto")
    if mode not in ("auto", "required"):
        raise invalid("tool_choice.mode", "must be auto or required")
    has_any = bool(tools.functions or tools.hosted)
    if mode == "required" and not has_any:
        raise invalid("tool_choice.tools", "none of them is one of the tools that are of use here")
    return ToolChoice(type=mode) if has_any else None
