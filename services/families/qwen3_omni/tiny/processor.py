"""The published chat template and media processors, and a small byte-level BPE with the published special tokens."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from services.families import tiny_parts
from services.families.tiny_sizes import read_table

ROLES = ("system", "user", "assistant")  # single tokens, which the talker's prompt needs
_TOKENS = read_table(__file__, "tokens")
SPECIAL_TOKENS: Sequence[str] = _TOKENS["special"]
PLAIN_TOKENS: Sequence[str] = _TOKENS["plain"]
NAMED_TOKENS: Mapping[str, str] = _TOKENS["named"]
CORPUS: str = f"\n{_TOKENS['corpus']}"
CHAT_TEMPLATE = Path(__file__).with_name("chat_template.jinja")
PATCH = dict[str, Any](patch_size=16, merge_size=2, temporal_patch_size=2, image_mean=[0.5] * 3, image_std=[0.5] * 3)
PIXELS = {"shortest_edge": 3_136, "longest_edge": 12_845_056}


def make_tokenizer(
    merges: int, words: Sequence[str] = (), special_tokens: Sequence[str] = SPECIAL_TOKENS
) -> transformers.Qwen2Tokenizer:
    """Tokenizer with 256 byte tokens, `merges` merges and `special_tokens`.

    Each of `words` becomes one token if there are enough merges.
    """
    byte_level = Tokenizer(models.BPE())
    byte_level.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    byte_level.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=256 + merges,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    byte_level.train_from_iterator([CORPUS, *(f"{word}\n" * 200 for word in (*ROLES, *words))], trainer)
    return qwen_tokenizer(byte_level, special_tokens)


def qwen_tokenizer(trained: Tokenizer, special_tokens: Sequence[str] = SPECIAL_TOKENS) -> transformers.Qwen2Tokenizer:
    """Tokenizer of the published class, from a byte-level BPE and `special_tokens`."""
    model = json.loads(trained.to_str())["model"]
    merges_of_pairs: Any = [tuple(pair) for pair in model["merges"]]
    tokenizer: Any = transformers.Qwen2Tokenizer(vocab=model["vocab"], merges=merges_of_pairs)
    for token in special_tokens:
        tokenizer.add_tokens(transformers.AddedToken(token, special=token not in PLAIN_TOKENS, normalized=False))
    tokenizer.add_special_tokens({"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"})
    for role in ROLES:
        assert len(tokenizer.encode(role)) == 1, f"{role} is not one token"
    return tokenizer


def save_processor(
    out: Path,
    tokenizer: transformers.Qwen2Tokenizer,
    thinks: bool = False,
    pixels: Mapping[str, int] = PIXELS,
) -> None:
    """Writes the files of `Qwen3OmniMoeProcessor.from_pretrained(out)`.

    Args:
        thinks: whether the chat template opens thoughts.
        pixels: fewest and most pixels of a scaled image.
    """
    opening = "{%- set thinks = true -%}\n" if thinks else ""
    template, images = opening + CHAT_TEMPLATE.read_text(), {"size": dict(pixels), **PATCH}
    processor: Any = transformers.Qwen3OmniMoeProcessor
    tiny_parts.save_processor(out, processor, tokenizer, NAMED_TOKENS, template, images)
