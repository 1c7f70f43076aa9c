"""Shared parts of small random checkpoints.

The weights preserve variance, so that logits are spread and every input matters. With small weights greedy decoding
would compare rounding errors.
"""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

_VOCABULARY_MULTIPLE = 64  # of embeddings, as published


def padded_vocabulary(tokens: int) -> int:
    return -(-tokens // _VOCABULARY_MULTIPLE) * _VOCABULARY_MULTIPLE


def mrope_sections(head_dim: int) -> list[int]:
    """Numbers of frequencies for time, height and width."""
    third = head_dim // 2 // 3
    return [head_dim // 2 - 2 * third, third, third]


@torch.no_grad()
def randomize(model: nn.Module) -> None:
    """Draws all weights from torch's global generator, in the order of the parameters."""
    for name, parameter in model.named_parameters():
        if "embed" in name and parameter.ndim == 2:
            parameter.normal_()
        elif parameter.ndim >= 2:
            # Stacked experts are (experts, out, in); linear and convolution weights (out, in, ...).
            fan_in = parameter.shape[-1] if "experts" in name else parameter[0].numel()
            parameter.normal_(std=1 / math.sqrt(fan_in))
        elif "layer_scale" in name or name.endswith("gamma"):
            parameter.fill_(0.5)  # large enough for the branch to matter
        elif name.endswith(("alpha", "beta", "bias")):
            parameter.normal_(std=0.1)
        else:  # norms
            parameter.normal_(mean=1, std=0.1)


@torch.no_grad()
def prefer_text(head: torch.Tensor, tokenizer: Any, special_tokens: Sequence[str]) -> None:
    """Zeroes the logits of a thinker's `head`, (vocabulary, hidden), except for printable text and the end of turn."""
    for token_id in range(head.shape[0]):
        text = str(tokenizer.decode([token_id]))
        is_text = token_id < len(tokenizer) and text not in special_tokens and text and text.isprintable()
        if token_id != tokenizer.eos_token_id and (not is_text or "\N{REPLACEMENT CHARACTER}" in text):
            head[token_id] = 0


def name_tokens(tokenizer: Any, named_tokens: Mapping[str, str]) -> None:
    """Gives a tokenizer the attributes `NAME` and `NAME_id` of each token, for a processor."""
    for name, token in named_tokens.items():
        setattr(tokenizer, name, token)
        setattr(tokenizer, f"{name}_id", tokenizer.convert_tokens_to_ids(token))


def save_processor(out: Path, processor: Any, named_tokens: Mapping[str, str]) -> None:
    """Writes the files of a processor.

    Args:
        named_tokens: the processor's names of its tokens, which `save_pretrained` leaves out.
    """
    processor.save_pretrained(out)
    file = out / "tokenizer_config.json"
    config = json.loads(file.read_text()) | named_tokens | {"extra_special_tokens": named_tokens}
    file.write_text(json.dumps(config, indent=2))
