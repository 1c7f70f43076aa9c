"""Config with the published keys, and random weights. Defaults of config classes are left out."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers

from services.families import tiny_parts
from services.families.qwen2_5_omni.tiny.processor import PATCH, SPECIAL_TOKENS, TOKENS
from services.families.qwen2_5_omni.tiny.token2wav import randomize, token2wav_config, voices

if TYPE_CHECKING:
    from services.families.qwen2_5_omni.tiny import Qwen25OmniSizes

CONTEXT_TOKENS = 16_384
VISION = {"patch_size": PATCH, "fullatt_block_indexes": [1, 3], "tokens_per_second": 25}
VOICE_IDS = {"Chelsie": 5, "Ethan": 3}
SPEECH_ID_COUNT = 8
CODEC_SPECIAL_IDS = 256  # of the talker's vocabulary, after the codebook


def write_model(out: Path, sizes: "Qwen25OmniSizes", tokenizer: transformers.PreTrainedTokenizerBase) -> None:
    """Writes config, float32 weights and voices into `out`, with special ids of `tokenizer`."""
    config = _model_config(sizes, token2wav_config(sizes.codebook, sizes.encoder_width), tokenizer)
    model: Any = transformers.Qwen2_5OmniForConditionalGeneration(config)
    model.float().eval()
    _randomize(model, sizes, tokenizer)
    ids = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    model.generation_config = transformers.GenerationConfig(**ids)
    model.save_pretrained(out)
    tiny_parts.edit_json(out / "config.json", {"architectures": ["Qwen2_5OmniModel"]})
    bos_ids = {name: len(tokenizer) + offset for name, offset in VOICE_IDS.items()}
    torch.save(voices(bos_ids), out / "spk_dict.pt")


def _model_config(
    sizes: "Qwen25OmniSizes", token2wav: dict[str, Any], tokenizer: transformers.PreTrainedTokenizerBase
) -> transformers.Qwen2_5OmniConfig:
    media = tiny_parts.token_ids(tokenizer, TOKENS["media"]) | {"position_id_per_seconds": 25, "seconds_per_chunk": 2}
    hidden = sizes.thinker.hidden_size
    head_dim = hidden // sizes.thinker.num_attention_heads
    text = {
        "vocab_size": tiny_parts.padded_vocabulary(len(tokenizer) + SPEECH_ID_COUNT),
        "tie_word_embeddings": False,
        **sizes.thinker.config(),
        **_positions(head_dim),
    }
    talker = {
        "vocab_size": sizes.codebook + CODEC_SPECIAL_IDS,
        "embedding_size": hidden,
        **sizes.talker.config(),
        **_positions(sizes.talker.head_dim),
        **{key: len(tokenizer) + offset for key, offset in TOKENS["speech"].items()},
        **{key: sizes.codebook + offset for key, offset in TOKENS["codec"].items()},
    }
    ends = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("pad", "eos")}
    return transformers.Qwen2_5OmniConfig(
        dtype="float32",
        thinker_config={
            "text_config": text,
            "audio_config": tiny_parts.audio_config(sizes.encoder_width, hidden),
            "vision_config": tiny_parts.vision_config(sizes.encoder_width, hidden) | VISION,
            "user_token_id": tokenizer.convert_tokens_to_ids("user"),
            **media,
            **ends,
        },
        talker_config=talker | media,
        token2wav_config=token2wav,
    )


def _positions(head_dim: int) -> dict[str, Any]:
    rope = tiny_parts.rope_scaling(head_dim)
    return {"max_position_embeddings": CONTEXT_TOKENS, "rope_theta": 1_000_000.0, "rope_scaling": rope}


@torch.no_grad()
def _randomize(model: Any, sizes: "Qwen25OmniSizes", tokenizer: transformers.PreTrainedTokenizerBase) -> None:
    for part in (model.thinker, model.talker):
        tiny_parts.randomize(part)
    tiny_parts.prefer_text(model.thinker.lm_head.weight, tokenizer, SPECIAL_TOKENS)
    # The reference does not suppress codes without an embedding in token2wav, and crashes.
    codes, talker = model.talker.codec_head.weight, model.config.talker_config
    end = codes[talker.tts_codec_end_token_id].clone()
    # The padding ends speech, too. A penalty below 1 on it, as a code of the prompt, would end speech at once.
    codes[sizes.codebook :] = 0
    codes[talker.tts_codec_end_token_id] = end
    randomize(model.token2wav)
