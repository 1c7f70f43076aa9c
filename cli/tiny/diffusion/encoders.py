"""Prompt encoders in small."""

from typing import Any

from transformers import (
    CLIPTextConfig,
    CLIPTokenizer,
    Qwen2Tokenizer,
    Qwen3Config,
    T5Config,
    T5EncoderModel,
    T5Tokenizer,
)


def clip_config(tokenizer: CLIPTokenizer, hidden: int, layers: int, heads: int) -> CLIPTextConfig:
    """CLIP's text half; its projection is as wide as itself, as published."""
    ids: dict[str, Any] = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos", "pad")}
    return CLIPTextConfig(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        projection_dim=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        max_position_embeddings=77,
        **ids,
    )


def t5_sizes(vocabulary: int, hidden: int, layers: int, heads: int) -> dict[str, Any]:
    """Arguments of T5Config and UMT5Config."""
    return {
        "vocab_size": vocabulary,
        "d_model": hidden,
        "d_kv": 16,
        "d_ff": 2 * hidden,
        "num_layers": layers,
        "num_heads": heads,
        "feed_forward_proj": "gated-gelu",
        "tie_word_embeddings": False,
    }


def t5_encoder(tokenizer: T5Tokenizer, hidden: int, layers: int, heads: int) -> T5EncoderModel:
    """T5 v1.1's encoder."""
    return T5EncoderModel(T5Config(**t5_sizes(len(tokenizer), hidden, layers, heads)))


def qwen3_config(tokenizer: Qwen2Tokenizer, hidden: int, layers: int, heads: int) -> Qwen3Config:
    """Qwen3 with half as many heads for keys as for queries."""
    return Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads // 2,
        head_dim=16,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
    )
