"""Parts of items, and chat's form of them."""

import mimetypes
from collections.abc import Callable, Sequence
from typing import Any

from pydantic import Field

from gateway.answers import conversation
from gateway.errors import invalid
from gateway.media.fetch import from_base64, unescaped
from gateway.validation import Lenient, within
from services.common.media import MediaError

Item = dict[str, Any]
"""An item or a part in OpenAI's form, as it is stored."""

_TEXT_TYPES = ("text/", "application/json", "application/xml", "application/yaml", "application/toml")
_MAX_TEXT_FILE_CHARACTERS = 4 * 1024 * 1024


class InputText(Lenient):
    text: str


class Refusal(Lenient):
    refusal: str


class InputImage(Lenient):
    image_url: str | None = Field(default=None, description="https, http or data URL")
    file_id: str | None = None
    detail: str | None = Field(default=None, description="accepted; the model scales by itself")


class InputAudio(Lenient):
    """A sound, as chat's."""

    input_audio: conversation.InputAudio


class InputVideo(Lenient):
    """A video; not in OpenAI's API."""

    video_url: str = Field(min_length=1, description="https, http or data URL")


class InputFile(Lenient):
    """A text, an image, a sound or a video."""

    file_data: str | None = Field(default=None, description="base64, or a data URL, which says what it is")
    file_url: str | None = Field(default=None, description="https or http URL; not of a text")
    file_id: str | None = None
    filename: str | None = Field(default=None, description="its ending says what it is, where nothing else does")


class OutputAudio(Lenient):
    """Sound of an answer; ignored: the answer's text is a part too."""


_TEXTS = ("input_text", "output_text", "text", "summary_text", "reasoning_text")
_PARTS: dict[str, type[Lenient]] = {
    **dict.fromkeys(_TEXTS, InputText),
    "refusal": Refusal,
    "output_audio": OutputAudio,
    "input_image": InputImage,
    "input_audio": InputAudio,
    "input_video": InputVideo,
    "input_file": InputFile,
}
_SAID = ("input_text", "output_text", "text", "refusal", "output_audio")


def read_parts(given: str | list[Any], field: str, role: str) -> list[Item]:
    """Reads the parts of a message. Raises ApiError: 400 naming the part."""
    if isinstance(given, str):
        written = "output_text" if role == "assistant" else "input_text"
        return [{"type": written, "text": given} | ({"annotations": []} if role == "assistant" else {})]
    if not given and role == "user":
        raise invalid(field, "must not be empty")
    parts = []
    for i, part in enumerate(given):
        where = f"{field}[{i}]"
        if not isinstance(part, dict):
            raise invalid(where, "must be a part, an object with a type", "invalid_type")
        kind = part.get("type")
        if not isinstance(kind, str) or kind not in _PARTS:
            raise invalid(f"{where}.type", f"{str(kind)[:40]!r} is no part that is read here; use {', '.join(_PARTS)}")
        if role in ("system", "developer", "assistant") and kind not in _SAID:
            raise invalid(f"{where}.type", f"a message of role {role!r} has text only")
        within(_PARTS[kind], part, where)
        parts.append({name: value for name, value in part.items() if value is not None})
    return parts


def chat_parts(parts: str | Sequence[Item], field: str) -> list[Any]:
    """Chat's parts. Raises ApiError: 400 naming the part."""
    if isinstance(parts, str):
        return [_text(parts)]
    return [_CHAT_PARTS[part["type"]](part, f"{field}[{i}]") for i, part in enumerate(parts)]


def _text(text: str) -> conversation.TextPart:
    return conversation.TextPart(type="text", text=text)


def image_part(url: str) -> conversation.ImagePart:
    return conversation.ImagePart(type="image_url", image_url=conversation.ImageUrl(url=url))


def _url(part: Item, member: str, field: str) -> str:
    if part.get(member):
        return part[member]
    if part.get("file_id"):
        raise invalid(f"{field}.file_id", f"there are no uploaded files here; send {member}")
    raise invalid(f"{field}.{member}", "required, but missing", "missing_required_parameter")


def _audio(part: Item, _: str) -> conversation.InputAudioPart:
    return conversation.InputAudioPart(type="input_audio", input_audio=conversation.InputAudio(**part["input_audio"]))


def _video_part(url: str) -> conversation.VideoUrlPart:
    return conversation.VideoUrlPart(type="video_url", video_url=conversation.MediaUrl(url=url))


def _file(part: Item, field: str) -> Any:
    """Chat's part, by the type in the file's data URL, else by its name."""
    name = part.get("filename") or ""
    given = "file_data" if part.get("file_data") else "file_url"
    url = part.get("file_data") or _url(part, "file_url", field)
    is_data = url.startswith("data:")
    if given == "file_data" and not is_data:
        url, is_data = f"data:;base64,{url}", True
    media_type = url[5:].partition(",")[0].partition(";")[0] if is_data else ""
    if media_type in ("", "application/octet-stream"):
        media_type = mimetypes.guess_type(name or ("" if is_data else url.partition("?")[0]))[0] or ""
    kind = media_type.partition("/")[0]
    if kind == "image":
        return image_part(url)
    if kind == "audio":
        return conversation.AudioUrlPart(type="audio_url", audio_url=conversation.MediaUrl(url=url))
    if kind == "video":
        return _video_part(url)
    if not media_type.startswith(_TEXT_TYPES):
        unknown = "a file that neither its data URL nor its name tell of"
        what = f"a file of {media_type[:40]!r}" if media_type else unknown
        raise invalid(f"{field}.{given}", f"{what} is not read here; send text, an image, a sound or a video")
    if not is_data:
        raise invalid(f"{field}.file_url", "a text is not fetched; send it as file_data")
    text = _decoded(url, field)
    return _text(f"{name}:\n{text}" if name else text)


def _decoded(url: str, field: str) -> str:
    head, _, data = url.partition(",")
    if len(data) > _MAX_TEXT_FILE_CHARACTERS:
        raise invalid(f"{field}.file_data", "more text than a request can have", "context_length_exceeded")
    try:
        is_base64 = head.endswith(";base64")
        return (from_base64(data) if is_base64 else unescaped(data)).decode()
    except MediaError as error:
        raise invalid(f"{field}.file_data", str(error), "invalid_media") from None
    except ValueError:
        raise invalid(f"{field}.file_data", "is no UTF-8 text in base64", "invalid_media") from None


_CHAT_PARTS: dict[str, Callable[[Item, str], Any]] = {
    **dict.fromkeys(_TEXTS, lambda part, _: _text(part["text"])),
    "refusal": lambda part, _: _text(part["refusal"]),
    "output_audio": lambda _part, _field: _text(""),
    "input_image": lambda part, field: image_part(_url(part, "image_url", field)),
    "input_audio": _audio,
    "input_video": lambda part, _: _video_part(part["video_url"]),
    "input_file": _file,
}
