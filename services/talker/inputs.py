"""What is to be said in one request: the talker's prompt, the text that follows, and what collects them.

A family makes a `Prompt` and `Text` of a thinker's rows (`services.talker.answer`) or of a text (`TextInput`).
"""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch


@dataclass(frozen=True)
class States:
    """Rows of a thinker that are part of a prompt.

    Attributes:
        name: their kind, as in `Rows.name`.
        pieces: (n, width) each, on the CPU; may be the thinker's memory.
        picked: (states,) int64, rows of all pieces.
        places: (states,) int64, all different: the prompt's row of each.
    """

    name: str
    pieces: Sequence[torch.Tensor]
    picked: torch.Tensor
    places: torch.Tensor


@dataclass(frozen=True)
class Voice:
    """What a talker has heard in a voice sample.

    Attributes:
        vector: (hidden,), the voice in the talker's prompt. A floating dtype, on the CPU.
        frames: (frames, groups) int64 on the CPU: the sample as codec frames.
    """

    vector: torch.Tensor
    frames: torch.Tensor


@dataclass(frozen=True)
class Prompt:
    """What the talker reads before its first frame. A row is the sum of its text, code, state, vector and frame.

    Attributes:
        text_ids: (rows,) int64 on the CPU, -1 where a row has no text.
        codes: (rows,) int64 on the CPU, -1 where it has none.
        positions: (rows, 3) int64 on the CPU, in the rope: time, height, width.
        vectors: (row, (hidden,)) each, in the talker's space.
        frames: (frames, groups) int64 on the CPU: earlier speech, from row `frames_at` on, embedded by all codes.
        after_text: instead of the spec's.
    """

    text_ids: torch.Tensor
    codes: torch.Tensor
    positions: torch.Tensor
    states: States | None = None
    vectors: Sequence[tuple[int, torch.Tensor]] = ()
    frames: torch.Tensor | None = None
    frames_at: int = 0
    after_text: tuple[int, ...] | None = None

    def __len__(self) -> int:
        return len(self.text_ids)


class Text(NamedTuple):
    """Text of an answer, one id a frame. `states` (ids, width) where the spec says `text_has_states`."""

    ids: Sequence[int]
    states: torch.Tensor | None = None


class SpeechInput(Protocol):
    """Collects what is to be said in one request, as it comes."""

    @property
    @abstractmethod
    def ready(self) -> bool:
        """Whether speech can start: `take_prompt` has all it needs."""

    @property
    @abstractmethod
    def is_empty(self) -> bool:
        """Whether all that came is complete and says nothing."""

    @property
    @abstractmethod
    def tokens(self) -> int:
        """Ids to be said that came so far."""

    @abstractmethod
    def take_prompt(self) -> Prompt:
        """The prompt, once `ready`. Keeps none of a thinker's memory.

        Raises:
            InvalidInput: what came does not fit together.
        """

    @abstractmethod
    def take_text(self) -> Text:
        """Text that came since the last call. The prompt's last row takes the first of it."""


@dataclass(frozen=True)
class Delivery:
    """How a text is to be said.

    Attributes:
        speaker: a voice of the checkpoint, in its spelling; "": none, or that of `voice`.
        language: one of the family's; "": the text alone tells.
        whole_text_first: whether the prompt has all of the text; None: the checkpoint's default.
        voice: to be imitated.
        sample_text: text of the sample of `voice`; "": unknown, only the voice is taken.
    """

    speaker: str = ""
    instructions: str = ""
    language: str = ""
    whole_text_first: bool | None = None
    voice: Voice | None = None
    sample_text: str = ""

    @property
    def frames_before(self) -> torch.Tensor | None:
        """Frames of the voice sample, (frames, groups) int64, that the speech continues, if it does."""
        return self.voice.frames if self.voice is not None and self.sample_text else None


class SampleReader(Protocol):
    """Hears voices in samples."""

    @property
    def sample_rate_hz(self) -> int: ...

    def read(self, samples: torch.Tensor) -> Voice:
        """The voice of a mono sample (samples,) float32 in -1 to 1 on the CPU. Blocks while it computes."""
        ...


class TextInput(SpeechInput, Protocol):
    """Collects a text that comes in pieces."""

    def add(self, text: str) -> None:
        """Takes the next piece. What later characters may change is held back."""

    def finish(self) -> None:
        """Ends the text: nothing is held back any longer."""
