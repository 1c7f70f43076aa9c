"""GPU memory of a checkpoint."""

from collections.abc import Iterable, Mapping
from typing import Any

from services.families import Sizes, has_speech, omni_sizes

PREFIXES = {"thinker": "thinker.", "talker": "talker.", "code2wav": "token2wav."}


def sizes(config: Mapping[str, Any], tensors: Iterable[tuple[str, int]]) -> Sizes:
    """Sizes of a checkpoint from its config and (name, bytes) of its tensors. Raises KeyError: a key is missing."""
    return omni_sizes(config, config["talker_config"] if has_speech(config) else None, tensors, PREFIXES)
