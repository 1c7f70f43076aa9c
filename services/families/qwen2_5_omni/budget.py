"""GPU memory of a checkpoint."""

from collections.abc import Iterable, Mapping
from typing import Any

from services.registry import has_speech
from services.sizes import Sizes, omni_sizes

PREFIXES = {"thinker": "thinker.", "talker": "talker.", "code2wav": "token2wav."}
UNSPLIT = "thinker.audio_tower."  # vLLM does not split it


def sizes(config: Mapping[str, Any], tensors: Iterable[tuple[str, int]]) -> Sizes:
    """Those of a checkpoint with `config` and (name, bytes) of its tensors. Raises KeyError: a key is missing."""
    talker = config["talker_config"] if has_speech(config) else None
    return omni_sizes(config, talker, tensors, PREFIXES, UNSPLIT)
