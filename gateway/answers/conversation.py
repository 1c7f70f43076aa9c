"""Messages of a chat request."""

from collections.abc import Iterator
from difflib import get_close_matches
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Discriminator, Field, Tag, model_validator

from gateway.answers.harmless import CACHING, MEDIA, OF_OTHER_MESSAGES
from gateway.errors import invalid
from gateway.validation import Lenient, Listed, Strict, ignoring
from services.common.text import ROLE_NAME

_Part = ignoring(Strict, *CACHING)
_Message = ignoring(Strict, *CACHING, empty=OF_OTHER_MESSAGES)
_ANSWERED = ConfigDict(extra="ignore")


class TextPart(ignoring(_Part, "annotations")):
    type: Literal["text"]
    text: str


class AnswerText(TextPart):
    """Of an earlier answer, which may have more."""

    model_config = _ANSWERED


class RefusalPart(Lenient):
    """An earlier refusal; read as text."""

    type: Literal["refusal"]
    refusal: str


class MediaUrl(ignoring(Strict, *MEDIA)):
    """https, http or data URL; "": none was sent."""

    url: str = Field(min_length=1)


class ImageUrl(MediaUrl):
    detail: str | None = Field(default=None, description="accepted; without effect")


class InputAudio(Strict):
    """A sound in the request itself."""

    data: str = Field(min_length=1, description="the file in base64, or a data URL of it")
    format: Literal["wav", "mp3", "flac", "ogg", "opus", "aac", "m4a", "mp4", "webm"] = Field(
        description="of the file; how it is read, its data say"
    )

    @property
    def url(self) -> str:
        """The file as a data URL; "": none was sent."""
        return self.data if not self.data or self.data.startswith("data:") else f"data:;base64,{self.data}"


# What stands for a file that is not sent.
_UNSENT = {
    "image_url": ImageUrl.model_construct(url=""),
    "audio_url": MediaUrl.model_construct(url=""),
    "video_url": MediaUrl.model_construct(url=""),
    "input_audio": InputAudio.model_construct(data="", format="wav"),
}


class _Medium(_Part):
    """A file, with or instead of which there may be a name."""

    uuid: str | int | None = Field(default=None, description="names the file; alone, the file that it named before")

    @model_validator(mode="before")
    @classmethod
    def _named(cls, part: Any) -> Any:
        """With a name, a file may be absent."""
        member = next(name for name in cls.model_fields if name in _UNSENT)
        if not isinstance(part, dict) or part.get("uuid") in (None, "") or not _is_empty(part.get(member)):
            return part
        return part | {member: _UNSENT[member]}


def _is_empty(medium: Any) -> bool:
    has_file = isinstance(medium, dict) and any(medium[name] for name in medium if name not in ("detail", "format"))
    return medium is None or (isinstance(medium, dict) and not has_file)


class ImagePart(_Medium):
    type: Literal["image_url"]
    image_url: ImageUrl


class AnswerImage(ImagePart):
    """Of an earlier answer, which may have more."""

    model_config = _ANSWERED

    @model_validator(mode="before")
    @classmethod
    def _named(cls, part: Any) -> Any:
        return part


class InputAudioPart(_Medium):
    type: Literal["input_audio"]
    input_audio: InputAudio


class AudioUrlPart(_Medium):
    type: Literal["audio_url"]
    audio_url: MediaUrl


class VideoUrlPart(_Medium):
    type: Literal["video_url"]
    video_url: MediaUrl


class GivenFile(Strict):
    """One of file_id and file_data."""

    file_id: str | None = Field(default=None, description="of an uploaded file")
    file_data: str | None = Field(default=None, description="base64, or a data URL, which says what it is")
    filename: str | None = Field(default=None, description="its ending says what it is, where nothing else does")

    @model_validator(mode="after")
    def _is_one(self) -> Self:
        if bool(self.file_id) == bool(self.file_data):
            raise ValueError("must have file_id or file_data, and not both")
        return self


class FilePart(_Part):
    """A text, an image, a sound or a video: before a message is read, it becomes a part of its kind."""

    type: Literal["file"]
    file: GivenFile


def _as_parts(content: Any) -> Any:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def _as_parts_or_none(content: Any) -> Any:
    """Of turns that were interrupted, and of tools that return nothing."""
    return [] if content is None else _as_parts(content)


MediaPart = ImagePart | InputAudioPart | AudioUrlPart | VideoUrlPart
UserPart = Annotated[TextPart | MediaPart | FilePart, Field(discriminator="type")]
TextOnly = Annotated[Listed[Annotated[TextPart, Field()]], BeforeValidator(_as_parts_or_none)]
UserContent = Annotated[Listed[UserPart], Field(min_length=1), BeforeValidator(_as_parts)]
ToolContent = Annotated[Listed[UserPart], BeforeValidator(_as_parts_or_none)]
AssistantPart = Annotated[AnswerText | RefusalPart | AnswerImage, Field(discriminator="type")]
AssistantContent = Annotated[Listed[AssistantPart], BeforeValidator(_as_parts)]


class SystemMessage(_Message):
    """Instructions; "developer" is OpenAI's newer name for the same."""

    role: Literal["system", "developer"]
    content: TextOnly = Field(default=[])
    name: str | None = None


class UserMessage(_Message):
    role: Literal["user"]
    content: UserContent
    name: str | None = None


class ToolMessage(_Message):
    """The result of a tool call."""

    role: Literal["tool"]
    content: ToolContent = Field(default=[])
    tool_call_id: str
    name: str | None = None


class FunctionCall(Lenient):
    name: str
    arguments: str = Field(default="", description="JSON as the model wrote it, even if it was cut off")


class ToolCall(Lenient):
    """Of an earlier answer: clients send back more than is read."""

    id: str
    type: Literal["function"] = "function"
    function: FunctionCall

    @classmethod
    def of(cls, call_id: str, name: str, arguments: str) -> Self:
        return cls(id=call_id, type="function", function=FunctionCall(name=name, arguments=arguments))


class AudioReference(Lenient):
    """Names an earlier answer's audio. Its other members may be sent back; they are not read."""

    id: str


class AssistantMessage(Lenient):
    """An earlier answer. Members that mean nothing here are not read. The thought before it is `reasoning_content`, or
    `reasoning` as vLLM calls it.
    """

    role: Literal["assistant"]
    content: AssistantContent | None = None
    name: str | None = None
    audio: AudioReference | None = None
    tool_calls: Listed[ToolCall] | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    images: Any = Field(default=None, description="pictures that image_generation made; not read without that tool")


def sent_images(message: AssistantMessage, field: str) -> Iterator[tuple[str, str | None]]:
    """(URL, prompt if known) of each of an answer's `images`. Raises ApiError: 400."""
    given = message.images or []
    if not isinstance(given, list):
        raise invalid(f"{field}.images", "must be a list of {type: image_url, image_url: {url}}", "invalid_type")
    for i, each in enumerate(given):
        place = each.get("image_url") if isinstance(each, dict) else None
        url = place.get("url") if isinstance(place, dict) else None
        if not isinstance(url, str) or not url:
            reason = "required: send the picture back as it was told"
            raise invalid(f"{field}.images[{i}].image_url.url", reason, "missing_required_parameter")
        prompt = each.get("revised_prompt")
        yield url, prompt if isinstance(prompt, str) else None


_ROLES = ("system", "developer", "user", "assistant", "tool")


def _no_misspelling(role: str) -> str:
    if get_close_matches(role.lower(), (*_ROLES, "function"), 1, 0.7):
        raise ValueError(f"must be one of {', '.join(_ROLES)}, or another name that is not so like one of these")
    return role


class OtherMessage(_Message):
    """Of a role that the model's chat template writes, beside the usual ones. The thinker refuses others."""

    role: Annotated[str, Field(pattern=f"^{ROLE_NAME}$"), AfterValidator(_no_misspelling)]
    content: TextOnly
    name: str | None = None


def _kind_of_message(message: Any) -> str:
    role = message.get("role") if isinstance(message, dict) else getattr(message, "role", None)
    return "system" if role == "developer" else str(role) if role in _ROLES else "other"


Message = Annotated[
    Annotated[SystemMessage, Tag("system")]
    | Annotated[UserMessage, Tag("user")]
    | Annotated[AssistantMessage, Tag("assistant")]
    | Annotated[ToolMessage, Tag("tool")]
    | Annotated[OtherMessage, Tag("other")],
    Discriminator(_kind_of_message),
]
