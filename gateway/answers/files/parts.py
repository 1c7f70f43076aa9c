"""Parts of a conversation that are files: a text, an image, a sound or a video."""

import mimetypes
from collections.abc import Sequence

from gateway.answers import conversation
from gateway.answers.conversation import FilePart, Message
from gateway.answers.files.contents import read_files
from gateway.answers.gateway import Gateway
from gateway.errors import invalid
from gateway.media.fetch import from_base64, unescaped
from services.common.media import MediaError

_TEXT_TYPES = ("text/", "application/json", "application/xml", "application/yaml", "application/toml")
_MAX_TEXT_FILE_CHARACTERS = 4 * 1024 * 1024


async def with_files(
    gateway: Gateway, messages: Sequence[Message], owner: str | None, place: str = "messages"
) -> list[Message]:
    """`owner`'s messages, in which files are parts of the kinds that models read.

    Args:
        place: of the messages in the request.

    Raises:
        ApiError: 400 naming the part.
    """
    parts = {
        (i, j): part
        for i, message in enumerate(messages)
        for j, part in enumerate(message.content or ())
        if isinstance(part, FilePart)
    }
    if not parts:
        return list(messages)
    fields = {(i, j): f"{place}[{i}].content[{j}].file" for i, j in parts}
    wanted: dict[str, str] = {}
    for at, part in parts.items():
        if part.file.file_id:
            wanted.setdefault(part.file.file_id, f"{fields[at]}.file_id")
    files = await read_files(gateway, wanted, owner)
    contents = [list(message.content or ()) for message in messages]
    for (i, j), part in parts.items():
        file, field = part.file, fields[i, j]
        if file.file_id:
            name, url = files[file.file_id]
            contents[i][j] = part_of_file(url, file.filename or name, f"{field}.file_id")
        else:
            contents[i][j] = part_of_file(data_url(file.file_data or ""), file.filename or "", f"{field}.file_data")
    with_parts = {i for i, _ in parts}
    return [
        message.model_copy(update={"content": contents[i]}) if i in with_parts else message
        for i, message in enumerate(messages)
    ]


def data_url(given: str) -> str:
    """Of a file in base64, if it is not one already."""
    return given if given.startswith("data:") else f"data:;base64,{given}"


def part_of_file(url: str, name: str, field: str) -> conversation.TextPart | conversation.MediaPart:
    """Chat's part, by the type in the file's data URL, else by its name. Raises ApiError: 400 naming `field`."""
    is_data = url.startswith("data:")
    media_type = url[5:].partition(",")[0].partition(";")[0] if is_data else ""
    if media_type in ("", "application/octet-stream"):
        media_type = mimetypes.guess_type(name or ("" if is_data else url.partition("?")[0]))[0] or ""
    kind = media_type.partition("/")[0]
    if kind == "image":
        return image_part(url)
    if kind == "audio":
        return conversation.AudioUrlPart(type="audio_url", audio_url=conversation.MediaUrl(url=url))
    if kind == "video":
        return video_part(url)
    if not media_type.startswith(_TEXT_TYPES):
        unknown = "a file that neither its data URL nor its name tell of"
        what = f"a file of {media_type[:40]!r}" if media_type else unknown
        raise invalid(field, f"{what} is not read here; send text, an image, a sound or a video")
    if not is_data:
        raise invalid(field, "a text is not fetched; send it as file_data")
    text = _decoded(url, field)
    return text_part(f"{name}:\n{text}" if name else text)


def _decoded(url: str, field: str) -> str:
    head, _, data = url.partition(",")
    if len(data) > _MAX_TEXT_FILE_CHARACTERS:
        raise invalid(field, "more text than a request can have", "context_length_exceeded")
    try:
        is_base64 = head.endswith(";base64")
        return (from_base64(data) if is_base64 else unescaped(data)).decode()
    except MediaError as error:
        raise invalid(field, str(error), "invalid_media") from None
    except ValueError:
        raise invalid(field, "is no UTF-8 text in base64", "invalid_media") from None


def text_part(text: str) -> conversation.TextPart:
    return conversation.TextPart(type="text", text=text)


def image_part(url: str) -> conversation.ImagePart:
    return conversation.ImagePart(type="image_url", image_url=conversation.ImageUrl(url=url))


def video_part(url: str) -> conversation.VideoUrlPart:
    return conversation.VideoUrlPart(type="video_url", video_url=conversation.MediaUrl(url=url))
