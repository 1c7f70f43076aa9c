"""GenerateStart and MediaChunks as a Conversation."""

from collections.abc import AsyncIterator
from typing import Any

from quartet.v1 import media_pb2, thinker_pb2
from services.common.rpc.errors import InvalidInput
from services.common.rpc.messages import read_bytes
from services.thinker.config import ThinkerSettings
from services.thinker.conversation import Conversation, MediaFile, MediaKind, Message
from services.thinker.sampling import check_json_object
from services.thinker.tools import Mode, ToolChoice

_ROLES = ("system", "user", "assistant", "tool")
_KINDS: dict[int, MediaKind] = {
    media_pb2.MEDIA_KIND_IMAGE: "image",
    media_pb2.MEDIA_KIND_AUDIO: "audio",
    media_pb2.MEDIA_KIND_VIDEO: "video",
}
_MODES: dict[int, Mode] = {
    thinker_pb2.ToolChoice.MODE_UNSPECIFIED: "auto",
    thinker_pb2.ToolChoice.MODE_AUTO: "auto",
    thinker_pb2.ToolChoice.MODE_NONE: "none",
    thinker_pb2.ToolChoice.MODE_REQUIRED: "required",
    thinker_pb2.ToolChoice.MODE_FUNCTION: "function",
}


async def read_conversation(
    start: thinker_pb2.GenerateStart,
    tools: list[dict[str, Any]],
    requests: AsyncIterator[thinker_pb2.GenerateRequest],
    limits: ThinkerSettings,
) -> Conversation:
    """The conversation about `tools`, with the media that follow `start` in `requests`.

    Raises:
        InvalidInput: names the field.
    """
    if not start.messages:
        raise InvalidInput("messages", "must not be empty")
    _check_media(start, limits)
    messages = [
        Message(
            role=_role(f"messages[{i}].role", message.role),
            parts=[
                await _part(f"messages[{i}].content[{j}]", part, requests) for j, part in enumerate(message.content)
            ],
            tool_calls=[
                {
                    "id": call.id,
                    "type": "function",
                    "function": {
                        "name": call.name,
                        "arguments": check_json_object(
                            f"messages[{i}].tool_calls[{j}].arguments_json", call.arguments_json or "{}"
                        ),
                    },
                }
                for j, call in enumerate(message.tool_calls)
            ],
            tool_call_id=message.tool_call_id,
            name=message.name,
        )
        for i, message in enumerate(start.messages)
    ]
    template_kwargs: dict[str, Any] = {}
    if start.chat_template_kwargs_json:
        template_kwargs = check_json_object("chat_template_kwargs_json", start.chat_template_kwargs_json)
        if "chat_template" in template_kwargs:  # a template is a program, and nothing limits the time it takes
            raise InvalidInput("chat_template_kwargs_json", "may set the template's variables, not the template")
    return Conversation(messages, tools, start.use_audio_in_video, template_kwargs)


def read_tools(start: thinker_pb2.GenerateStart) -> tuple[ToolChoice, list[dict[str, Any]]]:
    """What is to be called, "none" where there is nothing to call; and the tools as chat templates take them.

    Raises:
        InvalidInput: an unknown mode, a tool without a name, or a schema that is no JSON object.
    """
    if start.tool_choice.mode not in _MODES:
        raise InvalidInput("tool_choice.mode", f"{start.tool_choice.mode} is not a mode")
    mode = _MODES[start.tool_choice.mode]
    choice = ToolChoice("none" if mode == "auto" and not start.tools else mode, start.tool_choice.name)
    tools = []
    for i, tool in enumerate(start.tools):
        if not tool.name:
            raise InvalidInput(f"tools[{i}].name", "is required")
        function: dict[str, Any] = {"name": tool.name}
        if tool.description:
            function["description"] = tool.description
        parameters = tool.parameters_json or "{}"
        function["parameters"] = check_json_object(f"tools[{i}].parameters_json", parameters)
        tools.append({"type": "function", "function": function})
    return choice, tools


def _role(field: str, role: str) -> str:
    if role not in _ROLES:
        raise InvalidInput(field, f"must be one of {', '.join(_ROLES)}, not '{role}'")
    return role


def _media_of(start: thinker_pb2.GenerateStart) -> list[tuple[str, media_pb2.Media]]:
    return [
        (part.media.field or f"messages[{i}].content[{j}]", part.media)
        for i, message in enumerate(start.messages)
        for j, part in enumerate(message.content)
        if part.WhichOneof("content") == "media"
    ]


def _check_media(start: thinker_pb2.GenerateStart, limits: ThinkerSettings) -> None:
    """Refuses what is too much before any of it is read."""
    counts: dict[MediaKind, int] = {"image": 0, "audio": 0, "video": 0}
    most = {"image": limits.max_images, "audio": limits.max_audios, "video": limits.max_videos}
    size_bytes = 0
    for field, media in _media_of(start):
        kind = _KINDS.get(media.kind)
        if kind is None:
            raise InvalidInput(field, "must state its kind: image, audio or video")
        counts[kind] += 1
        if counts[kind] > most[kind]:
            raise InvalidInput(field, f"is one {kind} too many; at most {most[kind]} are taken")
        if not media.data and not media.size_bytes:
            raise InvalidInput(field, "is empty")
        size_bytes += len(media.data) or media.size_bytes
        if size_bytes > limits.max_media_bytes:
            raise InvalidInput(field, f"makes the media larger than the {limits.max_media_bytes} bytes that are taken")


async def _part(
    field: str, part: thinker_pb2.ContentPart, requests: AsyncIterator[thinker_pb2.GenerateRequest]
) -> str | MediaFile:
    kind = part.WhichOneof("content")
    if kind == "text":
        return part.text
    if kind is None:
        raise InvalidInput(field, "must have text or media")
    media = part.media
    field = media.field or field
    return MediaFile(_KINDS[media.kind], media.data or await read_bytes(field, media.size_bytes, requests), field)
