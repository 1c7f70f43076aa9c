"""Random weights under which a comparison with a reference means something.

With the usual small standard deviation logits are nearly constant and greedy decoding compares rounding errors. These
preserve variance from layer to layer, so that logits are spread and every input matters.
"""

import math
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase, Qwen3OmniMoeForConditionalGeneration

from services.families.qwen3_omni.tiny.processor import SPECIAL_TOKENS

SPEECH_RMS = 0.15  # loud, and clipping nearly nothing
CALIBRATION_FRAMES = 40


@torch.no_grad()
def randomize(model: Qwen3OmniMoeForConditionalGeneration, tokenizer: PreTrainedTokenizerBase) -> None:
    """Fills `model` from torch's global generator."""
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
    _prefer_text(model, tokenizer)
    _set_loudness(model)


def _prefer_text(model: Qwen3OmniMoeForConditionalGeneration, tokenizer: PreTrainedTokenizerBase) -> None:
    """Keeps the thinker to tokens that are text by themselves, and the end of the turn."""
    head = model.thinker.lm_head.weight
    end_of_turn = tokenizer.convert_tokens_to_ids("<|im_end|>")
    for token_id in range(head.shape[0]):
        text = str(tokenizer.decode([token_id]))
        is_text = token_id < len(tokenizer) and text not in SPECIAL_TOKENS and text and text.isprintable()
        if token_id != end_of_turn and (not is_text or "\N{REPLACEMENT CHARACTER}" in text):
            head[token_id] = 0


def _set_loudness(model: Qwen3OmniMoeForConditionalGeneration) -> None:
    """Scales the last convolution so that random speech has `SPEECH_RMS`."""
    code2wav: Any = model.code2wav
    config = code2wav.config
    codes = torch.randint(config.codebook_size, (1, config.num_quantizers, CALIBRATION_FRAMES))
    last = code2wav.decoder[-1].conv.weight
    code2wav.decoder[-1].conv.bias.zero_()
    last.mul_(1e-3)  # far from clipping, so that the scale is linear
    last.mul_(SPEECH_RMS / code2wav(codes).float().pow(2).mean().sqrt())
