"""Config with the published keys, and random weights. Defaults of config classes are left out."""

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers

from services.families import tiny_parts
from services.families.qwen3_omni.tiny.processor import NAMED_TOKENS, SPECIAL_TOKENS
from services.families.tiny_parts import CODEC_IDS, CODEC_SPECIAL_IDS, CODEC_VOICE, SPEECH_TOKENS
from services.families.tiny_sizes import TransformerShape, read_table

if TYPE_CHECKING:
    from services.families.qwen3_omni.tiny import Qwen3OmniSizes

POSITIONS_PER_SECOND = 13
CONTEXT_TOKENS = 16_384

# Config keys of special ids, with their tokens. The processor's bos and eos of media are start and end here.
MEDIA_IDS = {f"{name.replace('bos', 'start').replace('eos', 'end')}_id": token for name, token in NAMED_TOKENS.items()}
MODEL_IDS = {**SPEECH_TOKENS, "system_token_id": "system", "user_token_id": "user"}

THOUGHT_END_SCALE = 2  # gives thoughts of some dozens of tokens


def write_model(
    out: Path, sizes: "Qwen3OmniSizes", tokenizer: transformers.PreTrainedTokenizerBase, thinks: bool = False
) -> None:
    """Writes config and float32 weights into `out`, with special ids of `tokenizer`.

    A model that `thinks` has only a thinker.
    """
    config = model_config(sizes, tokenizer)
    config.enable_audio_output = not thinks
    model: Any = transformers.Qwen3OmniMoeForConditionalGeneration(config)
    tiny_parts.randomize(model.float().eval())
    tiny_parts.prefer_text(model.thinker.lm_head.weight, tokenizer, SPECIAL_TOKENS)
    if thinks:
        _end_thoughts(model, tokenizer)
    else:
        _set_loudness(model)
    model.generation_config = generation_config(tokenizer)
    model.save_pretrained(out)
    if thinks:
        # as published without speech
        tiny_parts.edit_json(out / "config.json", {}, dropped=("talker_config", "code2wav_config"))


def model_config(
    sizes: "Qwen3OmniSizes", tokenizer: transformers.PreTrainedTokenizerBase
) -> transformers.Qwen3OmniMoeConfig:
    media = tiny_parts.token_ids(tokenizer, MEDIA_IDS) | {
        "position_id_per_seconds": POSITIONS_PER_SECOND,
        "seconds_per_chunk": 2,
    }
    thinker = {
        "text_config": {"vocab_size": tiny_parts.padded_vocabulary(len(tokenizer)), **_moe(sizes.thinker)},
        "audio_config": {
            **tiny_parts.audio_config(sizes.encoder_width, sizes.thinker.hidden_size),
            "downsample_hidden_size": 16,
        },
        "vision_config": _vision_config(sizes),
        **tiny_parts.token_ids(tokenizer, {"user_token_id": "user"}),
        **media,
    }
    code2wav = {
        "codebook_size": sizes.codebook,
        "num_quantizers": sizes.code_groups,
        "sliding_window": sizes.code2wav_window,
        "decoder_dim": sizes.decoder_dim,
        "upsample_rates": list(sizes.upsample_rates),
        "upsampling_ratios": [2, 2],
        **sizes.code2wav.config(),
    }
    return transformers.Qwen3OmniMoeConfig(
        dtype="float32",
        thinker_config=thinker,
        talker_config={**_talker_config(sizes), **media},
        code2wav_config=code2wav,
        **tiny_parts.token_ids(tokenizer, MODEL_IDS),
    )


def generation_config(tokenizer: transformers.PreTrainedTokenizerBase) -> transformers.GenerationConfig:
    return transformers.GenerationConfig(
        **read_table(__file__, "published")["generation"],
        eos_token_id=tokenizer.convert_tokens_to_ids("<|im_end|>"),
        pad_token_id=tokenizer.convert_tokens_to_ids("<|endoftext|>"),
    )


def _talker_config(sizes: "Qwen3OmniSizes") -> dict[str, Any]:
    return {
        "text_config": {
            "vocab_size": sizes.codebook + CODEC_SPECIAL_IDS,
            "shared_expert_intermediate_size": 2 * sizes.talker.intermediate_size,
            **_moe(sizes.talker),
        },
        "code_predictor_config": {
            "vocab_size": sizes.codebook,
            "num_code_groups": sizes.code_groups,
            **sizes.predictor.config(),
        },
        "num_code_groups": sizes.code_groups,
        "thinker_hidden_size": sizes.thinker.hidden_size,
        "accept_hidden_layer": sizes.accept_hidden_layer,
        "spatial_merge_size": 2,
        **{key: sizes.codebook + offset for key, offset in CODEC_IDS.items()},
        "speaker_id": {name: sizes.codebook + CODEC_VOICE + i for i, name in enumerate(sizes.speakers)},
    }


def _moe(transformer: TransformerShape) -> dict[str, Any]:
    return {
        **transformer.config(),
        "moe_intermediate_size": transformer.intermediate_size,
        "norm_topk_prob": True,
        "tie_word_embeddings": False,
        "max_position_embeddings": CONTEXT_TOKENS,
        "rope_theta": 1_000_000.0,
        "rope_scaling": {
            **tiny_parts.rope_scaling(transformer.head_dim),
            "interleaved": True,
            "mrope_interleaved": True,
        },
    }


def _vision_config(sizes: "Qwen3OmniSizes") -> dict[str, Any]:
    patch = 16
    return {
        **tiny_parts.vision_config(sizes.encoder_width, sizes.thinker.hidden_size),
        "spatial_patch_size": patch,
        "num_position_embeddings": sizes.vision_grid**2,
        "image_size": sizes.vision_grid * patch,
        "deepstack_visual_indexes": [0, 1, 2],
        "apply_vit_abs_pos_embed": True,
        "tokens_per_second": 2,
    }


@torch.no_grad()
def _end_thoughts(model: transformers.Qwen3OmniMoeForConditionalGeneration, tokenizer: Any) -> None:
    """Enlarges the logits of `</think>`, so that it is the most likely token now and then."""
    row = model.thinker.lm_head.weight[tokenizer.convert_tokens_to_ids("</think>")]
    row.normal_(std=THOUGHT_END_SCALE / math.sqrt(len(row)))


def _set_loudness(model: transformers.Qwen3OmniMoeForConditionalGeneration) -> None:
    code2wav: Any = model.code2wav
    shape = (1, code2wav.config.num_quantizers, tiny_parts.CALIBRATION_FRAMES)
    codes = torch.randint(code2wav.config.codebook_size, shape)
    tiny_parts.set_loudness(code2wav.decoder[-1].conv, lambda: code2wav(codes))
