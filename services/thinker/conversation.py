"""What a request says, and what the model reads of it."""

from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from services.thinker.plugin.rows import Range

MediaKind = Literal["image", "audio", "video"]


@dataclass
class MediaFile:
    """An encoded file.

    Attributes:
        kind: what it is decoded as.
        data: the whole file.
        field: where the request had it; named in errors about it.
        missing_bytes: size of a file that is still to come; 0: `data` has it.
    """

    kind: MediaKind
    data: bytes = field(repr=False)
    field: str
    missing_bytes: int = 0


@dataclass(frozen=True)
class Message:
    """One turn.

    Attributes:
        role: "system", "user", "assistant" or "tool".
        parts: texts and media in the order they are read.
        tool_calls: calls the assistant made, as the chat template takes them.
        tool_call_id: for role "tool": the call this answers.
        name: of the author or tool.
        token_ids: that the assistant's message was sampled as; they are read in place of all else. Empty: not known.
        reasoning: what the assistant thought before it answered.
    """

    role: str
    parts: list[str | MediaFile]
    tool_calls: list[dict[str, Any]] = field(default_factory=list)
    tool_call_id: str = ""
    name: str = ""
    token_ids: list[int] = field(default_factory=list)
    reasoning: str = ""


@dataclass(frozen=True)
class RawPrompt:
    """A prompt that no chat template writes: `text`, or its ids, with a placeholder for each of `files`."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    files: list[MediaFile] = field(default_factory=list)


@dataclass(frozen=True)
class Conversation:
    """All that makes up a prompt.

    Attributes:
        messages: oldest first.
        raw: the prompt itself, instead of messages.
        tools: tools the model may call, as the chat template takes them.
        use_audio_in_video: whether the sound tracks of videos are heard too.
        template_kwargs: extra variables of the chat template.
    """

    messages: list[Message]
    tools: list[dict[str, Any]] = field(default_factory=list)
    use_audio_in_video: bool = False
    template_kwargs: dict[str, Any] = field(default_factory=dict)
    raw: RawPrompt | None = None

    @property
    def media(self) -> list[MediaFile]:
        """The media, in the order they are read."""
        if self.raw is not None:
            return self.raw.files
        return [part for message in self.messages for part in message.parts if isinstance(part, MediaFile)]


@dataclass(frozen=True)
class Prompt:
    """A preprocessed conversation.

    Attributes:
        token_ids: the whole prompt, with one placeholder id for each multimodal embedding.
        multimodal: ranges of positions that an encoder fills, ascending and apart.
        audio_tokens: how many of those stand for sound.
        image_tokens: how many of those stand for images and video frames.
        engine_input: the form vLLM takes.
        opens_thought: whether it ends in a thought, which the answer goes on with.
    """

    token_ids: list[int]
    multimodal: list[Range]
    audio_tokens: int
    image_tokens: int
    engine_input: Any = field(repr=False)
    opens_thought: bool = False


def runs(mask: np.ndarray) -> list[Range]:
    """The ranges of consecutive True in `mask` ((n) bool)."""
    edges = np.flatnonzero(np.diff(mask.astype(np.int8), prepend=0, append=0))
    return [(int(a), int(b)) for a, b in zip(edges[::2], edges[1::2], strict=True)]
