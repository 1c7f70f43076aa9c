"""What the thinker asks of a model family: a module `thinker` (see `services.families`) with the names of
`ThinkerFamily`, which imports neither vLLM nor transformers. And a checkpoint as the thinker sees it.
"""

import json
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

_FILES = ("*.json", "*.txt", "*.jinja", "*.model")  # configurations, tokenizer, chat template

_SAMPLE_RATE_HZ = 16_000
_OWN_CODE = "custom code"  # of what transformers says


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
        spelled: what stands for a medium in a message's text; empty: the chat template writes it.
        tool_calls: None: the model has no tools, or `tool_parser`.
        tool_parser: name of vLLM's parser that finds calls, if it is written in another way.
        processor: transformers' processor.
        system_prompt: of a conversation without a system message; None: the template's.
        reasoning: None: the model writes no thoughts.
        keeps_state: whether it keeps a state of what it read beside keys and values.
        sound_tokens_per_s: fewest tokens that a second of sound becomes; 0: not known.
        positions_per_s: rope positions of a second of a video; 0: none.
        transcribes: whether the model's class in vLLM makes the prompts of speech that is to be written down.
        only_transcribes: whether it writes down speech, and does nothing else.
    """

    folder: Path
    dtype: str
    vocab_size: int
    hidden_size: int
    accept_hidden_layer: int | None
    placeholders: Mapping[MediaKind, int]
    tool_calls: ToolCallMarkers | None
    processor: Any
    spelled: Mapping[MediaKind, str] = field(default_factory=dict[MediaKind, str], kw_only=True)
    tool_parser: str | None = field(default=None, kw_only=True)
    system_prompt: str | None = field(default=None, kw_only=True)
    reasoning: ReasoningMarkers | None = field(default=None, kw_only=True)
    keeps_state: bool = field(default=False, kw_only=True)
    sound_tokens_per_s: float = field(default=0.0, kw_only=True)
    positions_per_s: float = field(default=0.0, kw_only=True)
    transcribes: bool = field(default=False, kw_only=True)
    only_transcribes: bool = field(default=False, kw_only=True)

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
    def splits_media(self) -> bool:
        """Whether a step of the engine may end within a medium."""
        return True

    @property
    def hears_videos(self) -> bool:
        """Whether the sound track of a video can be heard with its frames."""
        return "audio" in self.placeholders

    def video_options(self, fps: float) -> dict[str, Any]:
        """Arguments of the model's processor for videos of which `fps` frames a second are taken."""
        return {"fps": fps}

    @property
    def tokenizer(self) -> Any:
        """The processor's, or the processor itself: that of a model of text is a tokenizer."""
        return getattr(self.processor, "tokenizer", self.processor)

    @property
    def chat_template(self) -> str:
        """Empty: the model takes no messages."""
        return chat_template(self.processor)

    @property
    def takes_tools(self) -> bool:
        """Whether the chat template knows the word."""
        return "tools" in self.chat_template

    @property
    def sample_rate_hz(self) -> int:
        """Of the audio that the feature extractor takes; 16,000 if the model hears nothing."""
        return getattr(self._feature_extractor, "sampling_rate", _SAMPLE_RATE_HZ)

    @property
    def sound_window(self) -> int:
        """Samples; a sound must be longer."""
        return getattr(self._feature_extractor, "n_fft", 0)

    @property
    def _feature_extractor(self) -> Any:
        return getattr(self.processor, "feature_extractor", None)

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """Tokens that are no text: of turns, ends of answers, and media."""
        added = self.tokenizer.added_tokens_decoder.items()
        return frozenset({token_id for token_id, token in added if token.special} | set(self.placeholders.values()))

    def token_id(self, token: str) -> int | None:
        """Id of `token` if the vocabulary has it as one."""
        return self.tokenizer.get_vocab().get(token)


def templater(processor: Any) -> Any:
    """What applies the chat template: a processor, or the tokenizer in it that alone has one."""
    has_own = getattr(processor, "chat_template", None)
    return processor if has_own else getattr(processor, "tokenizer", processor)


def chat_template(processor: Any) -> str:
    """Of a processor or a tokenizer; "" if it has none."""
    template = templater(processor).chat_template or ""
    return template if isinstance(template, str) else json.dumps(template)


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
    from services.common.engine.weights import Checkpoint

    logs.adopt("transformers")
    files = Checkpoint(model, _FILES)
    folder, config = files.folder, read_config(files.folder)
    family: ThinkerFamily = family_of(config).part("thinker", config)  # pyright: ignore[reportAssignmentType]
    checkpoint = family.checkpoint(folder, config, _processor(folder))
    # All weights: vLLM refuses a directory that lacks a file which its index names.
    files.fetch(lambda name: True)
    return checkpoint


def _processor(folder: Path) -> Any:
    """transformers' processor, or the tokenizer of a model of text. Raises ValueError: it is code of its own."""
    from transformers import AutoProcessor, AutoTokenizer

    try:
        return AutoProcessor.from_pretrained(folder, trust_remote_code=False)
    except ValueError:  # says of a tokenizer's faults only that there is none
        pass
    try:
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except ValueError as error:
        if _OWN_CODE not in str(error):
            raise
        reason = "its tokenizer or processor is code that comes with the checkpoint, which is not run"
        raise ValueError(f"{folder}: {reason}; give a checkpoint that transformers reads by itself") from None
