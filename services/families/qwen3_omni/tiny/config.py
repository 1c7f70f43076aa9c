"""config.json and generation_config.json with the keys of the published checkpoint."""

from collections.abc import Mapping
from typing import Any

from transformers import GenerationConfig, PreTrainedTokenizerBase, Qwen3OmniMoeConfig

from services.families.qwen3_omni.tiny.sizes import Sizes, Transformer

POSITIONS_PER_SECOND = 13
CONTEXT_TOKENS = 16_384
VOCABULARY_MULTIPLE = 64  # the embedding is padded to this, as the published one is

# Config keys of special ids, with their tokens.
MEDIA_IDS = {
    "audio_token_id": "<|audio_pad|>",
    "image_token_id": "<|image_pad|>",
    "video_token_id": "<|video_pad|>",
    "vision_start_token_id": "<|vision_start|>",
    "vision_end_token_id": "<|vision_end|>",
    "audio_start_token_id": "<|audio_start|>",
    "audio_end_token_id": "<|audio_end|>",
}
MODEL_IDS = {
    "im_start_token_id": "<|im_start|>",
    "im_end_token_id": "<|im_end|>",
    "tts_pad_token_id": "<tts_pad>",
    "tts_bos_token_id": "<tts_text_bos>",
    "tts_eos_token_id": "<tts_text_eod>",
    "system_token_id": "system",
    "user_token_id": "user",
    "assistant_token_id": "assistant",
}
# Talker vocabulary: the codebook, then 1024 ids of which these offsets are used.
CODEC_IDS = {
    "codec_pad_id": 100,
    "codec_bos_id": 101,
    "codec_eos_token_id": 102,
    "codec_nothink_id": 107,
    "codec_think_bos_id": 108,
    "codec_think_eos_id": 109,
}
CODEC_SPEAKER = 253
CODEC_SPECIAL_IDS = 1024


def model_config(sizes: Sizes, tokenizer: PreTrainedTokenizerBase) -> Qwen3OmniMoeConfig:
    """The whole model's config; special ids are those of `tokenizer`."""
    media = {
        **_ids(tokenizer, MEDIA_IDS),
        "position_id_per_seconds": POSITIONS_PER_SECOND,
        "seconds_per_chunk": 2,
    }
    vocabulary = -(-len(tokenizer) // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE
    thinker = {
        "text_config": {"vocab_size": vocabulary, **_moe(sizes.thinker)},
        "audio_config": _audio_config(sizes),
        "vision_config": _vision_config(sizes),
        **_ids(tokenizer, {"user_token_id": "user"}),
        **media,
    }
    code2wav = {
        "codebook_size": sizes.codebook,
        "num_quantizers": sizes.code_groups,
        "sliding_window": sizes.code2wav_window,
        "decoder_dim": sizes.decoder_dim,
        "upsample_rates": list(sizes.upsample_rates),
        "upsampling_ratios": [2, 2],
        "rope_theta": 10_000.0,
        **_dense(sizes.code2wav),
    }
    return Qwen3OmniMoeConfig(
        architectures=["Qwen3OmniMoeForConditionalGeneration"],
        dtype="float32",
        enable_audio_output=True,
        thinker_config=thinker,
        talker_config={**_talker_config(sizes), **media},
        code2wav_config=code2wav,
        **_ids(tokenizer, MODEL_IDS),
    )


def generation_config(tokenizer: PreTrainedTokenizerBase) -> GenerationConfig:
    """The published sampling defaults."""
    return GenerationConfig(
        do_sample=True,
        temperature=0.9,
        top_k=50,
        eos_token_id=tokenizer.convert_tokens_to_ids("<|im_end|>"),
        pad_token_id=tokenizer.convert_tokens_to_ids("<|endoftext|>"),
        talker_max_new_tokens=4096,
        talker_do_sample=True,
        talker_temperature=0.9,
        talker_top_k=50,
        talker_top_p=1.0,
        talker_repetition_penalty=1.05,
    )


def _ids(tokenizer: PreTrainedTokenizerBase, tokens: Mapping[str, str]) -> dict[str, Any]:
    return {key: tokenizer.convert_tokens_to_ids(token) for key, token in tokens.items()}


def _talker_config(sizes: Sizes) -> dict[str, Any]:
    return {
        "text_config": {
            "vocab_size": sizes.codebook + CODEC_SPECIAL_IDS,
            "shared_expert_intermediate_size": 2 * sizes.talker.intermediate,
            **_moe(sizes.talker),
        },
        "code_predictor_config": {
            "vocab_size": sizes.codebook,
            "num_code_groups": sizes.code_groups,
            **_dense(sizes.predictor),
        },
        "num_code_groups": sizes.code_groups,
        "thinker_hidden_size": sizes.thinker.hidden,
        "accept_hidden_layer": sizes.accept_hidden_layer,
        "spatial_merge_size": 2,
        **{key: sizes.codebook + offset for key, offset in CODEC_IDS.items()},
        "speaker_id": {name: sizes.codebook + CODEC_SPEAKER + i for i, name in enumerate(sizes.speakers)},
    }


def _dense(transformer: Transformer) -> dict[str, Any]:
    return {
        "hidden_size": transformer.hidden,
        "num_hidden_layers": transformer.layers,
        "num_attention_heads": transformer.heads,
        "num_key_value_heads": transformer.kv_heads,
        "head_dim": transformer.head_dim,
        "intermediate_size": transformer.intermediate,
    }


def _moe(transformer: Transformer) -> dict[str, Any]:
    third = transformer.head_dim // 2 // 3
    mrope_section = [transformer.head_dim // 2 - 2 * third, third, third]  # temporal, height, width
    return {
        **_dense(transformer),
        "moe_intermediate_size": transformer.intermediate,
        "num_experts": transformer.experts,
        "num_experts_per_tok": transformer.experts_per_token,
        "norm_topk_prob": True,
        "tie_word_embeddings": False,
        "max_position_embeddings": CONTEXT_TOKENS,
        "rope_theta": 1_000_000.0,
        "rope_scaling": {
            "rope_type": "default",
            "type": "default",
            "mrope_section": mrope_section,
            "interleaved": True,
            "mrope_interleaved": True,
        },
    }


def _audio_config(sizes: Sizes) -> dict[str, Any]:
    width = sizes.encoder_width
    return {
        "num_mel_bins": 128,
        "d_model": width,
        "encoder_layers": 2,
        "encoder_attention_heads": 2,
        "encoder_ffn_dim": 2 * width,
        "downsample_hidden_size": 16,
        "output_dim": sizes.thinker.hidden,
        "n_window": 50,
        "n_window_infer": 800,
        "conv_chunksize": 500,
        "max_source_positions": 1500,
    }


def _vision_config(sizes: Sizes) -> dict[str, Any]:
    width, patch = sizes.encoder_width, 16
    return {
        "depth": 4,
        "hidden_size": width,
        "intermediate_size": 2 * width,
        "num_heads": 2,
        "out_hidden_size": sizes.thinker.hidden,
        "patch_size": patch,
        "spatial_patch_size": patch,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "num_position_embeddings": sizes.vision_grid**2,
        "image_size": sizes.vision_grid * patch,
        "deepstack_visual_indexes": [0, 1, 2],
        "apply_vit_abs_pos_embed": True,
        "tokens_per_second": 2,
    }
