"""Parts of items, and chat's form of them."""

from collections.abc import Callable, Sequence
from typing import Any

from pydantic import Field

from gateway.answers import conversation
from gateway.answers.files.parts import data_url, image_part, part_of_file, text_part, video_part
from gateway.errors import invalid
from gateway.validation import Lenient, within

Item = dict[str, Any]
"""An item or a part in OpenAI's form, as it is stored."""


class InputText(Lenient):
    text: str


class Refusal(Lenient):
    refusal: str


class InputImage(Lenient):
    image_url: str | None = Field(default=None, description="https, http or data URL")
    file_id: str | None = Field(default=None, description="of an uploaded image, instead of image_url")
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
    file_id: str | None = Field(default=None, description="of an uploaded file, instead of these")
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
        return [text_part(parts)]
    return [_CHAT_PARTS[part["type"]](part, f"{field}[{i}]") for i, part in enumerate(parts)]


def _url(part: Item, member: str, field: str) -> str:
    if part.get(member):
        return part[member]
    if part.get("file_id"):
        raise invalid(f"{field}.file_id", f"no uploaded files are read here; send {member}")
    raise invalid(f"{field}.{member}", "required, but missing", "missing_required_parameter")


def _audio(part: Item, _: str) -> conversation.InputAudioPart:
    return conversation.InputAudioPart(type="input_audio", input_audio=conversation.InputAudio(**part["input_audio"]))


def _file(part: Item, field: str) -> Any:
    member = "file_data" if part.get("file_data") else "file_url"
    url = data_url(part["file_data"]) if part.get("file_data") else _url(part, "file_url", field)
    return part_of_file(url, part.get("filename") or "", f"{field}.{'file_id' if part.get('file_id') else member}")


_CHAT_PARTS: dict[str, Callable[[Item, str], Any]] = {
    **dict.fromkeys(_TEXTS, lambda part, _: text_part(part["text"])),
    "refusal": lambda part, _: text_part(part["refusal"]),
    "output_audio": lambda _part, _field: text_part(""),
    "input_image": lambda part, field: image_part(_url(part, "image_url", field)),
    "input_audio": _audio,
    "input_video": lambda part, _: video_part(part["video_url"]),
    "input_file": _file,
}
