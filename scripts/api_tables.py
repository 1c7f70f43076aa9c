"""Brings tables of the documents up to date with the gateway's OpenAPI document: python scripts/api_tables.py

A comment before a table names what the table lists: the endpoints, the members of a request, or the members of one of
its objects:

    <!-- table: endpoints -->
    <!-- table: POST /v1/chat/completions -->
    <!-- table: POST /v1/chat/completions quartet -->

The last column is written by hand. The rows and the column "value" come from the OpenAPI document: a member that is
gone loses its row, a new one gets a row with the sentence that the code has for it. Members without effect have no
row.
"""

import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from fastapi.routing import APIRoute
from starlette.routing import BaseRoute, Route

from gateway.app import create_app
from gateway.pipeline.config import load_pipeline
from gateway.settings import GatewaySettings
from gateway.validation import MAX_ITEMS

ROOT = Path(__file__).parents[1]
PAGES = (ROOT / "docs/api.md", ROOT / "docs/messages.md")
_TABLE = re.compile(r"^<!-- table: (.*) -->\n\|.*\n\|[-|]+\n((?:\|.*\n)*)", re.MULTILINE)
_ENDPOINT = re.compile(r"`(GET|POST|DELETE) ([^`]+)`")
# Members that the gateway takes in a further form, which the OpenAPI document does not have.
_FURTHER_FORMS = {
    ("voice", "object"): "text or object",
    ("tool_choice", "object"): "text or object",
    ("chunking_strategy", "object"): "text or object",
    ("lora", "object"): "text, object or list",
    ("stop", "list of texts, at most 16"): "text, or list of texts, at most 16",
}
_LARGE = 2**31 - 1  # a limit of the stages' protos that nobody meets

Schema = dict[str, Any]


def gateway() -> FastAPI:
    """The gateway, with every endpoint."""
    settings = GatewaySettings.model_validate({"pipeline": ROOT / "gateway/pipelines/qwen3-omni-dit.yaml"})
    return create_app(settings, load_pipeline(settings.pipeline))


def updated(text: str, app: FastAPI) -> str:
    """The page with its tables as the OpenAPI document has them."""
    all_routes = list(_routes(app.routes))
    routes = [route for route in all_routes if isinstance(route, APIRoute) and route.include_in_schema]
    others = {route.path for route in all_routes}

    def rows(found: re.Match[str]) -> str:
        name, old = found[1], found[2].splitlines()
        head = found[0].removesuffix(found[2])
        new = _endpoint_rows(old, routes, others) if name == "endpoints" else _member_rows(old, _members(name, routes))
        return head + "".join(f"{row}\n" for row in new)

    return _TABLE.sub(rows, text)


def _routes(routes: Iterable[BaseRoute]) -> Iterator[Route]:
    for route in routes:
        if isinstance(route, Route):
            yield route
        elif (router := getattr(route, "original_router", None)) is not None:  # newer versions of FastAPI nest routers
            yield from _routes(router.routes)


def _endpoint_rows(old: list[str], routes: list[APIRoute], others: set[str]) -> Iterator[str]:
    """The rows that name something of the gateway's, and a row for each endpoint without one.

    `others` has paths that are no part of the OpenAPI document, such as /docs.
    """
    served = {
        f"{method} {_unnamed(route.path)}": (f"{method} {route.path}", _sentence(route.description))
        for route in routes
        for method in route.methods
    }
    for row in old:
        named = _ENDPOINT.findall(row.split("|")[1])
        names = [f"{method} {_unnamed(path)}" for method, path in named]
        if not named or any(name in served for name in names) or any(path in others for _, path in named):
            yield row
        for name in names:
            served.pop(name, None)
    for written, sentence in served.values():
        yield f"| `{written}` | {sentence} |"


def _unnamed(path: str) -> str:
    return re.sub(r"\{[^}]+\}", "{}", path)


def _sentence(text: str) -> str:
    return " ".join(text.split())


def _members(name: str, routes: list[APIRoute]) -> Schema:
    """The members of a request, or of an object in it, by name."""
    method, path, *member = name.split(" ")
    (route,) = [each for each in routes if each.path == path and method in each.methods]
    assert route.openapi_extra
    (body, *_) = route.openapi_extra["requestBody"]["content"].values()
    prefix = f"{member[0]}." if member else ""
    members = _flat(body["schema"]["properties"])
    return {key.removeprefix(prefix): each for key, each in members if key.startswith(prefix)}


def _flat(properties: Schema, prefix: str = "") -> Iterator[tuple[str, Schema]]:
    """Members, and those of the objects in them, as `object.member`."""
    for name, schema in properties.items():
        yield prefix + name, schema
        for choice in _choices(schema):
            yield from _flat(choice.get("properties", {}), f"{prefix}{name}.")


def _choices(schema: Schema) -> list[Schema]:
    choices = schema.get("anyOf") or schema.get("oneOf")
    return [each for each in choices if each.get("type") != "null"] if choices else [schema]


def _member_rows(old: list[str], members: Schema) -> Iterator[str]:
    """The rows whose members exist, and a row for each member without one."""
    left = {name: schema for name, schema in members.items() if "." not in name and _has_effect(schema)}
    for row in old:
        _, cell, _, remark, _ = re.split(r"(?<!\\)\|", row)
        names = [name.removesuffix("[]") for name in re.findall(r"`([^`]+)`", cell)]
        if known := [name for name in names if name in members]:
            values = dict.fromkeys(_value(name, members[name]) for name in known)
            shown = "; ".join(values) if len(known) < 4 else ""
            yield f"|{cell}| {shown} |{remark}|".replace("|  |", "| |")
        for name in known:
            for each in (name, name.partition(".")[0]):
                left.pop(each, None)
    for name, schema in left.items():
        yield f"| `{name}` | {_value(name, schema)} | {_sentence(schema.get('description', ''))} |"


def _has_effect(schema: Schema) -> bool:
    has_type = not schema.keys().isdisjoint(("type", "anyOf", "oneOf"))
    return has_type and not schema.get("description", "").startswith(("accepted", "refused"))


def _value(name: str, schema: Schema) -> str:
    words = value(schema)
    return _FURTHER_FORMS.get((name, words), words)


def value(schema: Schema) -> str:
    """What a member takes, in words."""
    return " or ".join(dict.fromkeys(_kind(each) for each in _choices(schema)))


def _kind(schema: Schema) -> str:
    match schema:
        case {"const": constant}:
            return str(constant)
        case {"enum": names}:
            return ", ".join(map(str, names))
        case {"anyOf": _} | {"oneOf": _}:
            return value(schema)
        case {"type": "boolean"}:
            return "true, false"
        case {"type": "integer" | "number" as kind}:
            return _range(schema) or ("a whole number" if kind == "integer" else "a number")
        case {"type": "array", "items": items}:
            least = f", {schema['minItems']} or more" if "minItems" in schema else ""
            most = f", at most {schema['maxItems']}" if schema.get("maxItems", MAX_ITEMS) < MAX_ITEMS else ""
            return f"list of {_plural(items)}{least}{most}"
        case {"type": "string", "format": "binary"}:
            return "file"
        case {"type": "string"}:
            return "text"
        case _:
            return "object"


def _plural(schema: Schema) -> str:
    match schema:
        case {"enum": _} | {"const": _}:
            return _kind(schema)
        case {"type": "integer"}:
            return "whole numbers"
        case {"type": "array"}:
            return "lists"
        case _:
            return f"{_kind(schema)}s"


def _range(schema: Schema) -> str:
    """The numbers that a schema allows."""
    least = schema.get("minimum", schema.get("exclusiveMinimum"))
    most = schema.get("maximum", schema["exclusiveMaximum"] - 1 if "exclusiveMaximum" in schema else None)
    above = "above " if "exclusiveMinimum" in schema else ""
    if least is None:
        return ""
    if least == most:
        return _number(least)
    if most is None or (most == _LARGE and least >= -1):
        return f"{above}{_number(least)}" if above else f"{_number(least)} or more"
    return f"{above}{_number(least)}{',' if above else ''} to {_number(most)}"


def _number(number: float) -> str:
    """Limits near a power of 2 by that power."""
    for power in (31, 63):
        near = 2**power - abs(int(number))
        if 0 <= near < 1000:
            sign = "-" if number < 0 else ""
            return f"{sign}2^{power}{f' - {near}' if near else ''}"
    return f"{number:g}" if isinstance(number, float) else str(number)


if __name__ == "__main__":
    for page in PAGES:
        page.write_text(updated(page.read_text(), gateway()))
