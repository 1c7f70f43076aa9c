"""Bodies that cost much, made from the schema that the OpenAPI document has of an endpoint."""

import json
from collections.abc import Iterator
from typing import Any

from tests.hostile.meter import MIB
from tests.support.clients.schemas import Schema, sample

MANY = 8 * MIB // 3  # items of 8 MiB
FEWER = 130_000  # not refused by their number, but by what they are
NAME = "gpt-" + "-tts" * 1750
TEXT = "gpt-" + "-tts/.a" * (MIB // 8)  # a regular expression may go through it again and again


def places(schema: Schema, kind: str) -> Iterator[tuple[Any, ...]]:
    """Where a value of `kind` may be, below a value of `schema`: names of members, and 0 in lists."""
    for choice in (*schema.get("anyOf", ()), *schema.get("oneOf", ())):
        yield from places(choice, kind)
    if schema.get("type") == kind:
        yield ()
    if schema.get("type") == "array":
        yield from ((0, *place) for place in places(schema.get("items", {}), kind))
    for name, inner in schema.get("properties", {}).items():
        yield from ((name, *place) for place in places(inner, kind))


def with_text(schema: Schema, place: tuple[Any, ...], text: str) -> bytes:
    """The JSON of a value of `schema` that has `text` at `place`. Objects on the way there have what they must."""
    return json.dumps(_with(schema, place)).replace('"@"', text).encode()


def _with(schema: Schema, place: tuple[Any, ...]) -> Any:
    if not place:
        return "@"
    step, *rest = place
    choices = [schema, *schema.get("anyOf", ()), *schema.get("oneOf", ())]
    for choice in (inner for each in choices for inner in (each, *each.get("anyOf", ()), *each.get("oneOf", ()))):
        if step == 0 and choice.get("type") == "array" and _leads(choice.get("items", {}), rest):
            return [_with(choice["items"], tuple(rest))]
        if step in choice.get("properties", {}) and _leads(choice["properties"][step], rest):
            return {**sample({**choice, "type": "object"}), step: _with(choice["properties"][step], tuple(rest))}
    raise LookupError(place)


def _leads(schema: Schema, place: list[Any]) -> bool:
    if not place:
        return True
    try:
        _with(schema, tuple(place))
    except LookupError:
        return False
    return True


def items(text: str, count: int) -> str:
    return "[" + ",".join([text] * count) + "]"


def members(count: int, value: str = "1") -> str:
    return "{" + ",".join(f'"m{i}":{value}' for i in range(count)) + "}"


def attacks(schema: Schema) -> Iterator[tuple[str, bytes, str | None]]:
    """(what, JSON body, the code that it must be refused with; None: any answer will do but a failure)."""
    lists = list(dict.fromkeys(places(schema, "array")))
    objects = list(dict.fromkeys(places(schema, "object")))
    texts = list(dict.fromkeys(places(schema, "string")))
    whole = json.dumps(sample(schema))[:-1]
    start = whole + "," if whole != "{" else whole
    for place in lists[:1] or [("unknown",)]:
        body = with_text(schema, place, items("{}", MANY)) if lists else f'{start}"x":{items("{}", MANY)}}}'.encode()
        yield f"8 MiB of objects at {place}", body, "json_too_large"
    for place in lists:
        yield f"objects at {place}", with_text(schema, place, items("{}", FEWER)), None
        yield f"numbers at {place}", with_text(schema, place, items("0", 3 * FEWER)), None
        yield f"nulls at {place}", with_text(schema, place, items(_nulls(schema, place), 3000)), None
    for place in objects:
        if place:
            yield f"members at {place}", with_text(schema, place, members(3000)), "json_too_large"
            yield f"objects in {place}", with_text(schema, place, f'{{"a":{items("{}", FEWER)}}}'), None
    yield "members", (start + members(30_000)[1:]).encode(), "json_too_large"
    yield "unknown members", (start + members(2000)[1:]).encode(), None
    yield "small objects", f'{start}"x":{items(members(3), 20_000)}}}'.encode(), "json_too_large"
    yield "brackets", b"[" * MIB, "json_too_large"
    yield "fewer brackets", b"[" * 300_000, "invalid_json"
    yield "digits", f'{start}"x":{"9" * MIB}}}'.encode(), None
    for place in texts:
        yield f"a text at {place}", with_text(schema, place, json.dumps(TEXT)), None


def _nulls(schema: Schema, place: tuple[Any, ...]) -> str:
    """An object of the list at `place` whose members are all null, but for those that say what it is."""
    item = (*place, 0)
    named = [found[-1] for found in places(schema, "null") if found[:-1] == item]
    return json.dumps({"role": "user", "type": "text"} | dict.fromkeys(named))
