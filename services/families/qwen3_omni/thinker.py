"""Qwen3-Omni's thinker: a language model with experts that takes text, images, video and sound."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from services.registry import has_speech
from services.sizes import weights_dtype
from services.thinker.family import ReasoningMarkers, ThinkerCheckpoint, ToolCallMarkers

ARCHITECTURES = {"Qwen3OmniMoeForConditionalGeneration": "services.families.qwen3_omni.thinker_model:RecordingThinker"}
_THOUGHT = ("<think>", "</think>")
_ACCEPT_HIDDEN_LAYER = 18  # transformers' default


@dataclass(frozen=True)
class Qwen3OmniThinker(ThinkerCheckpoint):
    """A checkpoint.

    Attributes:
        audio_chunk_frames: spectrogram frames of a chunk of the audio encoder.
    """

    audio_chunk_frames: int

    def sound_ids(self, sounds: Sequence[np.ndarray]) -> list[str]:
        """See `ThinkerCheckpoint.sound_ids`.

        Sounds are padded to the request's longest, which changes their ends within a window or chunk, but not after
        silence and a whole hop.
        """
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
        """Uses vLLM's own M-RoPE kernel, as vLLM-Omni does: the compiled one changes the result for sounds."""
        return {"compilation_config": {} if on_cpu else {"custom_ops": ["+rotary_embedding"]}}


def checkpoint(folder: Path, config: dict[str, Any], processor: Any) -> Qwen3OmniThinker:
    thinker = config["thinker_config"]
    text = thinker["text_config"]
    return Qwen3OmniThinker(
        folder=folder,
        dtype=weights_dtype(config, thinker, text),
        vocab_size=text["vocab_size"],
        hidden_size=text["hidden_size"],
        accept_hidden_layer=_accept_hidden_layer(config),
        placeholders={kind: thinker[f"{kind}_token_id"] for kind in ("image", "audio", "video")},
        tool_calls=ToolCallMarkers("<tool_call>", "</tool_call>"),
        reasoning=None if has_speech(config) else _reasoning(processor),
        processor=processor,
        sound_tokens_per_s=12,
        positions_per_s=thinker.get("position_id_per_seconds", 25),
        audio_chunk_frames=2 * thinker["audio_config"]["n_window"],
    )


def _accept_hidden_layer(config: dict[str, Any]) -> int | None:
    return config["talker_config"].get("accept_hidden_layer", _ACCEPT_HIDDEN_LAYER) if has_speech(config) else None


def _reasoning(processor: Any) -> ReasoningMarkers | None:
    """Reasoning markers of a checkpoint without a talker. All vocabularies have them; thinkers with a talker do not
    reason."""
    vocabulary = processor.tokenizer.get_vocab()
    opening, closing = _THOUGHT
    if opening not in vocabulary or closing not in vocabulary:
        return None
    return ReasoningMarkers(opening, closing, vocabulary[opening], vocabulary[closing], "deepseek_r1")
