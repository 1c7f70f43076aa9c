"""The published tokenizer, chat template and media processors, in small."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import transformers

from services.families import tiny_parts
from services.families.qwen3_omni.tiny.processor import PIXELS
from services.families.tiny_sizes import read_table

TOKENS = read_table(__file__, "tokens")
SPECIAL_TOKENS: Sequence[str] = TOKENS["special"]
PATCH = 14  # pixels a side
CHAT_TEMPLATE = Path(__file__).with_name("chat_template.jinja")


def save_processor(out: Path, tokenizer: transformers.Qwen2Tokenizer) -> None:
    """Writes the files of `Qwen2_5OmniProcessor.from_pretrained(out)`."""
    images = {"patch_size": PATCH, "merge_size": 2, "temporal_patch_size": 2, "size": PIXELS}
    processor: Any = transformers.Qwen2_5OmniProcessor
    tiny_parts.save_processor(out, processor, tokenizer, TOKENS["named"], CHAT_TEMPLATE.read_text(), images)
