"""What the talker asks of a model family: a module `talker` (see `services.families`) with the function of
`TalkerModule`, which gives data: `TalkerSpec`, `WeightNames`, and what `services.talker.inputs` has for each request.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from services.talker.answer import AnswerRows
from services.talker.inputs import Delivery, SampleReader, TextInput

TEXT_EMBEDDINGS = "text_embeddings"
"""Name in `WeightNames` of the embeddings of text ids: (text_vocab, inputs of `text_projection`)."""


@dataclass(frozen=True)
class TransformerSpec:
    """Layers of a decoder stack: the talker's or the code predictor's.

    Attributes:
        qk_norm: whether queries and keys are normed.
        rope_sections: frequencies that turn with time, height and width; None: all turn with time.
        rope_interleaved: whether frequencies of height and width alternate with time's, or each section is in one
            piece.
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
    experts: int
    experts_per_token: int
    intermediate: int
    shared_intermediate: int
    renormalize: bool


@dataclass(frozen=True)
class ProjectionSpec:
    """A projection into the talker's space: two linear layers around its activation; one without `inner`."""

    inputs: int
    inner: int | None = None
    bias: bool = True


@dataclass(frozen=True)
class SamplingDefaults:
    """What applies where a request sets nothing. The predictor's mean nothing without a code predictor."""

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
        speakers: names of the voices, the default first; empty: a voice comes from a sample, or from instructions.
        after_text: text ids of the steps after the last text, one a step; the last one repeats.
        suppressed_codes: never sampled.
        seen_codes: said before the first frame, for the repetition penalty.
        min_frames: speech cannot end before so many.
        moe: of the talker's layers; None: they are dense.
        predictor: draws groups 1 and up; None: there is one group.
        text_projection: of text embeddings; None: they are in the talker's space.
        state_projection: of thinker states; None: it reads none, or `shares_projection`.
        shares_projection: whether the one linear layer of `text_projection` takes the sum of a row's text, code and
            state, which are as wide as its input.
        text_has_states: whether each text id of a step comes with its thinker's state.
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
    shares_projection: bool = False
    text_has_states: bool = False

    @property
    def state_width(self) -> int | None:
        """Elements of a thinker's state; None: the talker reads none."""
        projection = self.text_projection if self.shares_projection else self.state_projection
        return projection.inputs if projection else None


@dataclass(frozen=True)
class WeightNames:
    """Which published tensors the talker reads, and where it has them.

    Attributes:
        prefixes: published beginning of a name -> the one in `TalkerModel`, or TEXT_EMBEDDINGS. The first that fits
            counts; a name without one is not read.
        stored_dtype_of: published name of a tensor whose dtype is the checkpoint's.
    """

    prefixes: Mapping[str, str]
    stored_dtype_of: str

    def parameter_of(self, tensor: str) -> str | None:
        """Name in `TalkerModel` of the published `tensor`; None: it is another part's."""
        for published, own in self.prefixes.items():
            if tensor.startswith(published):
                return own + tensor.removeprefix(published)
        return None

    def tensor_of(self, parameter: str) -> str:
        """Published name: the inverse of `parameter_of`."""
        published, own = next(names for names in self.prefixes.items() if parameter.startswith(names[1]))
        return published + parameter.removeprefix(own)


@dataclass(frozen=True)
class TalkerFamily:
    """The talker of one checkpoint.

    Attributes:
        thinker_input: a collector for the voice of that name. None: it reads no thinker.
        text_input: a collector of a text. Raises InvalidInput, which names a field of `SpokenText`. None: it reads no
            text.
        languages: that a request may name.
        sample_reader: loads the reader of voice samples to a device, in a dtype. None: it imitates no voices.
    """

    spec: TalkerSpec
    weights: WeightNames
    thinker_input: Callable[[str], AnswerRows] | None = None
    text_input: Callable[[Delivery], TextInput] | None = None
    languages: tuple[str, ...] = ()
    takes_instructions: bool = False
    sample_reader: Callable[[torch.device, torch.dtype], SampleReader] | None = None


class TalkerModule(Protocol):
    """The module `talker` of a family."""

    def read_talker(self, config: dict[str, Any], folder: Path) -> TalkerFamily:
        """The talker of the checkpoint in `folder`, whose config.json is `config`.

        Raises:
            ValueError: it has none, or one that is not supported.
        """
        ...
