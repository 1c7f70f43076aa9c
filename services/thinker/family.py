"""What the thinker asks of a model family: a module `thinker` (see `services.families`) with the names of
`ThinkerFamily`, which imports neither vLLM nor transformers. And a checkpoint as the thinker sees it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from services.common.stream.rows import hidden_states
from services.common.telemetry import logs
from services.registry import family_of, read_config
from services.thinker.conversation import MediaKind
from services.thinker.plugin.rows import MROPE_POSITIONS, RowKind

_FILES = ("*.json", "*.txt", "*.jinja")  # configurations, tokenizer, chat template


@dataclass(frozen=True)
class ToolCallMarkers:
    """What the chat template puts around a call, `{"name": ..., "arguments": {...}}`."""

    opening: str
    closing: str


@dataclass(frozen=True)
class ReasoningMarkers:
    """Text and token of the markers around a thought. vLLM finds the end of a thought by its parser `vllm_parser`."""

    opening: str
    closing: str
    opening_id: int
    closing_id: int
    vllm_parser: str


@dataclass(frozen=True)
class ThinkerCheckpoint:
    """What config.json, the tokenizer and the processor say.

    Attributes:
        folder: vLLM is given it, and so asks the hub for nothing.
        dtype: of the stored weights, e.g. "bfloat16".
        vocab_size: token ids are below it.
        accept_hidden_layer: layer whose states the talker reads; None: there is no talker.
        placeholders: the media that the model takes, and the token of each in a prompt.
        tool_calls: None: the model has no tools.
        processor: transformers' processor.
        system_prompt: of a conversation without a system message; None: the template's.
        reasoning: None: the model writes no thoughts.
        sound_tokens_per_s: fewest tokens that a second of sound becomes; 0: not known.
    """

    folder: Path
    dtype: str
    vocab_size: int
    hidden_size: int
    accept_hidden_layer: int | None
    placeholders: Mapping[MediaKind, int]
    tool_calls: ToolCallMarkers | None
    processor: Any
    system_prompt: str | None = field(default=None, kw_only=True)
    reasoning: ReasoningMarkers | None = field(default=None, kw_only=True)
    sound_tokens_per_s: float = field(default=0.0, kw_only=True)

    def row_kinds(self) -> tuple[RowKind, ...]:
        """The rows that are kept of every token, and offered beside the token ids."""
        if self.accept_hidden_layer is None:
            return (MROPE_POSITIONS,)
        return RowKind(hidden_states(self.accept_hidden_layer), self.hidden_size), MROPE_POSITIONS

    def sound_ids(self, sounds: Sequence[np.ndarray]) -> Sequence[str | None]:
        """An id for each sound of a request, (samples) float32, in vLLM's caches.

        None is vLLM's own id, by content: right unless what is heard of a sound depends on the others.
        """
        return [None] * len(sounds)

    def engine_args(self, on_cpu: bool) -> dict[str, Any]:
        """Arguments of vLLM's engine that the model needs."""
        return {}

    @property
    def tokenizer(self) -> Any:
        return self.processor.tokenizer

    @property
    def sample_rate_hz(self) -> int:
        """Of the audio that the feature extractor takes."""
        return self.processor.feature_extractor.sampling_rate

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """Tokens that are no text: of turns, ends of answers, and media."""
        added = self.tokenizer.added_tokens_decoder.items()
        return frozenset({token_id for token_id, token in added if token.special} | set(self.placeholders.values()))

    def token_id(self, token: str) -> int | None:
        """Id of `token` if the vocabulary has it as one."""
        return self.tokenizer.get_vocab().get(token)


class ThinkerFamily(Protocol):
    """The module `thinker` of a family."""

    ARCHITECTURES: Mapping[str, str]
    """MODULE:CLASS that runs instead of each of vLLM's architectures that config.json may name."""

    def checkpoint(self, folder: Path, config: dict[str, Any], processor: Any) -> ThinkerCheckpoint:
        """The checkpoint in `folder`. Raises ValueError: config.json lacks something."""
        ...


def load_checkpoint(model: str) -> ThinkerCheckpoint:
    """Reads the checkpoint directory or hub id `model`.

    Raises:
        ValueError: no such checkpoint, or of no family that has a thinker.
        OSError: files are missing.
    """
    from transformers import AutoProcessor

    from services.common.engine.weights import Checkpoint

    logs.adopt("transformers")
    # All weights: vLLM refuses a directory that lacks a file which its index names.
    files = Checkpoint(model, _FILES)
    files.fetch(lambda name: True)
    folder, config = files.folder, read_config(files.folder)
    family: ThinkerFamily = family_of(config).part("thinker", config)  # pyright: ignore[reportAssignmentType]
    return family.checkpoint(folder, config, AutoProcessor.from_pretrained(folder))
