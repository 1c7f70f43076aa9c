"""A conversation as the model reads it."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from services.thinker.plugin.rows import Range


@dataclass(frozen=True)
class Prompt:
    """A preprocessed conversation.

    Attributes:
        token_ids: the whole prompt, with one placeholder id for each multimodal embedding.
        multimodal: ranges of positions that an encoder fills, ascending and apart.
        audio_tokens: how many of those stand for sound.
        image_tokens: how many of those stand for images and video frames.
        engine_input: the form vLLM takes.
    """

    token_ids: list[int]
    multimodal: list[Range]
    audio_tokens: int
    image_tokens: int
    engine_input: Any = field(repr=False)


def runs(mask: np.ndarray) -> list[Range]:
    """The ranges of consecutive True in `mask` ((n) bool)."""
    edges = np.flatnonzero(np.diff(mask.astype(np.int8), prepend=0, append=0))
    return [(int(a), int(b)) for a, b in zip(edges[::2], edges[1::2], strict=True)]
