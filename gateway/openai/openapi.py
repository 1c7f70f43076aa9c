"""What /docs says of endpoints whose bodies are read and checked by hand, to answer in OpenAI's error body."""

from typing import Any

from pydantic import BaseModel

FILE = {"type": "string", "format": "binary"}
_ERROR = {"description": "OpenAI's error body: {error: {message, type, param, code}}"}


def _inlined(schema: dict[str, Any]) -> dict[str, Any]:
    """`schema` without $refs: OpenAPI resolves them against the whole page, not against this schema."""
    definitions = schema.pop("$defs", {})

    def resolve(node: Any) -> Any:
        if isinstance(node, list):
            return [resolve(item) for item in node]
        if not isinstance(node, dict):
            return node
        if "$ref" in node:
            return resolve(definitions[node["$ref"].rsplit("/", 1)[1]])
        # a discriminator's mapping names definitions too
        return {key: resolve(value) for key, value in node.items() if key != "discriminator"}

    return resolve(schema)


def page(model: type[BaseModel], media_type: str, answer: str, files: dict[str, Any] | None = None) -> dict[str, Any]:
    """What the page says of an endpoint.

    Args:
        model: its body.
        media_type: of the body.
        answer: what comes back.
        files: the schemas of members that are files.
    """
    schema = _inlined(model.model_json_schema())
    if files:
        schema["properties"] |= files
        schema["required"] += ["image"]
    return {
        "requestBody": {"required": True, "content": {media_type: {"schema": schema}}},
        "responses": {
            "200": {"description": answer, "content": {"application/json": {}, "text/event-stream": {}}},
            **dict.fromkeys(("400", "401", "404", "413", "429", "500", "503", "504"), _ERROR),
        },
    }
