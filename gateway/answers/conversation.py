"""Messages of a chat request."""

from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, ConfigDict, Field

from gateway.answers.harmless import CACHING, OF_OTHER_MESSAGES
from gateway.validation import Lenient, Listed, Strict, ignoring

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


class MediaUrl(Strict):
    """https, http or data URL."""

    url: str = Field(min_length=1)


class ImageUrl(MediaUrl):
    detail: str | None = Field(default=None, description="accepted; without effect")


class ImagePart(_Part):
    type: Literal["image_url"]
    image_url: ImageUrl


class AnswerImage(ImagePart):
    """Of an earlier answer, which may have more."""

    model_config = _ANSWERED


class InputAudio(Strict):
    """A sound in the request itself."""

    data: str = Field(min_length=1, description="the file in base64, or a data URL of it")
    format: Literal["wav", "mp3", "flac", "ogg", "opus", "aac", "m4a", "mp4", "webm"] = Field(
        description="of the file; how it is read, its data say"
    )

    @property
    def url(self) -> str:
        """The file as a data URL."""
        return self.data if self.data.startswith("data:") else f"data:;base64,{self.data}"


class InputAudioPart(_Part):
    type: Literal["input_audio"]
    input_audio: InputAudio


class AudioUrlPart(_Part):
    type: Literal["audio_url"]
    audio_url: MediaUrl


class VideoUrlPart(_Part):
    type: Literal["video_url"]
    video_url: MediaUrl


def _as_parts(content: Any) -> Any:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def _as_parts_or_none(content: Any) -> Any:
    """Of turns that were interrupted, and of tools that return nothing."""
    return [] if content is None else _as_parts(content)


MediaPart = ImagePart | InputAudioPart | AudioUrlPart | VideoUrlPart
UserPart = Annotated[TextPart | MediaPart, Field(discriminator="type")]
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


Message = Annotated[SystemMessage | UserMessage | AssistantMessage | ToolMessage, Field(discriminator="role")]
