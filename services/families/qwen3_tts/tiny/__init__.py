"""Random checkpoints with published config keys, weight names, tokenizer and codec.

As published, the larger layout's code predictor is narrower than its talker.
"""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from services.families.tiny_sizes import CODEC_IDS, CODEC_SPECIAL_IDS, CODEC_VOICE, SPEECH_TOKENS, TransformerShape

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Qwen3TtsSizes:
    """A checkpoint's dimensions. `layout`: the published one that it resembles."""

    layout: str
    merges: int  # of the byte-level BPE
    text_hidden: int
    talker: TransformerShape
    predictor: TransformerShape
    codebook: int
    voices: tuple[str, ...]
    languages: tuple[str, ...]


CODE_GROUPS = 16
CONTEXT_POSITIONS = 8192
SIZES = {
    "tiny": Qwen3TtsSizes(
        layout="1b7",
        merges=256,
        text_hidden=96,
        talker=TransformerShape(64, 4, 4, 2, 32, 128),
        predictor=TransformerShape(48, 2, 2, 1, 32, 80),
        codebook=256,
        voices=("vivian", "ryan", "dylan"),
        languages=("chinese", "english", "german"),
    ),
    "small": Qwen3TtsSizes(
        layout="0b6",
        merges=384,
        text_hidden=112,
        talker=TransformerShape(80, 5, 6, 3, 16, 96),
        predictor=TransformerShape(80, 3, 4, 2, 24, 112),
        codebook=160,
        voices=("ada", "eric"),
        languages=("chinese", "french"),
    ),
}
# The last voice of each speaks a dialect.
DIALECT = "beijing_dialect"
CODEC_THINK, CODEC_LANGUAGE = 106, 2  # further offsets, the second of the first language


def write_checkpoint(out: Path, size: str, kind: str) -> None:
    """Writes a checkpoint into `out`, with weights from torch's global generator.

    Args:
        kind: `tts_model_type`: "custom_voice", "voice_design" or "base".

    Raises:
        KeyError: no such size.
    """
    from safetensors.torch import save_file  # pyright: ignore[reportUnknownVariableType]

    from services.families.qwen3_omni.tiny.processor import make_tokenizer
    from services.families.qwen3_tts.tiny.weights import speaker_encoder, talker_tensors, write_codec
    from services.families.tiny_parts import write_json

    sizes = SIZES[size]
    tokenizer: Any = make_tokenizer(sizes.merges)
    tensors: dict[str, torch.Tensor] = {}
    config = _config(sizes, kind, tokenizer)
    if kind == "base":
        config["speaker_encoder_config"], tensors = speaker_encoder(size, sizes.talker.hidden_size)
    write_json(out / "config.json", config)
    write_json(out / "generation_config.json", _GENERATION)
    tokenizer.save_pretrained(out)
    save_file(talker_tensors(config, out) | tensors, out / "model.safetensors", {"format": "pt"})
    write_codec(out, size)


ARCHS = {
    "qwen3-tts": partial(write_checkpoint, kind="custom_voice"),
    "qwen3-tts-voice-design": partial(write_checkpoint, kind="voice_design"),
    "qwen3-tts-base": partial(write_checkpoint, kind="base"),
}
_GENERATION = {
    "do_sample": True,
    "temperature": 0.9,
    "top_k": 50,
    "top_p": 1.0,
    "repetition_penalty": 1.05,
    "subtalker_dosample": True,
    "subtalker_temperature": 0.9,
    "subtalker_top_k": 50,
    "subtalker_top_p": 1.0,
    "max_new_tokens": 2048,
}


def _config(sizes: Qwen3TtsSizes, kind: str, tokenizer: Any) -> dict[str, Any]:
    from services.families.tiny_parts import token_ids

    return {
        "architectures": ["Qwen3TTSForConditionalGeneration"],
        "model_type": "qwen3_tts",
        "tokenizer_type": "qwen3_tts_tokenizer_12hz",
        "tts_model_size": sizes.layout,
        "tts_model_type": kind,
        "transformers_version": "4.57.3",
        "talker_config": _talker_config(sizes, kind, len(tokenizer)),
        **token_ids(tokenizer, SPEECH_TOKENS),
    }


def _talker_config(sizes: Qwen3TtsSizes, kind: str, text_vocab: int) -> dict[str, Any]:
    voices = sizes.voices if kind == "custom_voice" else ()
    languages = (*sizes.languages, DIALECT)
    return {
        **_transformer(sizes.talker),
        "code_predictor_config": {
            **_transformer(sizes.predictor),
            "model_type": "qwen3_tts_talker_code_predictor",
            "num_code_groups": CODE_GROUPS,
            "vocab_size": sizes.codebook,
        },
        "model_type": "qwen3_tts_talker",
        "num_code_groups": CODE_GROUPS,
        "vocab_size": sizes.codebook + CODEC_SPECIAL_IDS,
        "text_vocab_size": text_vocab,
        "text_hidden_size": sizes.text_hidden,
        **{key: sizes.codebook + offset for key, offset in CODEC_IDS.items()},
        "codec_think_id": sizes.codebook + CODEC_THINK,
        "codec_language_id": {name: sizes.codebook + CODEC_LANGUAGE + i for i, name in enumerate(languages)},
        "spk_id": {name: sizes.codebook + CODEC_VOICE + i for i, name in enumerate(voices)},
        "spk_is_dialect": {name: DIALECT if name == sizes.voices[-1] else False for name in voices},
    }


def _transformer(sizes: TransformerShape) -> dict[str, Any]:
    from services.families.tiny_parts import rope_scaling

    return {
        **sizes.config(),
        "attention_bias": False,
        "hidden_act": "silu",
        "max_position_embeddings": CONTEXT_POSITIONS,
        "rms_norm_eps": 1e-6,
        "rope_scaling": {"interleaved": True, **rope_scaling(sizes.head_dim)},
        "rope_theta": 1_000_000,
        "tie_word_embeddings": False,
        "use_sliding_window": False,
    }
