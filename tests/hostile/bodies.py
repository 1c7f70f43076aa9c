"""Bodies that cost much, made from the schema that the OpenAPI document has of an endpoint."""

import base64
import io
import json
from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any

from PIL import Image

from tests.hostile.meter import MIB
from tests.support.clients.schemas import Schema, sample

MANY = 8 * MIB // 3  # items of 8 MiB
FEWER = 130_000  # not refused by their number, but by what they are
NAME = "gpt-" + "-tts" * 1750


def text(length: int) -> str:
    """A regular expression may go through it again and again, whether it goes on at a slash or not."""
    return "gpt-" + "-tts.a" * (length // 128) + "/" + "-tts/.a" * (length // 8)


TEXT, SHORTER = text(MIB), text(MIB // 8)  # the shorter one shows all but what is linear
Place = tuple[Any, ...]  # names of members, and 0 in lists
OF_FILES = {"url", "data", "file", "image_url", "input_audio", "ref_audio", "video_url"}
OF_KIND = {"frames": "video", "a picture without its end": "image"}


@cache
def files() -> dict[str, str]:
    """Files in texts that become as many objects as they have signs, or more memory than all bodies have."""
    picture = io.BytesIO()
    Image.new("1", (8000, 7900)).save(picture, "PNG")
    without_end = base64.b64encode(picture.getvalue()[:-12]).decode()
    return {
        "escapes": f"data:,{'%41' * MIB}",
        "more escapes": f"data:,{'%41' * (2 * MIB)}",
        "escaped base64": f"data:;base64,{'%41' * MIB}",
        "words of base64": f"data:;base64,{'AB ' * (2 * MIB)}",
        "frames": f"data:video/jpeg;base64,{',' * (6 * MIB)}",
        "a picture without its end": f"data:image/png;base64,{without_end}",
    }


def places(schema: Schema, kind: str) -> dict[Place, Schema]:
    """Where a value of `kind` may be, below a value of `schema`, and the value's schema."""
    return dict(_places(schema, kind))


def _places(schema: Schema, kind: str) -> Iterator[tuple[Place, Schema]]:
    for choice in (*schema.get("anyOf", ()), *schema.get("oneOf", ())):
        yield from _places(choice, kind)
    if schema.get("type") == kind:
        yield (), schema
    if schema.get("type") == "array":
        yield from (((0, *place), found) for place, found in _places(schema.get("items", {}), kind))
    for name, inner in schema.get("properties", {}).items():
        yield from (((name, *place), found) for place, found in _places(inner, kind))


def with_text(schema: Schema, place: Place, text: str) -> bytes:
    """The JSON of a value of `schema` that has `text` at `place`. Objects on the way there have what they must."""
    return json.dumps(_with(schema, place)).replace('"@"', text).encode()


def _with(schema: Schema, place: Place) -> Any:
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


@cache
def items(text: str, count: int) -> str:
    return "[" + ",".join([text] * count) + "]"


def members(count: int, value: str = "1") -> str:
    return "{" + ",".join(f'"m{i}":{value}' for i in range(count)) + "}"


def attacks(schema: Schema) -> Iterator[tuple[str, Callable[[], bytes], str | None]]:
    """(what, its JSON body, the code that it must be refused with; None: any answer will do but a failure)."""
    lists, objects, texts = (list(places(schema, kind)) for kind in ("array", "object", "string"))
    whole = json.dumps(sample(schema))[:-1]
    start = whole + "," if whole != "{" else whole
    if lists:
        yield f"8 MiB of objects at {lists[0]}", partial(_put, schema, lists[0], items, "{}", MANY), "json_too_large"
    else:
        yield "8 MiB of objects", lambda: f'{start}"x":{items("{}", MANY)}}}'.encode(), "json_too_large"
    for place in lists:
        yield f"objects at {place}", partial(_put, schema, place, items, "{}", FEWER), None
        numbers = 3 * FEWER if place == lists[0] else FEWER
        yield f"numbers at {place}", partial(_put, schema, place, items, "0", numbers), None
        yield f"nulls at {place}", partial(_put, schema, place, items, _nulls(schema, place), 3000), None
    if any(objects):
        place = max(objects, key=len)  # they are counted before it is known what has them
        yield f"members at {place}", partial(_put, schema, place, members, 3000), "json_too_large"
    for place in _unlike(places(schema, "object")):
        yield f"objects in {place}", partial(_put, schema, place, _in_object, FEWER), None
    yield "members", lambda: (start + members(30_000)[1:]).encode(), "json_too_large"
    yield "unknown members", lambda: (start + members(2000)[1:]).encode(), None
    yield "small objects", lambda: f'{start}"x":{items(members(3), 20_000)}}}'.encode(), "json_too_large"
    yield "brackets", lambda: b"[" * MIB, "json_too_large"
    yield "fewer brackets", lambda: b"[" * 300_000, "invalid_json"
    yield "digits", lambda: f'{start}"x":{"9" * MIB}}}'.encode(), None
    for place in texts:
        long = TEXT if place == texts[0] else SHORTER
        yield f"a text at {place}", partial(_put, schema, place, json.dumps, long), None
    for what, place in dict.fromkeys(_of_files([place for place in texts if place and place[-1] in OF_FILES])):
        yield f"{what} at {place}", partial(_put, schema, place, json.dumps, files()[what]), None


def _unlike(objects: dict[Place, Schema]) -> list[Place]:
    """Those that may have any member, and of those that have members of their own one of each kind: models that refuse
    others, and models that ignore them, are all alike."""
    models = {found.get("additionalProperties"): place for place, found in objects.items() if "properties" in found}
    return [place for place, found in objects.items() if place and "properties" not in found] + [
        place for place in models.values() if place
    ]


def _of_files(found: list[Place]) -> Iterator[tuple[str, Place]]:
    """(what, place): each file and each place once, and pictures and frames wherever they may be read as such."""
    for i in range(max(len(found), len(files())) if found else 0):
        yield list(files())[i % len(files())], found[i % len(found)]
    for what, kind in OF_KIND.items():
        named = [place for place in found if any(kind in str(step) for step in place)]
        yield from ((what, place) for place in named or (found if kind == "image" else ()))


def _put(schema: Schema, place: Place, make: Callable[..., str], *arguments: Any) -> bytes:
    return with_text(schema, place, make(*arguments))


def _in_object(count: int) -> str:
    return f'{{"a":{items("{}", count)}}}'


def _nulls(schema: Schema, place: Place) -> str:
    """An object of the list at `place` whose members are all null, but for those that say what it is."""
    item = (*place, 0)
    named = [found[-1] for found in places(schema, "null") if found[:-1] == item]
    return json.dumps({"role": "user", "type": "text"} | dict.fromkeys(named))
