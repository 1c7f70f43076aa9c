"""What /docs says of endpoints whose bodies are read and checked by hand, to answer in OpenAI's error body."""

from typing import Any

from gateway.openai.schema import ChatCompletionRequest

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


CHAT_OPENAPI: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": {"application/json": {"schema": _inlined(ChatCompletionRequest.model_json_schema())}},
    },
    "responses": {
        "200": {
            "description": "chat.completion, or with stream: true chat.completion.chunk events and [DONE]",
            "content": {"application/json": {}, "text/event-stream": {}},
        },
        **dict.fromkeys(("400", "404", "413", "429", "500", "503", "504"), _ERROR),
    },
}
