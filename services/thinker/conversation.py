"""What a request says, and what the model reads of it."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, Self

import numpy as np

from services.common.errors import InvalidInput
from services.thinker.plugin.rows import Range

MediaKind = Literal["image", "audio", "video"]
ROLES = ("system", "user", "assistant", "tool")  # that all templates know


@dataclass
class MediaFile:
    """An encoded file.

    Attributes:
        field: of the request; errors name it.
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
        role: one of ROLES, or one that the model's chat template writes.
        tool_calls: as the chat template takes them.
        tool_call_id: for role "tool": the call this answers.
        name: of the author or tool.
        token_ids: that the assistant's message was sampled as; they are read in place of all else. Empty: not known.
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
    """A prompt without a chat template: `text`, or its ids, with a placeholder for each of `files`.

    Attributes:
        opens_thought: whether it ends in a thought.
    """

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    files: list[MediaFile] = field(default_factory=list)
    opens_thought: bool = False


@dataclass(frozen=True)
class Cut:
    """How a long prompt is cut: to `most` tokens, the last ones if it `keeps_last`.

    Attributes:
        most: -1: as many as leave room for an answer.
        keeps_last: None: as the tokenizer is configured.
    """

    most: int
    keeps_last: bool | None = None


@dataclass(frozen=True)
class FrameChoice:
    """Frames of a video: at most `count`, and at most `per_s` a second. None is no limit."""

    count: int | None = None
    per_s: float | None = None


@dataclass(frozen=True)
class SpokenInput:
    """A sound that is to be written down.

    Attributes:
        language: ISO 639-1; "": the model finds it.
        to_language: of a translation; "": the model's own.
        hints: names and terms that may be said.
    """

    file: MediaFile
    language: str = ""
    translates: bool = False
    to_language: str = ""
    hints: str = ""


@dataclass(frozen=True)
class Conversation:
    """All that makes up a prompt.

    Attributes:
        messages: oldest first.
        tools: as the chat template takes them.
        use_audio_in_video: whether the sound tracks of videos are heard too.
        template_kwargs: extra variables of the chat template.
        raw: the prompt itself, instead of messages.
        asks: whether the prompt ends where an answer begins.
        continues: whether it ends within the last message, which the answer continues.
        cut: None: a prompt that is too long is refused.
        frames: None: as many a second as the thinker is set to.
        spoken: what is to be written down, instead of messages.
    """

    messages: list[Message]
    tools: list[dict[str, Any]] = field(default_factory=list)
    use_audio_in_video: bool = False
    template_kwargs: dict[str, Any] = field(default_factory=dict)
    raw: RawPrompt | None = None
    asks: bool = True
    continues: bool = False
    cut: Cut | None = None
    frames: FrameChoice | None = None
    spoken: SpokenInput | None = None

    @property
    def field(self) -> Literal["messages", "prompt", "transcription"]:
        """Field of the request that the prompt comes from."""
        if self.spoken is not None:
            return "transcription"
        return "messages" if self.raw is None else "prompt"

    @property
    def characters(self) -> int:
        """Of all texts."""
        return _characters([self.tools, self.raw and self.raw.text, *map(vars, self.messages)])

    @property
    def media(self) -> list[MediaFile]:
        """In the order they are read."""
        if self.spoken is not None:
            return [self.spoken.file]
        if self.raw is not None:
            return self.raw.files
        return [part for message in self.messages for part in message.parts if isinstance(part, MediaFile)]


@dataclass(frozen=True)
class Prompt:
    """A preprocessed conversation.

    Attributes:
        token_ids: with one placeholder id for each multimodal embedding.
        multimodal: ranges of positions that an encoder fills, ascending and apart.
        image_tokens: placeholders of images and video frames.
        engine_input: the form vLLM takes.
        opens_thought: whether it ends in a thought, which the answer continues.
    """

    token_ids: list[int]
    multimodal: list[Range]
    audio_tokens: int
    image_tokens: int
    engine_input: Any = field(repr=False)
    opens_thought: bool = False

    @classmethod
    def read(cls, engine_input: Any, opens_thought: bool = False) -> Self:
        """Of a model that has media and text in one prompt."""
        audio, image = (_embedded(engine_input, kinds) for kinds in (("audio",), ("image", "video")))
        token_ids = list(engine_input["prompt_token_ids"])
        return cls(token_ids, runs(audio | image), int(audio.sum()), int(image.sum()), engine_input, opens_thought)

    @property
    def placeholders(self) -> Iterator[tuple[MediaKind, int, int]]:
        """(kind, first position, positions) of each medium, those of a kind in their order."""
        for kind, ranges in self.engine_input.get("mm_placeholders", {}).items():
            for each in ranges:
                yield kind, each.offset, each.length


def _characters(value: Any) -> int:
    if isinstance(value, dict | list):
        return sum(map(_characters, value.values() if isinstance(value, dict) else value))
    return len(value) if isinstance(value, str) else 0


def _embedded(engine_input: Any, kinds: Iterable[str]) -> np.ndarray:
    """Positions of a prompt whose embeddings are those of media of these kinds: (tokens) bool."""
    mask = np.zeros(len(engine_input["prompt_token_ids"]), dtype=bool)
    placeholders = engine_input.get("mm_placeholders") or {}
    for place in (place for kind in kinds for place in placeholders.get(kind, ())):
        mask[place.offset : place.offset + place.length] |= True if place.is_embed is None else place.is_embed.numpy()
    return mask


def check_token_ids(field: str, token_ids: Iterable[int], vocab_size: int) -> None:
    """Raises InvalidInput, which names `field`: an id is not in the vocabulary."""
    for token_id in token_ids:
        if not 0 <= token_id < vocab_size:
            raise InvalidInput(field, f"token ids must be 0 to {vocab_size - 1}, not {token_id}")


def runs(mask: np.ndarray) -> list[Range]:
    """The ranges of consecutive True in `mask` ((n) bool)."""
    edges = np.flatnonzero(np.diff(mask.astype(np.int8), prepend=0, append=0))
    return [(int(a), int(b)) for a, b in zip(edges[::2], edges[1::2], strict=True)]
