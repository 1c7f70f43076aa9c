"""The published tokenizer, chat template and media processors, in small."""

from pathlib import Path
from typing import Any

import transformers

from services.families import tiny_parts
from services.families.qwen3_omni.tiny.processor import PIXELS

# In their published order after the vocabulary.
# fmt: off
SPECIAL_TOKENS = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|AUDIO|>", "<|audio_bos|>", "<|audio_eos|>", "<|box_end|>",
    "<|quad_start|>", "<|quad_end|>", "<|vision_bos|>", "<|vision_eos|>", "<|vision_pad|>", "<|IMAGE|>", "<|VIDEO|>",
    "<tool_call>", "</tool_call>", "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>",
    "<|repo_name|>", "<|file_sep|>",
)
# fmt: on
NAMED_TOKENS = {
    "image_token": "<|IMAGE|>",
    "audio_token": "<|AUDIO|>",
    "video_token": "<|VIDEO|>",
    "vision_bos_token": "<|vision_bos|>",
    "vision_eos_token": "<|vision_eos|>",
    "audio_bos_token": "<|audio_bos|>",
    "audio_eos_token": "<|audio_eos|>",
}
PATCH = 14  # pixels a side
CHAT_TEMPLATE = Path(__file__).with_name("chat_template.jinja")


def save_processor(out: Path, tokenizer: transformers.Qwen2Tokenizer) -> None:
    """Writes the files of `Qwen2_5OmniProcessor.from_pretrained(out)`."""
    images = {"patch_size": PATCH, "merge_size": 2, "temporal_patch_size": 2, "size": PIXELS}
    processor: Any = transformers.Qwen2_5OmniProcessor
    tiny_parts.save_processor(out, processor, tokenizer, NAMED_TOKENS, CHAT_TEMPLATE.read_text(), images)
