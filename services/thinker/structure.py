"""The grammar of an answer: what its text must be, by the request's structure and by its choice of tools."""

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from quartet.v1 import thinker_pb2
from services.common.errors import InvalidInput, require
from services.thinker.family import ToolCallMarkers
from services.thinker.schemas import define, standalone

if TYPE_CHECKING:
    from vllm.sampling_params import StructuredOutputsParams

MOST_BYTES = 256 * 1024
"""Of a grammar, with all schemas that it is made of."""

ToolChoice = thinker_pb2.ToolChoice
Format = Mapping[str, Any]
"""Of XGrammar's structural tags."""


def forced_schema(mode: thinker_pb2.ToolChoice.Mode, name: str, tools: Sequence[dict[str, Any]]) -> str | None:
    """The JSON schema of the call that a choice of `tools`, as chat templates take them, forces; None: it forces none.

    `name` is the tool of MODE_FUNCTION. Raises InvalidInput: there is no such tool.
    """
    if mode not in (ToolChoice.MODE_REQUIRED, ToolChoice.MODE_FUNCTION):
        return None
    parameters = {tool["function"]["name"]: tool["function"].get("parameters") or {} for tool in tools}
    require(parameters, "tool_choice", "forces a call, but there are no tools")
    if mode == ToolChoice.MODE_FUNCTION:
        require(name in parameters, "tool_choice.name", f"'{name}' is not one of the tools {sorted(parameters)}")
        parameters = {name: parameters[name]}
    places = {tool: f"arguments_{i}" for i, tool in enumerate(parameters)}
    definitions: dict[str, Any] = {}
    fields = {tool["function"]["name"]: f"tools[{i}].parameters_json" for i, tool in enumerate(tools)}
    for tool, place in places.items():
        define(parameters[tool], place, definitions, fields[tool])
    calls = [
        {
            "type": "object",
            "properties": {"name": {"const": tool}, "arguments": {"$ref": f"#/$defs/{place}"}},
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for tool, place in places.items()
    ]
    return json.dumps({"anyOf": calls, "$defs": definitions})


def calls_of(tools: Sequence[dict[str, Any]], markers: ToolCallMarkers) -> Format:
    """One or more calls of `tools` between markers, each `{"name": ..., "arguments": {...}}`."""
    tags = [
        {
            "type": "tag",
            "begin": f'{markers.opening}\n{{"name": {json.dumps(tool["function"]["name"])}, "arguments": ',
            "content": _schema_format(
                {"type": "object", **(tool["function"].get("parameters") or {})}, f"tools[{i}].parameters_json"
            ),
            "end": f"}}\n{markers.closing}",
        }
        for i, tool in enumerate(tools)
    ]
    return {"type": "tags_with_separator", "tags": tags, "separator": "\n", "at_least_one": True}


def structure_of(
    request: thinker_pb2.SamplingParameters, forced: str | None, calls: Format | None
) -> "StructuredOutputsParams | None":
    """vLLM's form of the grammar of an answer; None: it is free.

    Args:
        forced: JSON schema of a forced call. It goes before the request's structure, which is for an answer.
        calls: what may be written instead of the answer that the request describes; None: nothing.

    Raises:
        InvalidInput: names the field.
    """
    from vllm.sampling_params import StructuredOutputsParams
    from vllm.v1.structured_output.utils import choice_as_grammar

    kind = request.WhichOneof("structure")
    if forced is not None:
        return StructuredOutputsParams(json=forced)
    if kind is None or (kind == "json_object" and not request.json_object):
        return None
    if kind == "structural_tag":
        read_object("sampling.structural_tag", request.structural_tag)
        require(calls is None, "sampling.structural_tag", "cannot be beside tools; leave one of the two out")
    require(kind != "choice" or request.choice.texts, "sampling.choice", "must have at least one text")
    if kind not in ("json_object", "choice"):
        check_size(f"sampling.{kind}", getattr(request, kind), MOST_BYTES)
    schema = read_object("sampling.json_schema", request.json_schema) if kind == "json_schema" else {"type": "object"}
    texts = list(request.choice.texts)
    if calls is not None:
        answers: dict[str, Format] = {
            "json_schema": _schema_format(schema, "sampling.json_schema"),
            "json_object": _schema_format(schema, "sampling.json_schema"),
            "regex": {"type": "regex", "pattern": request.regex},
            "grammar": {"type": "grammar", "grammar": request.grammar},
            "choice": {"type": "or", "elements": [{"type": "const_string", "value": each} for each in texts]},
        }
        format_ = {"type": "or", "elements": [answers[kind], calls]}
        return StructuredOutputsParams(structural_tag=json.dumps({"type": "structural_tag", "format": format_}))
    if kind == "json_schema":
        return StructuredOutputsParams(json=json.dumps(standalone(schema, "sampling.json_schema")))
    if kind == "choice":
        grammar = choice_as_grammar(texts)
        check_size("sampling.choice", grammar, MOST_BYTES)
        return StructuredOutputsParams(grammar=grammar)
    return StructuredOutputsParams(**{kind: getattr(request, kind)})  # vLLM has the same names


def _schema_format(schema: Mapping[str, Any], field: str) -> Format:
    return {"type": "json_schema", "json_schema": standalone(schema, field)}


def check_size(field: str, text: str, most: int) -> None:
    """Raises InvalidInput, which names `field`: `text` has more bytes than `most`."""
    size = len(text.encode())
    require(size <= most, field, f"is {size} bytes; at most {most} are taken")


def read_object(field: str, text: str) -> dict[str, Any]:
    """The JSON object in `text`. Raises InvalidInput, which names `field`."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidInput(field, f"is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise InvalidInput(field, "must be a JSON object")
    return value
