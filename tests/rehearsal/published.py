"""config.json of the published models, with all that our engines, vLLM and the references read.

Sources, as no published file was at hand:
    Qwen3-Omni: a public listing of the checkpoint, which has its config.json.
    Qwen2.5-Omni: by hand, from its paper, transformers' defaults and `published_sizes`.
    Qwen3-TTS: by hand, from excerpts of the files in other projects' documents and the package qwen-tts.

`test_names.py` holds them against what others have counted in the published files.
"""

import functools
from typing import Any

from tests.support.weights.published_sizes import TALKER, TEXT

OMNI_3_TEXT = {
    "model_type": "qwen3_omni_moe_text",
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
    "norm_topk_prob": True,
}
OMNI_3_TALKER = {
    "model_type": "qwen3_omni_moe_talker_text",
    "vocab_size": 3072,
    "hidden_size": 1024,
    "intermediate_size": 2048,
    "num_hidden_layers": 20,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "max_position_embeddings": 65_536,
    "moe_intermediate_size": 384,
    "num_experts": 128,
    "num_experts_per_tok": 6,
    "norm_topk_prob": True,
    "shared_expert_intermediate_size": 768,
}
OMNI_3_SOUNDS = {
    "model_type": "qwen3_omni_moe_audio_encoder",
    "num_mel_bins": 128,
    "d_model": 1280,
    "encoder_layers": 32,
    "encoder_attention_heads": 20,
    "encoder_ffn_dim": 5120,
    "downsample_hidden_size": 480,
    "output_dim": 2048,
    "n_window": 50,
    "n_window_infer": 800,
    "conv_chunksize": 500,
    "max_source_positions": 1500,
}
OMNI_3_PICTURES = {
    "model_type": "qwen3_omni_moe_vision_encoder",
    "depth": 27,
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_heads": 16,
    "out_hidden_size": 2048,
    "patch_size": 16,
    "spatial_patch_size": 16,
    "temporal_patch_size": 2,
    "spatial_merge_size": 2,
    "tokens_per_second": 2,
    "image_size": 768,
    "num_position_embeddings": 2304,
    "apply_vit_abs_pos_embed": True,
    "deepstack_visual_indexes": [8, 16, 24],
}
PREDICTOR = {
    "vocab_size": 2048,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 5,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 32_768,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000,
    "rope_scaling": None,
    "hidden_act": "silu",
    "attention_bias": False,
    "num_code_groups": 16,
}
# Of the decoders of both codecs.
WAVE_DECODER = {
    "codebook_size": 2048,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "sliding_window": 72,
    "rms_norm_eps": 1e-5,
    "layer_scale_initial_scale": 0.01,
    "rope_theta": 10_000,
    "hidden_act": "silu",
    "attention_bias": False,
    "max_position_embeddings": 8000,
    "num_quantizers": 16,
    "num_semantic_quantizers": 1,
    "semantic_codebook_size": 4096,
    "upsample_rates": [8, 5, 4, 3],
    "upsampling_ratios": [2, 2],
    "decoder_dim": 1536,
    "codebook_dim": 512,
    "vector_quantization_hidden_dimension": 512,
}
CODES = {"codec_bos_id": 2149, "codec_eos_token_id": 2150, "codec_pad_id": 2148, "codec_nothink_id": 2155}
CODES |= {"codec_think_bos_id": 2156, "codec_think_eos_id": 2157}
TTS_IDS = {"im_start_token_id": 151_644, "im_end_token_id": 151_645, "assistant_token_id": 77_091}
TTS_IDS |= {"tts_bos_token_id": 151_672, "tts_eos_token_id": 151_673, "tts_pad_token_id": 151_671}
TTS_WIDTHS = {"qwen3-tts-1.7b": (2048, 6144), "qwen3-tts-0.6b": (1024, 3072)}  # of the talker: hidden, intermediate
SIZES = {"qwen3-omni-30b": "30B", "qwen2.5-omni-7b": "7B", "qwen2.5-omni-3b": "3B"}  # as in `published_sizes`
SIZES |= {"qwen3-tts-1.7b": "TTS 1.7B", "qwen3-tts-0.6b": "TTS 0.6B"}
NAMES = tuple(SIZES)


@functools.cache
def config(name: str) -> dict[str, Any]:
    """Nobody may change it. Raises KeyError: none of `NAMES`."""
    if name == "qwen3-omni-30b":
        return _omni_3()
    return _tts(*TTS_WIDTHS[name]) if name in TTS_WIDTHS else _omni_2_5(SIZES[name])


def _rope(**keys: Any) -> dict[str, Any]:
    """As config.json had it up to transformers 4."""
    return {"rope_theta": 1_000_000, "rope_scaling": {"rope_type": "default", "type": "default", **keys}}


def _omni_3() -> dict[str, Any]:
    media = {"audio_token_id": 151_675, "image_token_id": 151_655, "video_token_id": 151_656}
    media |= {"audio_start_token_id": 151_669, "audio_end_token_id": 151_670, "vision_start_token_id": 151_652}
    media |= {"position_id_per_seconds": 13, "seconds_per_chunk": 2}
    layers = {"rms_norm_eps": 1e-6, "hidden_act": "silu", "attention_bias": False, "tie_word_embeddings": False}
    sections = {"interleaved": True, "mrope_section": [24, 20, 20]}
    thinker = {
        "model_type": "qwen3_omni_moe_thinker",
        "text_config": OMNI_3_TEXT | layers | _rope(**sections, mrope_interleaved=True),
        "audio_config": OMNI_3_SOUNDS,
        "vision_config": OMNI_3_PICTURES,
        "user_token_id": 872,
        "vision_end_token_id": 151_653,
        "torch_dtype": "bfloat16",
    }
    talker = {
        "text_config": OMNI_3_TALKER | layers | _rope(**sections),
        "code_predictor_config": PREDICTOR,
        "num_code_groups": 16,
        "thinker_hidden_size": 2048,
        "accept_hidden_layer": 24,
        "spatial_merge_size": 2,
        "speaker_id": {"chelsie": 2301, "ethan": 2302, "aiden": 2303},
    }
    return {
        "architectures": ["Qwen3OmniMoeForConditionalGeneration"],
        "model_type": "qwen3_omni_moe",
        "torch_dtype": "bfloat16",
        "enable_audio_output": True,
        "system_token_id": 8948,
        "user_token_id": 872,
        "thinker_config": thinker | media,
        "talker_config": talker | media | CODES,
        "code2wav_config": WAVE_DECODER | {"hidden_size": 1024, "intermediate_size": 3072},
        **TTS_IDS,
    }


def _omni_2_5(size: str) -> dict[str, Any]:
    rope = _rope(mrope_section=[16, 24, 24])
    media = {"audio_token_index": 151_646, "image_token_index": 151_655, "video_token_index": 151_656}
    media |= {"position_id_per_seconds": 25, "seconds_per_chunk": 2, "audio_start_token_id": 151_647}
    media |= {"audio_end_token_id": 151_648, "vision_start_token_id": 151_652, "vision_end_token_id": 151_653}
    layers = {"max_position_embeddings": 32_768, "rms_norm_eps": 1e-6, "hidden_act": "silu"} | rope
    width = TEXT[size]["hidden_size"]
    thinker = {
        "model_type": "qwen2_5_omni_thinker",
        "text_config": TEXT[size] | layers | {"model_type": "qwen2_5_omni_text", "tie_word_embeddings": False},
        "audio_config": {"model_type": "qwen2_5_omni_audio_encoder", "output_dim": width},
        "vision_config": {
            "model_type": "qwen2_5_omni_vision_encoder",
            "hidden_size": 1280,
            "out_hidden_size": width,
        },
        "user_token_id": 872,
    }
    talker = TALKER | layers | {"model_type": "qwen2_5_omni_talker", "embedding_size": width, "spatial_merge_size": 2}
    codec = {"start": 8293, "end": 8294, "pad": 8292, "mask": 8296}
    talker |= {f"tts_codec_{name}_token_id": code for name, code in codec.items()}
    text = {"start": 151_860, "end": 151_861, "pad": 151_859}
    talker |= {f"tts_text_{name}_token_id": token for name, token in text.items()}
    dit = {"model_type": "qwen2_5_omni_dit", "num_embeds": 8193, "mel_dim": 80, "block_size": 24, "repeats": 2}
    vocoder = {"model_type": "qwen2_5_omni_bigvgan", "mel_dim": 80, "upsample_initial_channel": 1536}
    return {
        "architectures": ["Qwen2_5OmniModel"],
        "model_type": "qwen2_5_omni",
        "torch_dtype": "bfloat16",
        "enable_audio_output": True,
        "thinker_config": thinker | media,
        "talker_config": talker | media,
        "token2wav_config": {
            "model_type": "qwen2_5_omni_token2wav",
            "dit_config": dit,
            "bigvgan_config": vocoder,
        },
    }


def _tts(width: int, intermediate: int) -> dict[str, Any]:
    """Of the base model, which has a speaker encoder, with a voice of its own besides."""
    talker = {
        "vocab_size": 3072,
        "hidden_size": width,
        "intermediate_size": intermediate,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "max_position_embeddings": 32_768,
        "num_code_groups": 16,
        "text_hidden_size": 2048,
        "text_vocab_size": 151_936,
        "codec_think_id": 2154,
        "codec_language_id": {"chinese": 2055, "english": 2050},
        "spk_id": {"vivian": 3065},
        "spk_is_dialect": {"vivian": False},
        "code_predictor_config": PREDICTOR | {"max_position_embeddings": 65_536},
    }
    return {
        "architectures": ["Qwen3TTSForConditionalGeneration"],
        "model_type": "qwen3_tts",
        "dtype": "bfloat16",
        "tokenizer_type": "qwen3_tts_tokenizer_12hz",
        "tts_model_type": "base",
        "tts_model_size": "1b7" if width == 2048 else "0b6",
        "talker_config": talker | CODES | _rope(interleaved=True, mrope_section=[24, 20, 20]),
        "speaker_encoder_config": {"enc_dim": width, "sample_rate": 24_000},
        **TTS_IDS,
    }


def codec_config() -> dict[str, Any]:
    """config.json of Qwen3-TTS's codec, of both sizes. Its encoder is a Mimi, of transformers' default sizes."""
    decoder = {"latent_dim": 1024, "hidden_size": 512, "intermediate_size": 1024, "head_dim": 64}
    return {
        "model_type": "qwen3_tts_tokenizer_12hz",
        "input_sample_rate": 24_000,
        "output_sample_rate": 24_000,
        "encode_downsample_rate": 1920,
        "decode_upsample_rate": 1920,
        "encoder_valid_num_quantizers": 16,
        "decoder_config": WAVE_DECODER | decoder,
        "encoder_config": {"model_type": "mimi", "num_quantizers": 32, "sampling_rate": 24_000},
    }
