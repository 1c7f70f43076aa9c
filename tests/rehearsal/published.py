"""config.json of the published models, as far as our engines read it.

The sizes are by hand: from the papers, the models' pages and the sums of `tests/support/weights/published_sizes.py`.
All else is transformers' default. No published file was at hand. transformers has no Qwen3-TTS: all of it is by hand.
"""

import functools
from typing import Any

from transformers import Qwen2_5OmniConfig, Qwen3OmniMoeConfig

from tests.support.weights.published_sizes import TALKER, TEXT

OMNI_3_TEXT = {
    "vocab_size": 152_064,
    "hidden_size": 2048,
    "intermediate_size": 768,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "max_position_embeddings": 65_536,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
}
OMNI_3_TALKER = {
    "vocab_size": 3072,
    "hidden_size": 1024,
    "intermediate_size": 2048,
    "num_hidden_layers": 20,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "moe_intermediate_size": 384,
    "num_experts": 128,
    "num_experts_per_tok": 6,
    "shared_expert_intermediate_size": 768,
}
PREDICTOR = {
    "vocab_size": 2048,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 5,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000,
    "hidden_act": "silu",
    "num_code_groups": 16,
}
TTS_WIDTHS = {"qwen3-tts-1.7b": (2048, 6144), "qwen3-tts-0.6b": (1024, 3072)}  # of the talker: hidden, intermediate
NAMES = ("qwen3-omni-30b", "qwen2.5-omni-7b", "qwen2.5-omni-3b", *TTS_WIDTHS)


@functools.cache
def config(name: str) -> dict[str, Any]:
    """Nobody may change it. Raises KeyError: none of `NAMES`."""
    if name == "qwen3-omni-30b":
        return _omni_3()
    return _tts(*TTS_WIDTHS[name]) if name in TTS_WIDTHS else _omni_2_5(name.rpartition("-")[2].upper())


def _omni_3() -> dict[str, Any]:
    whole = Qwen3OmniMoeConfig(
        thinker_config={
            "text_config": OMNI_3_TEXT,
            "audio_config": {"output_dim": 2048},
            "vision_config": {"out_hidden_size": 2048},
        },
        talker_config={
            "text_config": OMNI_3_TALKER,
            "code_predictor_config": PREDICTOR,
            "num_code_groups": 16,
            "thinker_hidden_size": 2048,
            "accept_hidden_layer": 24,
            "spatial_merge_size": 2,
            "speaker_id": {"chelsie": 2301, "ethan": 2302, "aiden": 2303},
        },
        code2wav_config={"num_quantizers": 16},
    )
    return whole.to_dict() | {"dtype": "bfloat16"}


def _omni_2_5(size: str) -> dict[str, Any]:
    whole = Qwen2_5OmniConfig().to_dict()
    thinker, talker = whole["thinker_config"], whole["talker_config"]
    thinker["text_config"] |= TEXT[size]
    width = TEXT[size]["hidden_size"]
    thinker["audio_config"]["output_dim"] = thinker["vision_config"]["out_hidden_size"] = width
    rope = {"rope_type": "default", "rope_theta": 1_000_000.0, "mrope_section": [16, 24, 24]}
    talker |= TALKER | {"embedding_size": width, "rope_parameters": rope}
    return whole | {"dtype": "bfloat16"}


def _tts(width: int, intermediate: int) -> dict[str, Any]:
    return {
        "dtype": "bfloat16",
        "tts_eos_token_id": 151_673,
        "tts_pad_token_id": 151_671,
        "talker_config": {
            "vocab_size": 3072,
            "hidden_size": width,
            "intermediate_size": intermediate,
            "num_hidden_layers": 28,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "rms_norm_eps": 1e-6,
            "rope_theta": 1_000_000,
            "hidden_act": "silu",
            "max_position_embeddings": 32_768,
            "num_code_groups": 16,
            "text_hidden_size": 2048,
            "text_vocab_size": 151_936,
            "codec_eos_token_id": 2150,
            "spk_id": {"vivian": 3065},
            "code_predictor_config": PREDICTOR,
        },
    }


def codec_config() -> dict[str, Any]:
    """config.json of Qwen3-TTS's codec."""
    decoder = {
        "codebook_size": 2048,
        "codebook_dim": 512,
        "latent_dim": 1024,
        "hidden_size": 512,
        "intermediate_size": 1024,
        "num_hidden_layers": 8,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "head_dim": 64,
        "sliding_window": 72,
        "rms_norm_eps": 1e-5,
        "layer_scale_initial_scale": 0.01,
        "rope_theta": 10_000,
        "hidden_act": "silu",
        "attention_bias": False,
        "num_quantizers": 16,
        "upsample_rates": [8, 5, 4, 3],
        "upsampling_ratios": [2, 2],
        "decoder_dim": 1536,
    }
    return {"model_type": "qwen3_tts_tokenizer_12hz", "output_sample_rate": 24_000, "decoder_config": decoder}
