"""What /docs says of endpoints whose bodies are read and checked by hand, to answer in OpenAI's error body."""

from copy import deepcopy
from typing import Any

from pydantic import BaseModel

from gateway.openai.image_request import ImageRequest
from gateway.openai.schema import ChatCompletionRequest
from gateway.openai.sound_request import MEDIA_TYPES, SoundRequest
from gateway.openai.video_request import VideoRequest

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


def _page(model: type[BaseModel], media_type: str, answer: str, files: dict[str, Any] | None = None) -> dict[str, Any]:
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


_FILE = {"type": "string", "format": "binary"}
_IMAGES = "ImagesResponse, or with stream: true {0}.partial_image and {0}.completed events"
CHAT_OPENAPI = _page(
    ChatCompletionRequest,
    "application/json",
    "chat.completion, or with stream: true chat.completion.chunk events and [DONE]",
)
IMAGE_OPENAPI = _page(ImageRequest, "application/json", _IMAGES.format("image_generation"))
IMAGE_EDIT_OPENAPI = _page(
    ImageRequest,
    "multipart/form-data",
    _IMAGES.format("image_edit"),
    {"image": {"type": "array", "items": _FILE, "description": "also as image[]"}, "mask": _FILE},
)

VIDEO_OPENAPI = _page(VideoRequest, "application/json", "the new Video object")
_VIDEO_FORM = deepcopy(VIDEO_OPENAPI["requestBody"]["content"]["application/json"])
_VIDEO_FORM["schema"]["properties"]["input_reference"] = _FILE
VIDEO_OPENAPI["requestBody"]["content"]["multipart/form-data"] = _VIDEO_FORM
VIDEO_OPENAPI["responses"]["200"]["content"] = {"application/json": {}}
SOUND_OPENAPI = _page(SoundRequest, "application/json", "the file")
SOUND_OPENAPI["responses"]["200"]["content"] = {media_type: {} for media_type in MEDIA_TYPES.values()}
