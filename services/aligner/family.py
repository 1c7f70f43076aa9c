"""What a model family gives the aligner's engine: its module `aligner` has `load_aligner(folder, device, dtype)`, which
returns a `WordAligner`, and raises ValueError or OSError where the checkpoint cannot be used."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from services.common.engine.weights import TOKENIZER_FILES, Checkpoint
from services.registry import family_of, read_config

RATE_HZ = 16_000
_FILES = ("config.json", "*.jinja", "processor_config.json", "preprocessor_config.json", *TOKENIZER_FILES)


class Sound(NamedTuple):
    """A sound and its words: `samples` (samples,) float32 at RATE_HZ, -1 to 1; `language`: a code, or ""."""

    samples: np.ndarray
    words: Sequence[str]
    language: str = ""


class WordTimes(NamedTuple):
    """Of a word, in milliseconds from the first sample."""

    begin_ms: int
    end_ms: int


class WordAligner(Protocol):
    """A model that gives words their times.

    Attributes:
        dtype, device: that it computes in and on.
        languages: ISO 639-1 codes; (): any.
        max_audio_s: longest sound.
        resolution_ms: its times are multiples of it.
    """

    dtype: Any
    device: Any
    languages: Sequence[str]
    max_audio_s: float
    resolution_ms: float

    def split(self, text: str, language: str) -> list[str]:
        """The words of a text, each at least a character. `language`: a code, or "". Raises InvalidInput: it cannot
        split this language."""
        ...

    def align(self, sounds: Sequence[Sound]) -> list[list[WordTimes]]:
        """The times of each sound's words; at least one sound, each with a word. The times of a sound do not depend on
        the others."""
        ...


def load_model(model: str, device: Any, dtype: str) -> WordAligner:
    """The aligner of a checkpoint, a directory or a hub id. `dtype` "auto": the model's.

    Raises:
        ValueError: no such checkpoint, or no aligner's.
        OSError: files are missing.
    """
    files = Checkpoint(model, _FILES)
    config = read_config(files.folder)
    part = family_of(config).part("aligner", config)
    files.fetch(lambda name: True)
    return part.load_aligner(Path(files.folder), device, dtype)
