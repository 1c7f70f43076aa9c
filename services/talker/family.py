"""What the talker asks of a model family.

A family that has one has a module `talker` (see `services.families`) with the function of `TalkerModule`. What it tells
is data: `TalkerSpec`, `WeightNames`, and for each request a `Prompt` and `Text`, which it makes of a thinker's rows
(`ThinkerInput`) or of a text.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch

from quartet.v1 import stream_pb2
from services.common.stream.rows import Rows

TEXT_EMBEDDINGS = "text_embeddings"
"""What `WeightNames` calls the embeddings of text ids: (text_vocab, width), width as `text_projection` takes it."""


@dataclass(frozen=True)
class TransformerSpec:
    """Sizes and kinds of the layers of a decoder stack: the talker's or the code predictor's.

    Attributes:
        qkv_bias, o_bias: whether these projections have biases.
        qk_norm: whether queries and keys are normed.
        rope_sections: frequencies that turn with time, height and width; None: all turn with time.
        rope_interleaved: whether those of height and width alternate with time's, or each section is in one piece.
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    norm_eps: float
    rope_theta: float
    activation: str
    qkv_bias: bool = False
    o_bias: bool = False
    qk_norm: bool = True
    rope_sections: tuple[int, ...] | None = None
    rope_interleaved: bool = False


@dataclass(frozen=True)
class MoeSpec:
    """Mixture of experts of a talker layer."""

    experts: int
    experts_per_token: int
    intermediate: int
    shared_intermediate: int
    renormalize: bool


@dataclass(frozen=True)
class ProjectionSpec:
    """A projection into the talker's space: two linear layers around its activation; without `inner` a single one."""

    inputs: int
    inner: int | None = None
    bias: bool = True


@dataclass(frozen=True)
class SamplingDefaults:
    """What applies where a request sets nothing. `max_frames` is in codec frames. The predictor's mean nothing where
    there is no code predictor."""

    temperature: float
    top_k: int
    top_p: float
    repetition_penalty: float
    max_frames: int
    predictor_temperature: float = 0.0
    predictor_top_k: int = 0
    predictor_top_p: float = 1.0


@dataclass(frozen=True)
class TalkerSpec:
    """The talker of one checkpoint. Codes are ids of group 0, which `talker.vocab` counts.

    Attributes:
        num_code_groups: codes of a frame.
        max_positions: longest prompt plus frames that the rope was made for.
        text_vocab: ids of text.
        speakers: names of the voices, the default first.
        after_text: text ids of the steps after the last text: one a step, the last one for all that follow.
        end_codes: codes that end speech.
        suppressed_codes: codes that are never sampled.
        seen_codes: codes that the repetition penalty takes as said before the first frame.
        min_frames: before so many there is no end of speech.
        moe: of the talker's layers; None: they are dense.
        predictor: draws groups 1 and up; None: there is one group.
        text_projection: of text embeddings; None: they are in the talker's space.
        state_projection: of thinker states; None: it reads none.
        text_has_states: whether each text id of a step comes with the thinker's state of it.
    """

    talker: TransformerSpec
    num_code_groups: int
    max_positions: int
    text_vocab: int
    speakers: tuple[str, ...]
    after_text: tuple[int, ...]
    end_codes: frozenset[int]
    defaults: SamplingDefaults
    suppressed_codes: frozenset[int] = frozenset()
    seen_codes: frozenset[int] = frozenset()
    min_frames: int = 0
    moe: MoeSpec | None = None
    predictor: TransformerSpec | None = None
    text_projection: ProjectionSpec | None = None
    state_projection: ProjectionSpec | None = None
    text_has_states: bool = False


@dataclass(frozen=True)
class WeightNames:
    """Which published tensors the talker reads, and where it has them.

    Attributes:
        prefixes: published beginning of a name -> what stands for it in `TalkerModel`, or TEXT_EMBEDDINGS. The first
            that fits counts; a name that none fits is not read.
        stored_dtype_of: published name of a tensor whose dtype is the checkpoint's.
    """

    prefixes: Mapping[str, str]
    stored_dtype_of: str

    def parameter_of(self, tensor: str) -> str | None:
        """Name in `TalkerModel` of the published `tensor`; None: it is not the talker's."""
        for published, own in self.prefixes.items():
            if tensor.startswith(published):
                return own + tensor.removeprefix(published)
        return None


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
class Prompt:
    """What the talker reads before its first frame. A row is the sum of a text, a code and a state, those that it has.

    Attributes:
        text_ids: (rows,) int64 on the CPU, -1 where a row has no text.
        codes: (rows,) int64 on the CPU, -1 where it has none.
        positions: (rows, 3) int64 on the CPU, in the rope: time, height, width.
        states: what rows have of the thinker's.
    """

    text_ids: torch.Tensor
    codes: torch.Tensor
    positions: torch.Tensor
    states: States | None = None

    def __len__(self) -> int:
        return len(self.text_ids)


class Text(NamedTuple):
    """Text of an answer, one id a frame. `states` (ids, width) where the spec says `text_has_states`."""

    ids: Sequence[int]
    states: torch.Tensor | None = None


class ThinkerInput(Protocol):
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

    @property
    def ready(self) -> bool:
        """Whether speech can start: `take_prompt` has all it needs."""
        ...

    @property
    def is_empty(self) -> bool:
        """Whether all that came is a prompt without an answer."""
        ...

    def take_prompt(self) -> Prompt:
        """The prompt, once `ready`. Keeps none of the thinker's memory.

        Raises:
            InvalidInput: the rows do not fit together.
        """
        ...

    def take_text(self) -> Text:
        """Text that came since the last call. The prompt's last row takes the first of it."""
        ...


@dataclass(frozen=True)
class TalkerFamily:
    """The talker of one checkpoint.

    Attributes:
        thinker_input: a collector of what is to be said with the voice of that name. None: it reads no thinker.
        text_input: the prompt and all text for (what is to be said, voice); no ids: there is nothing to say. Raises
            InvalidInput. None: it reads no text.
    """

    spec: TalkerSpec
    weights: WeightNames
    thinker_input: Callable[[str], ThinkerInput] | None = None
    text_input: Callable[[str, str], tuple[Prompt, Text]] | None = None


class TalkerModule(Protocol):
    """The module `talker` of a family."""

    def read_talker(self, config: dict[str, Any], folder: Path) -> TalkerFamily:
        """The talker that the checkpoint in `folder` has, whose config.json is `config`.

        Raises:
            ValueError: it has none, or one of a kind that does not run here.
        """
        ...
