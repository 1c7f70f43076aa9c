"""Messages of a chat request."""

from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field

from gateway.validation import Lenient, Strict


class TextPart(Strict):
    type: Literal["text"]
    text: str


class RefusalPart(Strict):
    """An earlier refusal; read as text."""

    type: Literal["refusal"]
    refusal: str


class MediaUrl(Strict):
    """https, http or data URL."""

    url: str = Field(min_length=1)


class ImageUrl(MediaUrl):
    detail: Literal["auto", "low", "high"] | None = Field(default=None, description="accepted; without effect")


class ImagePart(Strict):
    type: Literal["image_url"]
    image_url: ImageUrl


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


class InputAudioPart(Strict):
    type: Literal["input_audio"]
    input_audio: InputAudio


class AudioUrlPart(Strict):
    type: Literal["audio_url"]
    audio_url: MediaUrl


class VideoUrlPart(Strict):
    type: Literal["video_url"]
    video_url: MediaUrl


def _as_parts(content: Any) -> Any:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


MediaPart = ImagePart | InputAudioPart | AudioUrlPart | VideoUrlPart
UserPart = Annotated[TextPart | MediaPart, Field(discriminator="type")]
TextOnly = Annotated[list[Annotated[TextPart, Field()]], Field(min_length=1), BeforeValidator(_as_parts)]
UserContent = Annotated[list[UserPart], Field(min_length=1), BeforeValidator(_as_parts)]
AssistantPart = Annotated[TextPart | RefusalPart | ImagePart, Field(discriminator="type")]
AssistantContent = Annotated[list[AssistantPart], BeforeValidator(_as_parts)]


class SystemMessage(Strict):
    """Instructions; "developer" is OpenAI's newer name for the same."""

    role: Literal["system", "developer"]
    content: TextOnly
    name: str | None = None


class UserMessage(Strict):
    role: Literal["user"]
    content: UserContent
    name: str | None = None


class ToolMessage(Strict):
    """The result of a tool call."""

    role: Literal["tool"]
    content: UserContent
    tool_call_id: str


class FunctionCall(Strict):
    name: str
    arguments: str


class ToolCall(Strict):
    id: str
    type: Literal["function"]
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
    tool_calls: list[ToolCall] | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    images: Any = Field(default=None, description="pictures that image_generation made; not read without that tool")


Message = Annotated[SystemMessage | UserMessage | AssistantMessage | ToolMessage, Field(discriminator="role")]
