"""Schemas as generators of other languages write them: what XGrammar accepts of calls and answers, beside what a
validator of JSON Schema does."""

import json
from typing import Any

import pytest

from quartet.v1 import thinker_pb2
from services.common.errors import InvalidInput
from services.thinker.family import ToolCallMarkers
from services.thinker.schemas import standalone
from services.thinker.structure import ToolChoice, calls_of, forced_schema, structure_of

jsonschema = pytest.importorskip("jsonschema")
xgrammar = pytest.importorskip("xgrammar")  # vLLM brings it
testing = pytest.importorskip("xgrammar.testing")

Schema = dict[str, Any]
NULL: Schema = {"type": "null"}
INTEGER: Schema = {"type": "integer"}
OPEN_CITY: Schema = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
CITY = OPEN_CITY | {"additionalProperties": False}
BASE: Schema = {"type": "object", "properties": {"id": INTEGER}, "required": ["id"]}
# zod 3 writes tuples as draft 7 does, and maps as lists of them.
PAIR: Schema = {"type": "array", "items": [{"type": "string"}, INTEGER], "minItems": 2, "maxItems": 2}
REST: Schema = {"type": "array", "items": [{"type": "string"}], "additionalItems": INTEGER, "minItems": 1}
DERIVED: Schema = {
    "allOf": [{"$ref": "#/$defs/Base"}],
    "properties": {"next": {"anyOf": [{"$ref": "#/$defs/Derived"}, NULL]}},
    "required": ["next"],
}
ROME, NOWHERE = {"name": "Rome"}, {"name": 1}
# The schemas of x and y, and their values: those that fit, and those that do not.
CASES: dict[str, tuple[Schema, Any, list[tuple[Any, Any]], list[tuple[Any, Any]]]] = {
    "pointer into a member": (CITY, {"$ref": "#/properties/x"}, [(ROME, ROME)], [(ROME, NOWHERE)]),
    "pointer into the items of a list": (
        {"type": "array", "items": CITY},
        {"$ref": "#/properties/x/items"},
        [([ROME], ROME), ([], ROME)],
        [([], NOWHERE), ([NOWHERE], ROME)],
    ),
    "pointer into a union": (
        {"anyOf": [CITY, NULL]},
        {"$ref": "#/properties/x/anyOf/0"},
        [(None, ROME)],
        [(None, None), (ROME, NOWHERE)],
    ),
    "escaped pointers": (
        {"$ref": "#/definitions/a~1b"},
        {"$ref": "#/definitions/a%20b"},
        [(ROME, ROME)],
        [(NOWHERE, ROME), (ROME, NOWHERE)],
    ),
    "definition of a definition": ({"$ref": "#/$defs/Alias"}, {}, [(ROME, 1)], [(NOWHERE, 1)]),
    "recursive pointer into a member": (
        {"type": "array", "items": {"$ref": "#/properties/x"}},
        {},
        [([[], [[]]], 1)],
        [([1], 1)],
    ),
    "pair": (PAIR, PAIR, [(["a", 1], ["b", 2])], [(["a"], ["b", 2]), (["a", 1, 2], ["b", 2]), ([1, 1], ["b", 2])]),
    "tuple with a rest": (REST, {}, [(["a"], 1), (["a", 1, 2], 1)], [([], 1), (["a", "b"], 1)]),
    "map": ({"type": "array", "items": PAIR}, {}, [([], 1), ([["a", 1]], 1)], [([["a"]], 1)]),
    "types in a list": ({"type": ["string", "null"]}, {}, [("a", 1), (None, 1)], [(1, 1)]),
    "intersection": ({"allOf": [OPEN_CITY, BASE]}, {}, [(ROME | {"id": 1}, 1)], [(ROME, 1), (5, 1), ({"id": 1}, 1)]),
    "inheritance": (
        {"$ref": "#/$defs/Derived"},
        {},
        [({"id": 1, "next": {"id": 2, "next": None}}, 1)],
        [({"next": None}, 1), ({"id": 1, "next": {"id": 2}}, 1)],
    ),
    "a member of both": (
        {"allOf": [{"properties": {"a": BASE}, "required": ["a"]}, {"properties": {"a": OPEN_CITY}}]},
        {},
        [({"a": {"id": 1, "name": "Rome"}}, 1)],
        [({"a": {"id": 1}}, 1), ({"a": ROME}, 1)],
    ),
    "all of itself": ({"$ref": "#/$defs/Self"}, {}, [({"id": 1}, 1)], [({}, 1)]),
    "all of what is no object": ({"allOf": [INTEGER], "default": 1}, {}, [(2, 1)], [("a", 1)]),
}
DEFINITIONS: Schema = {
    "$defs": {
        "Alias": {"$ref": "#/$defs/City"},
        "City": CITY,
        "Base": BASE,
        "Derived": DERIVED,
        "Self": {"allOf": [{"$ref": "#/$defs/Self"}, BASE]},
    },
    "definitions": {"a/b": CITY, "a b": CITY},
}


def tool(name: str, parameters: Schema) -> Schema:
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


@pytest.mark.parametrize("kind", CASES)
def test_calls_and_answers_are_what_a_validator_takes(kind: str) -> None:
    x, y, good, bad = CASES[kind]
    schema = {"type": "object", "properties": {"x": x, "y": y}, "required": ["x", "y"], **DEFINITIONS}
    tools = [tool("other", {"$defs": {"City": NULL}}), tool("mine", schema)]
    forced = forced_schema(ToolChoice.MODE_REQUIRED, "", tools)
    sampling = thinker_pb2.SamplingParameters
    answer = structure_of(sampling(json_schema=json.dumps(schema)), None, None)
    beside = structure_of(sampling(regex="none"), None, calls_of(tools, ToolCallMarkers("<", ">")))
    assert forced is not None
    assert answer is not None
    assert beside is not None
    of_json = xgrammar.Grammar.from_json_schema
    grammars = {
        '{"name": "mine", "arguments": %s}': of_json(forced),
        "%s": of_json(answer.json),
        '<\n{"name": "mine", "arguments": %s}\n>': xgrammar.Grammar.from_structural_tag(beside.structural_tag),
    }
    validator = jsonschema.Draft7Validator(schema)
    for values, fits in [(each, True) for each in good] + [(each, False) for each in bad]:
        value = dict(zip(("x", "y"), values, strict=True))
        if kind != "all of itself":  # which the validator follows for ever
            assert validator.is_valid(value) == fits, value
        for form, grammar in grammars.items():
            assert testing._is_grammar_accept_string(grammar, form % json.dumps(value)) == fits, (form, value)


def test_what_cannot_be_read_is_left_or_refused() -> None:
    lost = {"$ref": "#/nowhere", "allOf": [{"$ref": "#x"}, True], "default": {"$ref": "#/x"}}
    assert standalone(lost, "f") == lost
    deep: Schema = {}
    for _ in range(3000):
        deep = {"items": deep}
    with pytest.raises(InvalidInput, match=r"tools\[1\]\.parameters_json: has more levels"):
        forced_schema(ToolChoice.MODE_REQUIRED, "", [tool("a", {}), tool("b", deep)])
    with pytest.raises(InvalidInput, match=r"sampling\.json_schema: has more levels"):
        standalone(deep, "sampling.json_schema")


def test_a_schema_that_doubles_at_each_level_takes_no_longer() -> None:
    twice = {f"l{i}": {"allOf": [{"$ref": f"#/$defs/{part}{i + 1}"} for part in "lr"]} for i in range(60)}
    twice |= {f"r{i}": {"allOf": [{"$ref": f"#/$defs/{part}{i + 1}"} for part in "lr"]} for i in range(60)}
    read = standalone({"$ref": "#/$defs/l0", "$defs": twice | {"l60": BASE, "r60": BASE}}, "f")
    assert read["$defs"]["part_1"] == BASE
