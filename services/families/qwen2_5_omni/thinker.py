"""Qwen2.5-Omni's thinker: a dense language model that takes text, images, video and sound."""

from pathlib import Path
from typing import Any

from services.registry import has_speech
from services.sizes import weights_dtype
from services.thinker.family import ThinkerCheckpoint

_RECORDING = "services.families.qwen2_5_omni.thinker_model:RecordingThinker"
# The published config.json has the first name, transformers writes the second.
ARCHITECTURES = {"Qwen2_5OmniModel": _RECORDING, "Qwen2_5OmniForConditionalGeneration": _RECORDING}
# The published model's speech is worse with another prompt (its model card).
SYSTEM_PROMPT = (
    "You are Qwen, a virtual human developed by the Qwen Team, Alibaba Group, capable of perceiving auditory and "
    "visual inputs, as well as generating text and speech."
)


def checkpoint(folder: Path, config: dict[str, Any], processor: Any) -> ThinkerCheckpoint:
    """See `services.thinker.family.ThinkerFamily`. The talker reads the states after the last norm."""
    thinker = config["thinker_config"]
    text = thinker["text_config"]
    return ThinkerCheckpoint(
        folder=folder,
        dtype=weights_dtype(config, thinker, text),
        vocab_size=text["vocab_size"],
        hidden_size=text["hidden_size"],
        accept_hidden_layer=text["num_hidden_layers"] if has_speech(config) else None,
        placeholders={kind: thinker[f"{kind}_token_index"] for kind in ("image", "audio", "video")},
        tool_calls=None,
        processor=processor,
        system_prompt=SYSTEM_PROMPT,
        sound_tokens_per_s=24,
        positions_per_s=thinker.get("position_id_per_seconds", 25),
    )
