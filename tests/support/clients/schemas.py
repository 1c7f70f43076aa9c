"""Values of the schemas that the OpenAPI document has."""

from typing import Any

Schema = dict[str, Any]


def sample(schema: Schema) -> Any:
    """A value of `schema`, with what it needs. Models are the scripted ones."""
    for choices in (schema.get("anyOf"), schema.get("oneOf")):
        if choices:
            return sample(choices[0])
    if "const" in schema or "enum" in schema:
        return schema.get("const", (schema.get("enum") or [None])[0])
    match schema.get("type"):
        case "object":
            needed = {name: sample(schema["properties"][name]) for name in schema.get("required", ())}
            return needed | {"model": "scripted"} if "model" in schema.get("properties", {}) else needed
        case "array":
            return [sample(schema["items"])]
        case "string" if schema.get("format") == "binary":
            return b"x"
        case kind:
            return {"string": "x", "integer": 1, "number": 1, "boolean": True}.get(str(kind))
