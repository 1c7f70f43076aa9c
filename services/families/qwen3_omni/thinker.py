"""Qwen3-Omni's thinker: a language model with experts that takes text, images, video and sound."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from services.families import weights_dtype
from services.thinker.family import ThinkerCheckpoint, ToolCallMarkers
from services.thinker.plugin.rows import MROPE_POSITIONS, RowKind, hidden_states

ARCHITECTURES = {"Qwen3OmniMoeForConditionalGeneration": "services.families.qwen3_omni.thinker_model:RecordingThinker"}
# transformers' default; a checkpoint without a talker does not state it.
_ACCEPT_HIDDEN_LAYER = 18


@dataclass(frozen=True)
class Qwen3OmniThinker(ThinkerCheckpoint):
    """A checkpoint.

    Attributes:
        hidden_size: elements of a hidden state.
        audio_chunk_frames: spectrogram frames that the audio encoder takes at a time.
    """

    hidden_size: int
    audio_chunk_frames: int

    def row_kinds(self, keep_embeddings: bool) -> tuple[RowKind, ...]:
        """See `ThinkerCheckpoint.row_kinds`."""
        layers = sorted({self.accept_hidden_layer} | ({0} if keep_embeddings else set()))
        return (*(RowKind(hidden_states(layer), self.hidden_size) for layer in layers), MROPE_POSITIONS)

    def sound_ids(self, sounds: Sequence[np.ndarray]) -> list[str]:
        """See `ThinkerCheckpoint.sound_ids`. Feature extractor and encoder fill all sounds of a request up to the
        longest, so a sound's end depends on that: but not on what is beyond a window or a chunk, nor on whether it is
        filled where it ends in silence and with a whole hop."""
        extractor = self.processor.feature_extractor
        chunk = self.audio_chunk_frames * extractor.hop_length
        longest = max(len(samples) for samples in sounds)
        ids: list[str] = []
        for samples in sounds:
            is_filled = len(samples) % extractor.hop_length == 0 and not samples[-extractor.n_fft // 2 - 1 :].any()
            filling = extractor.n_fft if is_filled else min(longest - len(samples), extractor.n_fft)
            context = f"{filling}/{longest if filling < extractor.n_fft else 0}/{min(longest, chunk)}"
            ids.append(hashlib.sha256(context.encode() + samples.tobytes()).hexdigest())
        return ids

    def engine_args(self, on_cpu: bool) -> dict[str, Any]:
        """See `ThinkerCheckpoint.engine_args`. Compiled M-RoPE changes what the model hears, so vLLM's own kernel is
        used (as vLLM-Omni does)."""
        return {"compilation_config": {} if on_cpu else {"custom_ops": ["+rotary_embedding"]}}


def checkpoint(folder: Path, config: dict[str, Any], processor: Any) -> Qwen3OmniThinker:
    """See `services.thinker.family.ThinkerFamily`."""
    try:
        thinker = config["thinker_config"]
        text = thinker["text_config"]
        return Qwen3OmniThinker(
            folder=folder,
            dtype=weights_dtype(config, thinker, text),
            vocab_size=text["vocab_size"],
            accept_hidden_layer=config.get("talker_config", {}).get("accept_hidden_layer", _ACCEPT_HIDDEN_LAYER),
            placeholders={kind: thinker[f"{kind}_token_id"] for kind in ("image", "audio", "video")},
            tool_calls=ToolCallMarkers("<tool_call>", "</tool_call>"),
            processor=processor,
            hidden_size=text["hidden_size"],
            audio_chunk_frames=2 * thinker["audio_config"]["n_window"],
        )
    except KeyError as error:
        raise ValueError(f"config.json lacks {error.args[0]} of the thinker") from None
