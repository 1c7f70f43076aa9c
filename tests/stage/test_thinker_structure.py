"""Grammars of answers: what XGrammar accepts of them, beside what pydantic does."""

import json
from contextlib import nullcontext
from datetime import date, datetime
from enum import Enum
from typing import Annotated, Any, Literal, Optional
from uuid import UUID

import pytest
from pydantic import BaseModel, Field, RootModel, TypeAdapter, ValidationError, create_model

from quartet.v1 import thinker_pb2
from services.common.errors import InvalidInput
from services.thinker.compiling import spec
from services.thinker.family import ToolCallMarkers
from services.thinker.grammar import check_allows_text
from services.thinker.structure import ToolChoice, calls_of, forced_schema, structure_of

xgrammar = pytest.importorskip("xgrammar")  # vLLM brings it
testing = pytest.importorskip("xgrammar.testing")

MARKERS = ToolCallMarkers("<tool_call>", "</tool_call>")


class City(BaseModel):
    name: str
    population: int | None = None


class Unit(Enum):
    C = "celsius"
    F = "fahrenheit"


class Node(BaseModel):
    value: int
    children: "list[Node]" = []


class Linked(BaseModel):
    next: Optional["Linked"]


class Cat(BaseModel):
    kind: Literal["cat"]
    lives: Annotated[int, Field(ge=1, le=9)]


class Dog(BaseModel):
    kind: Literal["dog"]
    name: str


class Left(BaseModel):
    right: "Right | None" = None


class Right(BaseModel):
    left: Left | None = None


class Described(BaseModel):
    """With members that look like parts of a schema."""

    ref: Annotated[str, Field(alias="$ref")]
    properties: City
    default: int = Field(default=3, json_schema_extra={"examples": [{"$ref": "#/nowhere"}]})


PARAMETERS: dict[str, tuple[Any, list[Any], list[Any]]] = {
    # a type of arguments, what it takes and what it does not
    "nested": (City, [{"name": "Rome"}, {"name": "Rome", "population": 3}], [{}, {"name": 1}]),
    "recursive": (
        Node,
        [{"value": 1, "children": [{"value": 2, "children": []}]}],
        [{"value": 1, "children": [{"name": "tool", "arguments": {}}]}],
    ),
    "recursive at its root": (Linked, [{"next": None}, {"next": {"next": None}}], [{"next": {}}, {}]),
    "mutual": (Left, [{"right": {"left": {"right": None}}}], [{"right": {"left": 1}}]),
    "names of keywords": (
        Described,
        [{"$ref": "#/$defs/x", "properties": {"name": "a"}, "default": 1}],
        [{"properties": {"name": "a"}}],
    ),
}


def tool(name: str, parameters: dict[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def model(name: str, members: dict[str, Any]) -> type[BaseModel]:
    fields: Any = {key: (kind, ...) for key, kind in members.items()}
    return create_model(name, **fields)


MEMBERS: dict[str, tuple[Any, list[Any], list[Any]]] = {
    "text": (str, ["", 'a\n"b" \\ é'], [1, None]),
    "whole number": (int, [0, -5, 10**9], [1.5, "1", True]),
    "number": (float, [0, 1.5, -2e10], ["1"]),
    "truth": (bool, [True, False], [1, "true"]),
    "null": (None, [None], [0]),
    "optional": (int | None, [1, None], ["x"]),
    "union": (int | str, [1, "x"], [None, [1]]),
    "enum": (Unit, ["celsius"], ["kelvin", "C"]),
    "literal": (Literal["a", "b"], ["a", "b"], ["c"]),
    "list": (list[int], [[], [1, 2]], [["x"], [1, None]]),
    "list of a length": (Annotated[list[int], Field(min_length=1, max_length=2)], [[1], [1, 2]], [[], [1, 2, 3]]),
    "list of lists": (list[list[str]], [[], [["a"], []]], [["a"]]),
    "pair": (tuple[int, str], [[1, "a"]], [[1], ["a", 1], [1, "a", 2]]),
    "map": (dict[str, int], [{}, {"a": 1}], [{"a": "x"}]),
    "map of nested": (dict[str, City], [{"a": {"name": "Rome"}}], [{"a": {}}]),
    "list of nested": (list[City], [[{"name": "Rome"}], []], [[{}]]),
    "tagged union": (
        Annotated[Cat | Dog, Field(discriminator="kind")],
        [{"kind": "cat", "lives": 9}, {"kind": "dog", "name": "Rex"}],
        [{"kind": "cat", "name": "Rex"}, {"kind": "cow"}],
    ),
    "range": (Annotated[int, Field(ge=10, le=99)], [10, 99], [9, 100]),
    "text of a length": (Annotated[str, Field(min_length=2, max_length=3)], ["ab", "abc"], ["a", "abcd"]),
    "pattern": (Annotated[str, Field(pattern=r"^[A-Z]{2}\d+$")], ["AB1"], ["ab1", "AB"]),
    "date": (date, ["2026-11-27"], [5]),
    "time": (datetime, ["2026-11-27T06:00:00Z"], [[]]),
    "id": (UUID, ["12345678-1234-5678-1234-567812345678"], [7]),
    "anything": (Any, [1, "x", None, {"a": []}], []),
    "nested twice": (list[dict[str, list[City | None]]], [[{"a": [{"name": "b"}, None]}]], [[{"a": [1]}]]),
    "root model": (RootModel[list[City]], [[{"name": "Rome"}]], [[3]]),
}


def accepts(schema: str, value: Any) -> bool:
    grammar = xgrammar.Grammar.from_json_schema(schema)
    return testing._is_grammar_accept_string(grammar, json.dumps(value, ensure_ascii=False))


def cases() -> list[Any]:
    wrapped = {
        name: (model("Arguments", {"x": kind}), [{"x": each} for each in good], [{"x": each} for each in bad])
        for name, (kind, good, bad) in MEMBERS.items()
    }
    return [pytest.param(*case, id=name) for name, case in (wrapped | PARAMETERS).items() if case[1]]


@pytest.mark.parametrize(("kind", "good", "bad"), cases())
def test_forced_arguments_are_what_pydantic_takes(kind: Any, good: list[Any], bad: list[Any]) -> None:
    adapter = TypeAdapter(kind)
    tools = [
        tool("other", {"type": "object", "$defs": {"City": {"type": "null"}}}),
        tool("mine", adapter.json_schema()),
    ]
    for mode in (ToolChoice.MODE_REQUIRED, ToolChoice.MODE_FUNCTION):
        schema = forced_schema(mode, "mine", tools)
        assert schema is not None
        for value in good:
            adapter.validate_json(json.dumps(value), strict=True)
            assert accepts(schema, {"name": "mine", "arguments": value}), value
        for value in bad:
            with pytest.raises(ValidationError):
                adapter.validate_json(json.dumps(value), strict=True)
            assert not accepts(schema, {"name": "mine", "arguments": value}), value


SAMPLING = thinker_pb2.SamplingParameters
ANSWERS: dict[str, tuple[dict[str, Any], str]] = {
    "json_schema": ({"json_schema": json.dumps(TypeAdapter(Node).json_schema())}, '{"value": 1, "children": []}'),
    "json_object": ({"json_object": True}, '{"a": [1]}'),
    "regex": ({"regex": "[a-z]+"}, "abc"),
    "grammar": ({"grammar": 'root ::= "yes" | "no"'}, "no"),
    "choice": ({"choice": {"texts": ["yes", 'no "!"']}}, 'no "!"'),
}


@pytest.mark.parametrize("kind", ANSWERS)
def test_with_tools_an_answer_is_in_its_structure_or_a_call(kind: str) -> None:
    members, answer = ANSWERS[kind]
    calls = calls_of([tool("look", TypeAdapter(City).json_schema()), tool("stop", {})], MARKERS)
    params = structure_of(SAMPLING(**members), None, calls)
    assert params is not None
    assert params.structural_tag is not None
    grammar = xgrammar.Grammar.from_structural_tag(params.structural_tag)
    call = '<tool_call>\n{"name": "look", "arguments": {"name": "Rome"}}\n</tool_call>'
    stop = '<tool_call>\n{"name": "stop", "arguments": {}}\n</tool_call>'
    for text in (answer, call, stop, f"{call}\n{stop}"):
        assert testing._is_grammar_accept_string(grammar, text), text
    for text in ("Well, ", f"{answer}{call}", call.replace("look", "erase"), call.replace('"Rome"', "1")):
        assert not testing._is_grammar_accept_string(grammar, text), text


def test_a_forced_call_goes_before_the_structure_of_an_answer() -> None:
    forced = forced_schema(ToolChoice.MODE_REQUIRED, "", [tool("stop", {})])
    for members, _ in ANSWERS.values():
        params = structure_of(SAMPLING(**members), forced, None)
        assert params is not None
        assert params.json == forced


def test_a_structural_tag_is_passed_on_and_not_beside_tools() -> None:
    tag = json.dumps({"type": "structural_tag", "format": {"type": "const_string", "value": "a"}})
    params = structure_of(SAMPLING(structural_tag=tag), None, None)
    assert params is not None
    assert params.structural_tag == tag
    for text in ("[]", "{"):
        with pytest.raises(InvalidInput, match=r"sampling\.structural_tag"):
            structure_of(SAMPLING(structural_tag=text), None, None)
    with pytest.raises(InvalidInput, match="leave one of the two out"):
        structure_of(SAMPLING(structural_tag=tag), None, calls_of([tool("stop", {})], MARKERS))
    with pytest.raises(InvalidInput, match=r"sampling\.choice"):
        structure_of(SAMPLING(choice={}), None, None)
    members: dict[str, Any]
    for members in ({"choice": {"texts": ["word"] * 100_000}}, {"regex": "a" * 600_000}, {"grammar": "a" * 600_000}):
        with pytest.raises(InvalidInput, match="at most 262144 are taken") as caught:
            structure_of(SAMPLING(**members), None, None)
        assert [caught.value.field] == [f"sampling.{name}" for name in members]


def tag_of(schema: dict[str, Any], older: bool) -> str:
    """A structural tag in which a text of `schema` follows <a>."""
    if older:
        return json.dumps({"structures": [{"begin": "<a>", "schema": schema, "end": "</a>"}], "triggers": ["<a>"]})
    inner = {"type": "json_schema", "json_schema": schema}
    tag = {"type": "tag", "begin": "<a>", "content": inner, "end": "</a>"}
    return json.dumps({"type": "structural_tag", "format": {"type": "sequence", "elements": [tag]}})


ENDLESS: dict[str, Any] = {"type": "array", "items": {"$ref": "#/$defs/a"}, "minItems": 1}
ENDLESS["$defs"] = {"a": {"type": "array", "items": {"$ref": "#/$defs/a"}, "minItems": 1}}
NO_END: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "grammar": ({"grammar": 'root ::= "a" root'}, {"grammar": 'root ::= "a" root | "b"'}),
    "a rule of a grammar": (
        {"grammar": 'root ::= "a" | "b" more\nmore ::= "c" more'},
        {"grammar": 'root ::= "a" | "b" more\nmore ::= "c" more | "d"'},
    ),
    "lark": ({"grammar": 'start: "a" start'}, {"grammar": 'start: "a" start | "b"'}),
    "tag": ({"structural_tag": tag_of(ENDLESS, False)}, {"structural_tag": tag_of({"type": "array"}, False)}),
    "older tag": ({"structural_tag": tag_of(ENDLESS, True)}, {"structural_tag": tag_of({"type": "array"}, True)}),
}


@pytest.mark.parametrize("kind", NO_END)
def test_a_structure_without_an_end_is_refused(kind: str) -> None:
    """Whatever it is written in."""
    for members, ends in zip(NO_END[kind], (False, True), strict=True):
        params = structure_of(SAMPLING(**members), None, None)
        assert params is not None
        with nullcontext() if ends else pytest.raises(ValueError, match="no text that ends fits it"):
            check_allows_text(*spec(params))


LOOP: dict[str, Any] = {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}
NO_TEXT = [
    {"$ref": "#/$defs/a", **LOOP},
    {"type": "object", "properties": {"x": {"$ref": "#/$defs/a"}}, "required": ["x"], **LOOP},
    {"type": "object", "properties": {"kid": {"$ref": "#"}}, "required": ["kid"]},
    {"type": "array", "items": {"$ref": "#"}, "minItems": 1},
    {"anyOf": [{"$ref": "#"}, {"type": "array", "items": {"$ref": "#"}, "minItems": 2}]},
    # a text may come to where only white space follows
    {"type": "object", "properties": {"x": {"$ref": "#/$defs/a"}}, "additionalProperties": False, **LOOP},
    {
        "anyOf": [
            {"type": "object", "properties": {"kid": {"$ref": "#/anyOf/0"}}, "required": ["kid"]},
            {"type": "null"},
        ]
    },
]


@pytest.mark.parametrize("schema", NO_TEXT)
def test_a_schema_that_no_text_fits_is_refused(schema: dict[str, Any]) -> None:
    params = structure_of(SAMPLING(json_schema=json.dumps(schema)), None, None)
    assert params is not None
    with pytest.raises(ValueError, match="no text that ends fits it"):
        check_allows_text("json", str(params.json))


@pytest.mark.parametrize(
    "schema",
    [
        *(case[0].model_json_schema() for case in PARAMETERS.values() if case[1]),
        *(TypeAdapter(kind).json_schema() for kind, _, _ in MEMBERS.values()),
        {"type": "object", "properties": {"x": {"type": "array", "items": {"$ref": "#"}}}, "required": ["x"], **LOOP},
        {"anyOf": [{"$ref": "#"}, {"type": "null"}]},
        {"enum": ["a | b", '"(', "::= ["]},
    ],
)
def test_others_are_not(schema: dict[str, Any]) -> None:
    params = structure_of(SAMPLING(json_schema=json.dumps(schema)), None, None)
    assert params is not None
    check_allows_text("json", str(params.json))
