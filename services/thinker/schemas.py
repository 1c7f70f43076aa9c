"""JSON schemas as XGrammar reads them: within another schema, and in the words that it knows."""

from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote

from services.common.errors import InvalidInput

Schema = Mapping[str, Any]

_DATA = frozenset(("const", "default", "enum", "examples"))  # whose values are no schemas
_BY_NAME = frozenset(("dependentSchemas", "patternProperties", "properties"))
_DEFINITIONS = frozenset(("$defs", "definitions"))
_NOTES = _DEFINITIONS | {"$comment", "$id", "$schema", "default", "description", "examples", "title"}
_OF_OBJECTS = _NOTES | {"additionalProperties", "properties", "required", "type"}
_MOST_PARTS = 1000  # of allOf: more are not put together


def standalone(schema: Schema, field: str) -> dict[str, Any]:
    """`schema` by itself. Raises InvalidInput, which names `field`: it has too many levels."""
    definitions: dict[str, Any] = {}
    moved = _moved(schema, "#", "part", definitions, field)
    return moved | {"$defs": definitions} if definitions else moved


def define(schema: Schema, name: str, definitions: dict[str, Any], field: str) -> None:
    """Adds the object that `schema` describes to the `$defs` of another schema, and what it points to.

    Raises InvalidInput, which names `field`: it has too many levels.
    """
    definitions[name] = {}
    definitions[name] = {"type": "object", **_moved(schema, f"#/$defs/{name}", name, definitions, field)}


def _moved(schema: Schema, root: str, prefix: str, definitions: dict[str, Any], field: str) -> dict[str, Any]:
    try:
        return _Mover(schema, root, prefix, definitions).moved(schema)
    except RecursionError:
        raise InvalidInput(field, "has more levels than are read") from None


class _Mover:
    """Gives a schema's pointers definitions of their own: XGrammar follows none through lists and escapes.

    Args:
        root: pointer to where the whole schema will be.
        prefix: of the names of definitions.
    """

    def __init__(self, schema: Schema, root: str, prefix: str, definitions: dict[str, Any]) -> None:
        self._schema, self._prefix, self._definitions = schema, prefix, definitions
        self._pointers = {"#": root}
        self._left = _MOST_PARTS

    def moved(self, schema: Any) -> Any:
        if isinstance(schema, list):
            return [self.moved(each) for each in schema]
        if not isinstance(schema, dict):
            return schema
        moved: dict[str, Any] = {}
        for key, value in _with_prefix_items(self._as_one(schema)).items():
            if key in _DEFINITIONS:
                continue
            if key == "$ref" and isinstance(value, str):
                moved[key] = self._pointer(value)
            elif key in _BY_NAME and isinstance(value, dict):
                moved[key] = {name: self.moved(each) for name, each in value.items()}
            else:
                moved[key] = value if key in _DATA else self.moved(value)
        return moved

    def _pointer(self, pointer: str) -> str:
        """Where `pointer` leads to now. XGrammar refuses one that leads nowhere."""
        if pointer not in self._pointers:
            try:
                target = self._target(pointer)
            except (LookupError, TypeError, ValueError):
                return pointer
            name = f"{self._prefix}_{len(self._pointers)}"
            self._pointers[pointer] = f"#/$defs/{name}"
            self._definitions[name] = {}  # the names are in the order of the pointers
            self._definitions[name] = self.moved(target)
        return self._pointers[pointer]

    def _target(self, pointer: str) -> Any:
        """Raises LookupError, TypeError or ValueError: there is none."""
        whole, *parts = unquote(pointer).split("/")
        if whole != "#":
            raise LookupError(pointer)
        found: Any = self._schema
        for part in parts:
            found = found[int(part) if isinstance(found, list) else part.replace("~1", "/").replace("~0", "~")]
        return found

    def _as_one(self, schema: dict[str, Any]) -> dict[str, Any]:
        """Without allOf, if that is about objects: for several schemas at once XGrammar takes anything."""
        parts: list[dict[str, Any]] = []
        is_put_together = "allOf" in schema and self._collect(schema, parts, set())
        return _union(parts) if is_put_together and any(_is_object(part) for part in parts) else schema

    def _collect(self, schema: Any, parts: list[dict[str, Any]], seen: set[str]) -> bool:
        """Adds the objects that `schema` is all of to `parts`. False: it is something else.

        Args:
            seen: pointers that were followed.
        """
        if not isinstance(schema, dict) or not isinstance(inner := schema.get("allOf", []), list):
            return False
        own = {key: value for key, value in schema.items() if key not in ("$ref", "allOf")}
        pointer = schema.get("$ref")
        if isinstance(pointer, str) and pointer not in seen:
            seen.add(pointer)
            try:
                inner = [self._target(pointer), *inner]
            except (LookupError, TypeError, ValueError):
                return False
        self._left -= 1
        is_object = own.keys() <= _OF_OBJECTS and own.get("type", "object") == "object" and _is_sound(own)
        is_put_together = is_object and self._left > 0 and all(self._collect(each, parts, seen) for each in inner)
        parts.append(own)  # what is inherited comes first, as it does in instances
        return is_put_together


def _is_object(part: dict[str, Any]) -> bool:
    return "type" in part or "properties" in part


def _is_sound(part: dict[str, Any]) -> bool:
    required = part.get("required", [])
    is_list = isinstance(required, list) and all(isinstance(name, str) for name in required)
    return is_list and isinstance(part.get("properties", {}), dict)


def _union(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """The object that is described by all of `parts`."""
    properties: dict[str, Any] = {}
    for part in parts:
        for name, each in part.get("properties", {}).items():
            is_same = name not in properties or properties[name] == each
            properties[name] = each if is_same else {"allOf": [properties[name], each]}
    required = list(dict.fromkeys(name for part in parts for name in part.get("required", ())))
    whole: dict[str, Any] = {"type": "object", "properties": properties, "required": required}
    others = [part["additionalProperties"] for part in parts if "additionalProperties" in part]
    if others:
        whole["additionalProperties"] = not any(each is False for each in others) and others[0]
    return whole


def _with_prefix_items(schema: dict[str, Any]) -> dict[str, Any]:
    """Tuples of draft 7 in the newer words."""
    if not isinstance(schema.get("items"), list):
        return schema
    rest = {key: value for key, value in schema.items() if key not in ("items", "additionalItems")}
    more = {"items": schema["additionalItems"]} if "additionalItems" in schema else {}
    return rest | {"prefixItems": schema["items"], **more}
