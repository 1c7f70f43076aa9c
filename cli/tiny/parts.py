"""Sizes, tokenizers, prompt encoders and VAEs of several families, with the published classes and special tokens.

All image VAEs scale by 8, as published, so that sizes have the published divisors.
"""

import json
import math
from collections import Counter
from dataclasses import dataclass
from typing import Any, TypeVar

from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import CLIPTokenizer, PreTrainedTokenizerBase, Qwen2Tokenizer, T5Tokenizer

from services.families.qwen3_omni.tiny.processor import CORPUS, make_tokenizer

# Generation prompt and thinking switch as in Qwen3's template, which does much more.
QWEN3_TEMPLATE = (
    "{%- for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{%- if add_generation_prompt %}<|im_start|>assistant\n"
    "{%- if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
_Value = TypeVar("_Value")
Widths = tuple[int, int, int]  # hidden, layers, heads


@dataclass(frozen=True)
class Size:
    """Sizes that most families share."""

    words: int  # merges of a byte-level BPE, or whole words
    clip: Widths  # of the first CLIP, and of vision encoders
    t5: Widths
    language: Widths  # of models that write or see
    layers: int
    heads: int
    rope: tuple[int, int, int]  # together the width of a head
    latent_channels: int
    vae_channels: int

    def pick(self, tiny: _Value, small: _Value) -> _Value:
        return tiny if self is SIZES["tiny"] else small

    @property
    def blocks(self) -> dict[str, Any]:
        """Arguments of a diffusion transformer."""
        return {"num_layers": self.layers, "num_attention_heads": self.heads, "attention_head_dim": sum(self.rope)}


SIZES = {
    "tiny": Size(200, (32, 2, 2), (64, 2, 4), (64, 2, 4), 2, 2, (8, 12, 12), 16, 8),
    "small": Size(300, (48, 3, 3), (80, 3, 2), (96, 3, 6), 3, 3, (4, 6, 6), 8, 12),
}


def clip_tokenizer(merges: int, pad_token: str = "<|endoftext|>") -> CLIPTokenizer:
    """Lower-case BPE whose words end in `</w>`; at most 77 tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trained = Tokenizer(models.BPE(end_of_word_suffix="</w>"))
    trained.pre_tokenizer = pre_tokenizers.Whitespace()
    trainer = trainers.BpeTrainer(vocab_size=100 + merges, end_of_word_suffix="</w>", show_progress=False)
    trained.train_from_iterator([CORPUS.lower()], trainer)
    pairs = [tuple(pair) for pair in json.loads(trained.to_str())["model"]["merges"][:merges]]
    tokens = [*alphabet, *(f"{symbol}</w>" for symbol in alphabet), *("".join(pair) for pair in pairs)]
    # The end has the highest id, where pooling of the first CLIP models looks for it.
    tokens += ["<|startoftext|>", "<|endoftext|>"]
    vocabulary = {token: index for index, token in enumerate(dict.fromkeys(tokens))}
    return CLIPTokenizer(vocab=vocabulary, merges=pairs, pad_token=pad_token, model_max_length=77)  # type: ignore[arg-type]


def t5_tokenizer(words: int, max_length: int = 512) -> T5Tokenizer:
    """Unigram model of ASCII characters and the corpus' `words` most frequent words, with 100 extra ids."""
    frequent = Counter(CORPUS.lower().split()).most_common(words)
    characters = ["\u2581", *(chr(code) for code in range(33, 127))]
    pieces = [(word, -5 - math.log(1 + rank)) for rank, (word, _) in enumerate(frequent) if len(word) > 1]
    vocabulary = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0)]
    vocabulary += [(f"\u2581{word}", score) for word, score in pieces] + [(symbol, -12.0) for symbol in characters]
    return T5Tokenizer(vocab=vocabulary, model_max_length=max_length)


def qwen_tokenizer(merges: int, words: tuple[str, ...] = ()) -> Qwen2Tokenizer:
    """Byte-level BPE. Each text of `words` gets a token of its own, before the merges."""
    tokenizer = make_tokenizer(merges, words)
    tokenizer.chat_template = QWEN3_TEMPLATE
    return tokenizer


def clip(model: Any, tokenizer: CLIPTokenizer, widths: Widths, suffix: str = "") -> dict[str, Any]:
    """Components of CLIP's text half; the projection is as wide as the encoder, as published.

    Args:
        suffix: of the components' names.
    """
    ids = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos", "pad")}
    sizes = _widths(*widths) | {"projection_dim": widths[0], "max_position_embeddings": 77}
    return _prompt_encoder(model, tokenizer, sizes | ids, suffix)


def t5(model: Any, tokenizer: PreTrainedTokenizerBase, widths: Widths, suffix: str = "") -> dict[str, Any]:
    """Components of T5 v1.1 or UMT5, as `clip`."""
    hidden, layers, heads = widths
    sizes = {
        "d_model": hidden,
        "d_kv": 16,
        "d_ff": 2 * hidden,
        "num_layers": layers,
        "num_heads": heads,
        "feed_forward_proj": "gated-gelu",
        "tie_word_embeddings": False,
    }
    return _prompt_encoder(model, tokenizer, sizes, suffix)


def qwen3(model: Any, tokenizer: Qwen2Tokenizer, widths: Widths) -> dict[str, Any]:
    """Components of Qwen3, as `clip`."""
    sizes = language_sizes(len(tokenizer), widths, max_position_embeddings=4096)
    return _prompt_encoder(model, tokenizer, sizes | {"head_dim": 16, "tie_word_embeddings": True}, "")


def _prompt_encoder(
    model: Any, tokenizer: PreTrainedTokenizerBase, sizes: dict[str, Any], suffix: str
) -> dict[str, Any]:
    config = model.config_class(**{"vocab_size": len(tokenizer), **sizes})
    return {f"tokenizer{suffix}": tokenizer, f"text_encoder{suffix}": model(config)}


def language_sizes(vocabulary: int, widths: Widths, max_position_embeddings: int = 8192) -> dict[str, Any]:
    """Arguments of a language model with half as many heads for keys as for queries."""
    return _widths(*widths) | {
        "vocab_size": vocabulary,
        "num_key_value_heads": widths[2] // 2,
        "max_position_embeddings": max_position_embeddings,
    }


def _widths(hidden: int, layers: int, heads: int) -> dict[str, Any]:
    return {
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
    }


def vae_sizes(channels: int, latent_channels: int) -> dict[str, Any]:
    """Arguments of an image VAE; its finest level has `channels`, 4 times N."""
    return {
        "block_out_channels": (channels, 2 * channels, 2 * channels, 3 * channels),
        "layers_per_block": 1,
        "latent_channels": latent_channels,
        "norm_num_groups": 4,
        "sample_size": 64,
    }


def image_vae(size: Size, **scale: Any) -> AutoencoderKL:
    """The VAE of SD3, FLUX.1, Z-Image and GLM-Image.

    Args:
        scale: of latents, as in the published config.
    """
    return AutoencoderKL(
        **vae_sizes(size.vae_channels, size.latent_channels),
        **{"scaling_factor": 1, **scale},
        down_block_types=("DownEncoderBlock2D",) * 4,  # type: ignore[arg-type]
        up_block_types=("UpDecoderBlock2D",) * 4,  # type: ignore[arg-type]
        force_upcast=False,
        use_quant_conv=False,
        use_post_quant_conv=False,
    )


def video_vae_sizes(channels: int, latent_channels: int) -> dict[str, Any]:
    """Arguments of the VAEs of Qwen-Image, Wan 2.1 and Wan 2.2's large models."""
    statistics = latent_statistics(latent_channels)
    return {"base_dim": channels, "z_dim": latent_channels, "dim_mult": [1, 2, 2, 3], "num_res_blocks": 1} | statistics


def latent_statistics(latent_channels: int) -> dict[str, Any]:
    """No two channels are equal, so that a mixed-up order shows."""
    return {
        "latents_mean": [0.1 * (channel - latent_channels / 2) for channel in range(latent_channels)],
        "latents_std": [1 + 0.05 * channel for channel in range(latent_channels)],
    }
