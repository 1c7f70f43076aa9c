"""Functions of a request: weather, the image tool, and others."""

import json
import random
import string
from collections.abc import Sequence
from typing import Any

from gateway.answers.tools.generators import ImageGenerator, ImageTool
from training.dialogue import capital
from training.words import THINGS

Tool = dict[str, Any]

_VERBS = ("get", "fetch", "find", "show", "read", "query", "lookup", "current", "city", "tell")
_WEATHER_NAMES = ("weather", "forecast", "weather_report", "current_weather", "weather_now", "weather_forecast")
HELD_OUT_NAMES = ("get_local_weather", "weather_service", "todays_weather", "forecast_for", "weatherByCity")
_WEATHER_IS = (
    "The weather in a city.",
    "Gets the weather.",
    "The current weather.",
    "Get current temperature for a given location.",
    "Get the current weather in a given location.",
    "Returns the weather for a place.",
    "Weather forecast for a city",
)
_PLACE_FIELDS = ("city", "location", "place", "town", "city_name", "where")
_PLACE_IS = (None, None, "the city", "Name of the city", "City and country e.g. Bogotá, Colombia", "The place.")
_UNITS = (("celsius", "fahrenheit"), ("metric", "imperial"), ("C", "F"))
_DO = (
    *("search", "send", "set", "open", "close", "play", "buy", "book", "read", "write", "list", "add", "delete", "run"),
    *("get", "find", "create", "update", "check", "turn_on", "call", "convert", "look", "calculate", "translate"),
)
_WHAT = (
    *("email", "message", "light", "lamp", "door", "music", "ticket", "file", "user", "time", "stock_price", "web"),
    *("calendar", "event", "note", "order", "account", "route", "song", "timer", "alarm", "sql", "document", "map"),
)
_FIELDS = (
    *("query", "text", "name", "id", "value", "path", "url", "on", "room", "amount", "to", "subject", "body", "color"),
    *("symbol", "date", "expression", "language", "user_id", "limit", "key"),
)
_FIELD_TYPES = ("string", "string", "string", "integer", "number", "boolean")


def call(name: str, arguments: dict[str, Any]) -> str:
    """Writes a call as the chat template does."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def _function(name: str, description: str | None, properties: dict[str, Any], required: Sequence[str]) -> Tool:
    parameters = {"type": "object", "properties": properties, "required": list(required)}
    described = {"description": description} if description else {}
    return {"type": "function", "function": {"name": name, **described, "parameters": parameters}}


def _camel(name: str) -> str:
    first, *rest = name.split("_")
    return first + "".join(map(capital, rest))


def draw_name(draw: random.Random, verbs: Sequence[str], nouns: Sequence[str]) -> str:
    """Draws a function name in one of the usual spellings."""
    name = draw.choice(nouns)
    if draw.random() < 0.75:
        name = f"{draw.choice(verbs)}_{name}"
    return _camel(name) if draw.random() < 0.15 else name


def weather_tool(draw: random.Random, names: Sequence[str] = ()) -> tuple[Tool, str, dict[str, str]]:
    """Draws a weather function, its argument for the city, and the other arguments of a call.

    Args:
        names: of the function; none: those of training.
    """
    if names:
        name = draw.choice(names)
    else:
        name = "get_weather" if draw.random() < 0.35 else draw_name(draw, _VERBS, _WEATHER_NAMES)
    place, told = ("city", None) if draw.random() < 0.2 else (draw.choice(_PLACE_FIELDS), draw.choice(_PLACE_IS))
    properties: dict[str, Any] = {place: {"type": "string", **({"description": told} if told else {})}}
    required, more = [place], dict[str, str]()
    if draw.random() < 0.2:
        units = draw.choice(_UNITS)
        properties["unit"] = {"type": "string", "enum": list(units)}
        if draw.random() < 0.5:
            required.append("unit")
            more["unit"] = units[0]
    return _function(name, draw.choice(_WEATHER_IS), properties, required), place, more


def image_tool(draw: random.Random) -> tuple[Tool, bool]:
    """Draws the gateway's `image_generation` function, and whether a call has an action."""
    says = draw.random() < 0.85
    tool = ImageGenerator(ImageTool() if says else ImageTool(action="generate")).function()
    return tool.model_dump(exclude_none=True), says


def other_tool(draw: random.Random) -> Tool:
    """Draws a function that answers no question of the world."""
    name = draw_name(draw, _DO, _WHAT)
    if draw.random() < 0.2:
        name = "".join(draw.choices(string.ascii_lowercase, k=draw.randint(3, 9)))
    fields = draw.sample(_FIELDS, draw.randint(0, 3))
    properties: dict[str, Any] = {field: {"type": draw.choice(_FIELD_TYPES)} for field in fields}
    for field in fields:
        if draw.random() < 0.2:
            properties[field]["description"] = f"The {draw.choice(THINGS)}."
    what = f"{capital(draw.choice(_DO)).replace('_', ' ')} the {draw.choice(THINGS)}."
    return _function(name, what if draw.random() < 0.8 else None, properties, fields[: draw.randint(0, len(fields))])
