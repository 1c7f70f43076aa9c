"""The published chat template and media processors, and a small byte-level BPE with the published special tokens."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from services.families import tiny_parts

ROLES = ("system", "user", "assistant")  # single tokens, which the talker's prompt needs
# fmt: off
SPECIAL_TOKENS = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|object_ref_end|>", "<|box_start|>",
    "<|box_end|>", "<|quad_start|>", "<|quad_end|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>",
    "<|image_pad|>", "<|video_pad|>", "<tool_call>", "</tool_call>", "<|fim_prefix|>", "<|fim_middle|>",
    "<|fim_suffix|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>", "<tool_response>", "</tool_response>",
    "<think>", "</think>", "<|audio_start|>", "<|audio_end|>", "<tts_pad>", "<tts_text_bos>", "<tts_text_eod>",
    "<tts_text_bos_single>", "<|audio_pad|>",
)
# fmt: on
# Single tokens that the detokenizer treats as plain text.
PLAIN_TOKENS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
NAMED_TOKENS = {
    "image_token": "<|image_pad|>",
    "audio_token": "<|audio_pad|>",
    "video_token": "<|video_pad|>",
    "vision_bos_token": "<|vision_start|>",
    "vision_eos_token": "<|vision_end|>",
    "audio_bos_token": "<|audio_start|>",
    "audio_eos_token": "<|audio_end|>",
}
CHAT_TEMPLATE = Path(__file__).with_name("chat_template.jinja")
PATCH = dict[str, Any](patch_size=16, merge_size=2, temporal_patch_size=2, image_mean=[0.5] * 3, image_std=[0.5] * 3)
PIXELS = {"shortest_edge": 3_136, "longest_edge": 12_845_056}

CORPUS = """
The sea is quiet in the morning and loud at night. A small boat moves along the shore, and the people in it sing.
What do you see in this picture? There is a house with a red door, a tree beside it, and two children who play.
Tell me about the train that leaves at seven. It goes over the bridge, through the long valley, and stops at the lake.
When the wind comes from the north the birds fly low. Nobody knows where they sleep, but every spring they return.
How does a clock work? A wheel turns another wheel, and that one turns the hands, slowly, one step after another.
She asked for bread, milk and a little salt; he brought her an apple, some cheese and three stories about his travels.
We listen before we speak. We speak so that others may listen. Between the two there is a short and friendly silence.
My friend plays the violin on Sundays. The neighbours open their windows, and the whole street becomes a concert hall.
"""


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
