"""What is to be said in one request: the talker's prompt, the text that follows, and what collects them.

A family makes a `Prompt` and `Text` of a thinker's rows (`ThinkerInput`) or of a text (`TextInput`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from quartet.v1 import stream_pb2
from services.common.stream.rows import Rows


@dataclass(frozen=True)
class States:
    """Rows of a thinker that are part of a prompt.

    Attributes:
        name: their kind, as in `Rows.name`.
        pieces: (n, width) each, on the CPU; may be the thinker's memory.
        picked: (states,) int64, which rows of all pieces.
        places: (states,) int64, all different: the prompt's rows that they are part of.
    """

    name: str
    pieces: Sequence[torch.Tensor]
    picked: torch.Tensor
    places: torch.Tensor


@dataclass(frozen=True)
class Voice:
    """What a talker has heard in a voice sample.

    Attributes:
        vector: (hidden,), of a row of the talker's prompt: who speaks. A floating dtype, on the talker's device.
        frames: (frames, groups) int64 on the CPU: the sample as codec frames.
    """

    vector: torch.Tensor
    frames: torch.Tensor


@dataclass(frozen=True)
class Prompt:
    """What the talker reads before its first frame. A row is the sum of a text, a code and a state, those that it has.

    Attributes:
        text_ids: (rows,) int64 on the CPU, -1 where a row has no text.
        codes: (rows,) int64 on the CPU, -1 where it has none.
        positions: (rows, 3) int64 on the CPU, in the rope: time, height, width.
        states: what rows have of the thinker's.
        vectors: what rows have besides: (row, (hidden,)) each, in the talker's space.
        frames: (frames, groups) int64 on the CPU: speech that has been before; rows have the embeddings of all codes
            of a frame, from row `frames_at` on.
        after_text: as in the spec, which it takes the place of.
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
    def ready(self) -> bool:
        """Whether speech can start: `take_prompt` has all it needs."""
        ...

    @property
    def is_empty(self) -> bool:
        """Whether all that came is complete and says nothing."""
        ...

    @property
    def tokens(self) -> int:
        """Ids of what is to be said, of those that came so far."""
        ...

    def take_prompt(self) -> Prompt:
        """The prompt, once `ready`. Keeps none of a thinker's memory.

        Raises:
            InvalidInput: what came does not fit together.
        """
        ...

    def take_text(self) -> Text:
        """Text that came since the last call. The prompt's last row takes the first of it."""
        ...


class ThinkerInput(SpeechInput, Protocol):
    """Collects one answer from what a thinker sends, in whatever order its kinds of rows arrive."""

    @property
    def wanted(self) -> Sequence[stream_pb2.RowSelection]:
        """The rows to subscribe to; in this order kinds are added where all is there at once."""
        ...

    def begin(self, prompt_positions: int) -> None:
        """The stream's header.

        Raises:
            InvalidInput: there is no prompt.
        """
        ...

    def add(self, rows: Rows) -> None:
        """Takes rows, which come in the order of their positions.

        Raises:
            InvalidInput: an unknown kind, a wrong shape or dtype, rows out of order, or values out of range.
        """
        ...


@dataclass(frozen=True)
class Delivery:
    """How a text is to be said.

    Attributes:
        speaker: a voice of the checkpoint, as it writes it; "": none, or that of `voice`.
        instructions: "": none.
        language: one of the family's; "": the text alone tells.
        whole_text_first: whether the prompt has all of the text; None: as the checkpoint has it.
        voice: to be imitated.
        sample_text: what is said in the sample of `voice`; "": it is not known, and only the voice is taken.
    """

    speaker: str = ""
    instructions: str = ""
    language: str = ""
    whole_text_first: bool | None = None
    voice: Voice | None = None
    sample_text: str = ""

    @property
    def frames_before(self) -> torch.Tensor | None:
        """Frames of the voice sample, (frames, groups) int64, which the speech goes on from. None: it does not."""
        return self.voice.frames if self.voice is not None and self.sample_text else None


class SampleReader(Protocol):
    """Hears voices in samples. Its memory is that of its weights, and what one sample takes."""

    @property
    def sample_rate_hz(self) -> int:
        """Of the samples."""
        ...

    def read(self, samples: torch.Tensor) -> Voice:
        """The voice of a mono sample (samples,) float32 in -1 to 1 on the CPU. Blocks while it computes."""
        ...


class TextInput(SpeechInput, Protocol):
    """Collects a text whose beginning comes before its end."""

    def add(self, text: str) -> None:
        """Takes what follows of the text. What the next characters may change is held back."""
        ...

    def finish(self) -> None:
        """No more follows: nothing is held back any longer."""
        ...
