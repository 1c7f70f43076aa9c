"""The reference of Qwen3-TTS: the package qwen-tts, which is made for transformers 4.57, on transformers 5.

What it imports and is not installed has a stand-in while it is imported. What transformers 5 has renamed has its old
name in the package's modules only. Weights are loaded by name into models made on the CPU: its `from_pretrained` would
leave the rope of transformers 4 empty. What it computes is its own.
"""

import importlib
import importlib.util
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache, wraps
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import transformers
from packaging.version import Version
from safetensors.torch import load_file
from torch import nn

_ENDS_WITH = Version("5.21")  # it sets what is a property from then on
_ABSENT = ("librosa", "librosa.filters", "sox", "onnxruntime", "einops")
_ABSENT_KALDI = ("torchaudio", "torchaudio.compliance", "torchaudio.compliance.kaldi")


def load_codec(folder: Path) -> Any:
    """The reference's codec, Qwen3TTSTokenizerV2Model, of a checkpoint's folder `speech_tokenizer`: float32, eval."""
    return _loaded(new_codec(json.loads((folder / "config.json").read_text())), folder)


def new_codec(config: Mapping[str, Any]) -> nn.Module:
    """The reference's codec of a config.json, without values."""
    package = _package()
    return package.codec.Qwen3TTSTokenizerV2Model(
        package.codec_config.Qwen3TTSTokenizerV2Config(**_without_classes(config))
    )


def new_model(config: Mapping[str, Any]) -> Any:
    """The reference's Qwen3TTSForConditionalGeneration of a config.json, without values and codec."""
    package = _package()
    return package.model.Qwen3TTSForConditionalGeneration(package.config.Qwen3TTSConfig(**_without_classes(config)))


def load_speaker_encoder(folder: Path) -> Callable[[np.ndarray], torch.Tensor]:
    """The reference's `extract_speaker_embedding` of a checkpoint, for sound (samples,) float32 at 24 kHz."""
    package = _package()
    stated = json.loads((folder / "config.json").read_text())["speaker_encoder_config"]
    config = package.config.Qwen3TTSSpeakerEncoderConfig(**_without_classes(stated))
    encoder = package.model.Qwen3TTSSpeakerEncoder(config)
    tensors = load_file(folder / "model.safetensors")
    prefix = "speaker_encoder."
    encoder.load_state_dict({name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)})
    model = SimpleNamespace(speaker_encoder=encoder.float().eval(), device=torch.device("cpu"), dtype=torch.float32)
    return lambda sound: package.model.Qwen3TTSForConditionalGeneration.extract_speaker_embedding(model, sound, 24_000)


def load_model(folder: Path) -> Any:
    """The reference's Qwen3TTSForConditionalGeneration of a whole checkpoint: float32, eval, with its codec."""
    from transformers import AutoFeatureExtractor

    package, model = _package(), new_model(json.loads((folder / "config.json").read_text()))
    _loaded(model, folder)
    tokenizer = package.tokenizer.Qwen3TTSTokenizer()
    tokenizer.model = load_codec(folder / "speech_tokenizer")
    tokenizer.config, tokenizer.device = tokenizer.model.config, torch.device("cpu")
    tokenizer.feature_extractor = AutoFeatureExtractor.from_pretrained(folder / "speech_tokenizer")
    model.load_speech_tokenizer(tokenizer)
    model.load_generate_config(json.loads((folder / "generation_config.json").read_text()))
    return model


def load_tts(folder: Path) -> Any:
    """The reference's Qwen3TTSModel of a whole checkpoint, whose methods take text and give sound."""
    from transformers import AutoTokenizer

    package, model = _package(), load_model(folder)
    processor = package.processing.Qwen3TTSProcessor(AutoTokenizer.from_pretrained(folder, fix_mistral_regex=True))
    return package.inference.Qwen3TTSModel(model, processor, model.generate_config)


def _without_classes(config: Mapping[str, Any]) -> dict[str, Any]:
    """A config.json without the keys that the config classes set themselves, in its parts too."""
    kept = ((key, value) for key, value in config.items() if key not in ("model_type", "dtype", "torch_dtype"))
    return {key: _without_classes(value) if isinstance(value, dict) else value for key, value in kept}


def _loaded(model: nn.Module, folder: Path) -> nn.Module:
    """`model` with the weights of `folder`, float32 and in eval mode.

    Raises:
        RuntimeError: a tensor is missing, unknown or of another shape.
    """
    files = [load_file(file) for file in sorted(folder.glob("*.safetensors"))]
    model.load_state_dict({name: tensor.float() for tensors in files for name, tensor in tensors.items()})
    return model.float().eval().requires_grad_(False)


@cache
def _package() -> SimpleNamespace:
    """The modules of the package, by what they are."""
    if Version(transformers.__version__) >= _ENDS_WITH:
        pytest.skip(f"qwen-tts has no codec with transformers {transformers.__version__}, from {_ENDS_WITH} on")
    names = {
        "codec": "core.tokenizer_12hz.modeling_qwen3_tts_tokenizer_v2",
        "codec_config": "core.tokenizer_12hz.configuration_qwen3_tts_tokenizer_v2",
        "config": "core.models.configuration_qwen3_tts",
        "model": "core.models.modeling_qwen3_tts",
        "processing": "core.models.processing_qwen3_tts",
        "tokenizer": "inference.qwen3_tts_tokenizer",
        "inference": "inference.qwen3_tts_model",
    }
    with _importable():
        modules = {key: importlib.import_module(f"qwen_tts.{name}") for key, name in names.items()}
    package = SimpleNamespace(**modules)
    for module in (package.codec, package.model):
        module.ROPE_INIT_FUNCTIONS = {**module.ROPE_INIT_FUNCTIONS, "default": _default_rope}
        for mask in ("create_causal_mask", "create_sliding_window_causal_mask"):
            setattr(module, mask, _mask_of_4(getattr(module, mask)))
    talker = package.model.Qwen3TTSTalkerForConditionalGeneration
    talker.forward = _with_cache_position(talker.forward)
    # A list of names has become a mapping; here it names a layer that does not exist.
    package.model.Qwen3TTSTalkerForConditionalGeneration._tied_weights_keys = {}
    package.model.Qwen3TTSTalkerCodePredictorModelForConditionalGeneration._tied_weights_keys = {}
    for config in (package.config.Qwen3TTSTalkerConfig, package.config.Qwen3TTSTalkerCodePredictorConfig):
        config.pad_token_id = None  # every config had one
    return package


@contextmanager
def _importable() -> Iterator[None]:
    """Stand-ins for what is not installed, and a decorator as it was called in transformers 4, while this lasts."""
    from transformers import AutoModel, AutoProcessor, MimiModel  # noqa: F401, they must not see the stand-ins
    from transformers.utils import generic

    stand_ins = _stand_ins()
    sys.modules.update(stand_ins)
    try:
        with mock.patch.object(generic, "check_model_inputs", return_value=lambda forward: forward):
            yield
    finally:
        for name in stand_ins:
            del sys.modules[name]


def _mask_of_4(create: Any) -> Any:
    def create_mask(*, input_embeds: torch.Tensor, cache_position: torch.Tensor | None = None, **rest: Any) -> Any:
        return create(inputs_embeds=input_embeds, **rest)

    return create_mask


def _with_cache_position(forward: Any) -> Any:
    """`generate` no longer says where in the cache a step begins. Without it a padded batch has wrong positions."""

    @wraps(forward)
    def forward_of_4(self: Any, *, past_key_values: Any = None, inputs_embeds: Any = None, **rest: Any) -> Any:
        begin = 0 if past_key_values is None else past_key_values.get_seq_length()
        length = 1 if inputs_embeds is None else inputs_embeds.shape[1]
        places = torch.arange(begin, begin + length)
        rest |= {"past_key_values": past_key_values, "inputs_embeds": inputs_embeds, "cache_position": places}
        return forward(self, **rest)

    return forward_of_4


def _default_rope(config: Any, device: torch.device | None = None, **_: Any) -> tuple[torch.Tensor, float]:
    """Frequencies of a plain rope and the scale of its attention. arXiv:2104.09864."""
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    exponents = torch.arange(0, head, 2, dtype=torch.int64).to(device=device, dtype=torch.float) / head
    return 1.0 / (config.rope_theta**exponents), 1.0


def _mel_filters(*, sr: int, n_fft: int, n_mels: int, fmin: float, fmax: float | None) -> Any:
    """As `librosa.filters.mel`: (mels, n_fft // 2 + 1)."""
    from transformers.audio_utils import mel_filter_bank

    bank = mel_filter_bank(n_fft // 2 + 1, n_mels, fmin, fmax or sr / 2, sr, norm="slaney", mel_scale="slaney")
    return bank.T


def _stand_ins() -> dict[str, ModuleType]:
    """Modules for what is not installed. Only the mel filters are used by the 12-Hz models."""
    absent = [name for group in (_ABSENT, _ABSENT_KALDI) for name in group if not _installed(name)]
    modules = {name: ModuleType(name) for name in absent}
    for name, module in modules.items():
        parent, _, child = name.rpartition(".")
        if parent in modules:
            setattr(modules[parent], child, module)
    if "librosa.filters" in modules:
        modules["librosa.filters"].mel = _mel_filters  # pyright: ignore[reportAttributeAccessIssue]
    if "einops" in modules:
        modules["einops"].rearrange = modules["einops"].repeat = None  # pyright: ignore[reportAttributeAccessIssue]
    return modules


def _installed(name: str) -> bool:
    return importlib.util.find_spec(name.partition(".")[0]) is not None
