"""Messages, tools and media of a request as the thinker's start message has them."""

import json
from collections.abc import Iterable, Sequence
from typing import Any

from gateway.answers import conversation
from gateway.answers.conversation import Message
from gateway.answers.gateway import Gateway
from gateway.answers.request import AnyTool, Tool, ToolChoice
from gateway.answers.transcription.sound_transcripts import hears, transcripts_of
from gateway.errors import ApiError, invalid
from gateway.media.check import MediaFile, load_media
from gateway.media.kept import MediaName
from quartet.v1 import media_pb2, thinker_pb2
from services.common.rpc.channels import MAX_MESSAGE_BYTES

MAX_START_BYTES = MAX_MESSAGE_BYTES - 64 * 1024  # the request's id and gRPC's own words come on top
MAX_INLINE_BYTES = 4 * 1024 * 1024  # of media in the start message; what is beyond follows in chunks

Pending = tuple[thinker_pb2.ContentPart, MediaFile]
"""A part with media of a message to the thinker, and its file."""


def fill_messages(
    start: thinker_pb2.GenerateStart,
    gateway: Gateway,
    messages: Sequence[Message],
    owner: str | None,
    model: str | None = None,
) -> list[Pending]:
    """Adds `owner`'s messages to `start`; returns media to attach.

    Args:
        model: that answers. One that makes images, too, is shown those of its earlier answers.

    Raises:
        ApiError: 400 naming what is at fault.
    """
    parts = [part for message in messages for part in message.content or ()]
    refuse_long((part.text for part in parts if isinstance(part, conversation.TextPart)), "messages")
    pending: list[Pending] = []
    shows = bool(model) and gateway.catalog.also_makes_images(model)
    for i, message in enumerate(messages):
        place, files, left = f"messages[{i}]", list[MediaFile](), message
        if shows and isinstance(message, conversation.AssistantMessage):
            files, left = _own_images(message, place, owner)
        if left is not None:
            pending += _fill_message(start.messages.add(), gateway, left, place, owner)
        if files:  # chat templates have no place for images of an answer
            shown = start.messages.add(role="user")
            pending += [_add_file(shown, file) for file in files]
    return pending


def _own_images(
    message: conversation.AssistantMessage, place: str, owner: str | None
) -> tuple[list[MediaFile], conversation.AssistantMessage | None]:
    """The images of an earlier answer, and what else is in it. Raises ApiError: 400."""
    inline = [(j, part) for j, part in enumerate(message.content or ()) if isinstance(part, conversation.ImagePart)]
    files = [media_file(part, f"{place}.content[{j}]", owner) for j, part in inline]
    files += sent_files(message, place)
    words = [part for part in message.content or () if not isinstance(part, conversation.ImagePart)]
    left = message.model_copy(update={"content": words or None})
    says = words or message.tool_calls or message.audio or not files
    return files, left if says else None


def sent_files(message: conversation.AssistantMessage, place: str) -> list[MediaFile]:
    """Of an earlier answer's `images`. Raises ApiError: 400."""
    urls = [url for url, _ in conversation.sent_images(message, place)]
    return [MediaFile(f"{place}.images[{i}].image_url.url", "image", url) for i, url in enumerate(urls)]


def _add_file(message: thinker_pb2.ChatMessage, file: MediaFile) -> Pending:
    media = media_pb2.Media(kind=f"MEDIA_KIND_{file.kind.upper()}", field=file.field)
    return message.content.add(media=media), file


def _fill_message(
    result: thinker_pb2.ChatMessage, gateway: Gateway, message: Message, place: str, owner: str | None
) -> list[Pending]:
    pending: list[Pending] = []
    result.role = "system" if message.role == "developer" else message.role
    result.name = getattr(message, "name", None) or ""
    for j, part in enumerate(message.content or ()):
        field = f"{place}.content[{j}]"
        if isinstance(part, conversation.TextPart):
            result.content.add(text=part.text)
        elif isinstance(part, conversation.RefusalPart):
            result.content.add(text=part.refusal)
        elif isinstance(message, conversation.AssistantMessage):
            raise invalid(field, "this model reads images in the user's messages only")
        elif isinstance(part, conversation.FilePart):
            raise invalid(f"{field}.type", "files are not read here; send their parts as text, image_url, ...")
        else:
            pending.append(_add_file(result, media_file(part, field, owner)))
    if isinstance(message, conversation.AssistantMessage):
        if message.audio and not message.content:
            transcript = gateway.transcripts.get(message.audio.id)
            if transcript is None:
                why = "has expired, or is another gateway's; send the answer's text as content instead"
                reason = f"{message.audio.id!r} is unknown: it {why}"
                raise invalid(f"{place}.audio.id", reason)
            result.content.add(text=transcript)
        result.reasoning = message.reasoning_content or message.reasoning or ""
        for call in message.tool_calls or ():
            result.tool_calls.add(id=call.id, name=call.function.name, arguments_json=call.function.arguments)
    elif isinstance(message, conversation.ToolMessage):
        result.tool_call_id = message.tool_call_id
    return pending


def fill_tools(start: thinker_pb2.GenerateStart, tools: Sequence[AnyTool] | None, choice: ToolChoice | None) -> None:
    """Raises ApiError: 400, a tool is no function."""
    for i, tool in enumerate(tools or ()):
        if not isinstance(tool, Tool):
            raise invalid(f"tools[{i}].type", "Input should be 'function'")
        function = tool.function
        parameters = "" if function.parameters is None else json.dumps(function.parameters, ensure_ascii=False)
        start.tools.add(name=function.name, description=function.description or "", parameters_json=parameters)
    if choice:
        name = choice.function.name if choice.function else ""
        start.tool_choice.CopyFrom(thinker_pb2.ToolChoice(mode=f"MODE_{choice.type.upper()}", name=name))


async def attach_media(gateway: Gateway, pending: Sequence[Pending], request_id: str, owner: str | None) -> list[bytes]:
    """Loads the files and puts them into their messages; returns those that follow in chunks. A thinker that does not
    hear reads what is said in sounds, if another model can tell. Raises ApiError."""
    await load_media(gateway.fetcher, [file for _, file in pending])
    if not hears(gateway):
        sounds = [(part, file) for part, file in pending if file.kind == "audio"]
        pending = [(part, file) for part, file in pending if file.kind != "audio"]
        said = await transcripts_of(gateway, [file for _, file in sounds], request_id, owner)
        for (part, _), text in zip(sounds, said, strict=True):
            part.text = text
    return attach([(part.media, file.content) for part, file in pending])


def attach(media: Sequence[tuple[media_pb2.Media, bytes]]) -> list[bytes]:
    """Puts files into their messages; returns those that have to follow in chunks."""
    late, inline_bytes = [], 0
    for message, content in media:
        if inline_bytes + len(content) <= MAX_INLINE_BYTES:
            message.data = content
            inline_bytes += len(content)
        else:
            message.size_bytes = len(content)
            late.append(content)
    return late


def media_file(part: conversation.MediaPart, field: str, owner: str | None) -> MediaFile:
    """The file of a part of `owner`'s; not loaded."""
    name = None if part.uuid in (None, "") else MediaName(owner, str(part.uuid))
    kind = "audio" if part.type == "input_audio" else part.type.removesuffix("_url")
    return MediaFile(field, kind, getattr(part, part.type).url, name=name)


def refuse_large(start: Any, field: str) -> None:
    """Raises ApiError: 400 naming `field`."""
    if start.ByteSize() > MAX_START_BYTES:
        raise _too_long(field)


def refuse_long(texts: Iterable[str], field: str) -> None:
    """As `refuse_large`, before there is a message: that copies the texts. Raises ApiError."""
    if sum(map(len, texts)) > MAX_START_BYTES:
        raise _too_long(field)


def _too_long(field: str) -> ApiError:
    return invalid(field, "more text than a request can have", "context_length_exceeded")
