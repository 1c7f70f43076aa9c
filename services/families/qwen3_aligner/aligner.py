"""Qwen3-ForcedAligner for the engine: transformers' model and processor."""

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import pad

from services.aligner.family import RATE_HZ, Sound, WordTimes
from services.common.engine.weights import compute_dtype
from services.common.errors import InvalidInput
from services.common.telemetry import logs
from services.registry import read_config

MAX_AUDIO_S = 300.0  # that the published model was trained for
_LANGUAGES = {  # codes of those that the processor takes
    "zh": "Chinese",
    "yue": "Cantonese",
    "en": "English",
    "fr": "French",
    "de": "German",
    "it": "Italian",
    "ja": "Japanese",
    "ko": "Korean",
    "pt": "Portuguese",
    "ru": "Russian",
    "es": "Spanish",
}
_SPLITTERS = {"ja": "nagisa", "ko": "soynlp"}  # packages by which the processor finds words


class Qwen3ForcedAligner:
    """See `services.aligner.family.WordAligner`."""

    def __init__(self, model: Any, processor: Any) -> None:
        self.languages: Sequence[str] = tuple(_LANGUAGES)
        self._model, self._processor = model, processor
        self.dtype, self.device = model.dtype, model.device
        self.resolution_ms = float(processor.timestamp_segment_time)
        self.max_audio_s = min(MAX_AUDIO_S, model.config.num_labels * self.resolution_ms / 1000)

    def split(self, text: str, language: str) -> list[str]:
        package = _SPLITTERS.get(language)
        if package is not None and find_spec(package) is None:
            reason = f"the words of {_LANGUAGES[language]} are found by the package {package}, which is not installed"
            raise InvalidInput("language", f"{reason} with the aligner")
        return self._processor.split_words_for_alignment(text, _LANGUAGES.get(language))

    def align(self, sounds: Sequence[Sound]) -> list[list[WordTimes]]:
        # One by one: the processor's spectrogram of a sound's end depends on the sounds beside it.
        inputs = _batch([self._inputs(sound) for sound in sounds], self._model.config.pad_token_id)
        moved = {name: each.to(self.device) for name, each in inputs.items()}
        moved["input_features"] = moved["input_features"].to(self.dtype)
        logits = self._model(**moved).logits
        words = [list(sound.words) for sound in sounds]
        mark = self._model.config.timestamp_token_id
        found = self._processor.decode_forced_alignment(logits, moved["input_ids"], words, mark)
        return [[_times(word) for word in each] for each in found]

    def _inputs(self, sound: Sound) -> dict[str, torch.Tensor]:
        """The model's, of a sound, whose words the template takes one by one: they are split already."""
        words = [{"type": "text", "text": word} for word in sound.words]
        message = {"role": "user", "content": [{"type": "audio", "audio": sound.samples}, *words]}
        return self._processor.apply_chat_template([[message]], tokenize=True, return_dict=True)


def _batch(inputs: Sequence[dict[str, torch.Tensor]], padding: int) -> dict[str, torch.Tensor]:
    """The inputs of several sounds in one. Padded on the right, a sound has the same positions in every batch."""
    fills = {"input_ids": padding, "attention_mask": 0, "input_features": 0, "input_features_mask": 0}
    found = dict[str, torch.Tensor]()
    for name, fill in fills.items():
        rows = [each[name][0] for each in inputs]
        longest = max(row.shape[-1] for row in rows)
        found[name] = torch.stack([pad(row, (0, longest - row.shape[-1]), value=fill) for row in rows])
    return found


def _times(word: dict[str, Any]) -> WordTimes:
    return WordTimes(round(word["start_time"] * 1000), round(word["end_time"] * 1000))


def load_aligner(folder: Path, device: torch.device, dtype: str) -> Qwen3ForcedAligner:
    """Raises ValueError: the processor's rate is another, or its files are at fault; OSError: files are missing."""
    import transformers

    logs.adopt("transformers")
    chosen = compute_dtype(read_config(folder), torch.float32) if dtype == "auto" else getattr(torch, dtype)
    library: Any = transformers
    processor = library.AutoProcessor.from_pretrained(folder, trust_remote_code=False)
    if processor.feature_extractor.sampling_rate != RATE_HZ:
        raise ValueError(f"{folder}: its processor takes {processor.feature_extractor.sampling_rate} Hz, not {RATE_HZ}")
    model = library.AutoModelForTokenClassification.from_pretrained(folder, dtype=chosen, trust_remote_code=False)
    return Qwen3ForcedAligner(model.to(device).eval(), processor)
