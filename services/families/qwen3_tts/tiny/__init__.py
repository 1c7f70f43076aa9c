"""Random checkpoints with published config keys, weight names, tokenizer and codec.

As published, the larger layout's code predictor is narrower than its talker.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from services.families.tiny_sizes import TransformerShape, read_sizes, read_table

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
    voices: Sequence[str]
    languages: Sequence[str]


CODE_GROUPS = 16
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

    sizes = read_sizes(__file__, Qwen3TtsSizes)[size]
    tokenizer: Any = make_tokenizer(sizes.merges)
    tensors: dict[str, torch.Tensor] = {}
    config = _config(sizes, kind, tokenizer)
    if kind == "base":
        config["speaker_encoder_config"], tensors = speaker_encoder(size, sizes.talker.hidden_size)
    write_json(out / "config.json", config)
    write_json(out / "generation_config.json", read_table(__file__, "published")["generation"])
    tokenizer.save_pretrained(out)
    save_file(talker_tensors(config, out) | tensors, out / "model.safetensors", {"format": "pt"})
    write_codec(out, size)


ARCHS = {
    "qwen3-tts": partial(write_checkpoint, kind="custom_voice"),
    "qwen3-tts-voice-design": partial(write_checkpoint, kind="voice_design"),
    "qwen3-tts-base": partial(write_checkpoint, kind="base"),
}


def _config(sizes: Qwen3TtsSizes, kind: str, tokenizer: Any) -> dict[str, Any]:
    from services.families.tiny_parts import SPEECH_TOKENS, token_ids

    return {
        **read_table(__file__, "published")["config"],
        "tts_model_size": sizes.layout,
        "tts_model_type": kind,
        "talker_config": _talker_config(sizes, kind, len(tokenizer)),
        **token_ids(tokenizer, SPEECH_TOKENS),
    }


def _talker_config(sizes: Qwen3TtsSizes, kind: str, text_vocab: int) -> dict[str, Any]:
    from services.families.tiny_parts import CODEC_IDS, CODEC_SPECIAL_IDS, CODEC_VOICE

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
        **read_table(__file__, "published")["transformer"],
        "rope_scaling": {"interleaved": True, **rope_scaling(sizes.head_dim)},
    }
