"""Shared parts of small random checkpoints. The weights preserve variance, so that every input matters and greedy
decoding does not depend on rounding."""

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

from services.families.tiny_sizes import read_table

_TOKENS = read_table(__file__, "tiny_tokens")
# Talker vocabulary: the codebook, then CODEC_SPECIAL_IDS ids. CODEC_IDS are offsets of those used, as published.
CODEC_SPECIAL_IDS = 1024
CODEC_IDS: Mapping[str, int] = _TOKENS["codec_ids"]
CODEC_VOICE = 253  # of the first voice
# Config keys of special ids, with their tokens.
SPEECH_TOKENS: Mapping[str, str] = _TOKENS["speech_tokens"]
AUDIO_S = 300
SPEECH_RMS = 0.15  # loud, and clipping nearly nothing
CALIBRATION_FRAMES = 40
_VOCABULARY_MULTIPLE = 64  # of embeddings, as published


def padded_vocabulary(tokens: int) -> int:
    return -(-tokens // _VOCABULARY_MULTIPLE) * _VOCABULARY_MULTIPLE


def token_ids(tokenizer: Any, tokens: Mapping[str, str]) -> dict[str, Any]:
    return {key: tokenizer.convert_tokens_to_ids(token) for key, token in tokens.items()}


def rope_scaling(head_dim: int) -> dict[str, Any]:
    """`rope_scaling` of a config, with the numbers of frequencies for time, height and width."""
    third = head_dim // 2 // 3
    return {"rope_type": "default", "type": "default", "mrope_section": [head_dim // 2 - 2 * third, third, third]}


def audio_config(width: int, output: int) -> dict[str, Any]:
    return {
        "d_model": width,
        "encoder_layers": 2,
        "encoder_attention_heads": 2,
        "encoder_ffn_dim": 2 * width,
        "output_dim": output,
    }


def vision_config(width: int, output: int) -> dict[str, Any]:
    return {"depth": 4, "hidden_size": width, "intermediate_size": 2 * width, "num_heads": 2, "out_hidden_size": output}


def randomize(model: nn.Module) -> None:
    """Draws all weights from torch's global generator."""
    for name, parameter in model.named_parameters():
        fill(name, parameter)


@torch.no_grad()
def fill(name: str, tensor: torch.Tensor) -> None:
    """Draws the parameter `name` from torch's global generator."""
    if "embed" in name and tensor.ndim == 2:
        tensor.normal_()
    elif tensor.ndim >= 2:
        # Stacked experts are (experts, out, in); linear and convolution weights (out, in, ...).
        fan_in = tensor.shape[-1] if "experts" in name else tensor[0].numel()
        tensor.normal_(std=1 / math.sqrt(fan_in))
    elif "layer_scale" in name or name.endswith("gamma"):
        tensor.fill_(0.5)  # large enough for the branch to matter
    elif name.endswith(("alpha", "beta", "bias")):
        tensor.normal_(std=0.1)
    else:  # norms
        tensor.normal_(mean=1, std=0.1)


@torch.no_grad()
def set_loudness(last: Any, speech: Callable[[], torch.Tensor]) -> None:
    """Scales the last convolution of a codec so that its random speech has `SPEECH_RMS`."""
    last.bias.zero_()
    last.weight.mul_(1e-3)  # far from clipping, so that the scale is linear
    last.weight.mul_(SPEECH_RMS / speech().float().square().mean().sqrt())


@torch.no_grad()
def prefer_text(head: torch.Tensor, tokenizer: Any, special_tokens: Sequence[str]) -> None:
    """Zeroes the logits of a thinker's `head`, (vocabulary, hidden), except for printable text and the end of turn."""
    for token_id in range(head.shape[0]):
        text = str(tokenizer.decode([token_id]))
        is_text = token_id < len(tokenizer) and text not in special_tokens and text and text.isprintable()
        if token_id != tokenizer.eos_token_id and (not is_text or "\N{REPLACEMENT CHARACTER}" in text):
            head[token_id] = 0


def save_processor(
    out: Path,
    kind: Callable[..., Any],
    tokenizer: Any,
    named_tokens: Mapping[str, str],
    template: str,
    images: Mapping[str, Any],
) -> None:
    """Writes the files of `kind.from_pretrained(out)`.

    Args:
        named_tokens: the processor's names of its tokens, which `save_pretrained` leaves out.
        images: settings of images and video frames.
    """
    for name, token in named_tokens.items():
        setattr(tokenizer, name, token)
        setattr(tokenizer, f"{name}_id", tokenizer.convert_tokens_to_ids(token))
    tokenizer.chat_template = template
    processor = kind(
        image_processor=transformers.Qwen2VLImageProcessor(**images),
        video_processor=transformers.Qwen2VLVideoProcessor(**images),
        feature_extractor=transformers.WhisperFeatureExtractor(feature_size=128, chunk_length=AUDIO_S),
        tokenizer=tokenizer,
        chat_template=template,
    )
    processor.save_pretrained(out)
    edit_json(out / "tokenizer_config.json", {**named_tokens, "extra_special_tokens": named_tokens})


def edit_json(file: Path, members: Mapping[str, Any], dropped: Iterable[str] = ()) -> None:
    content = json.loads(file.read_text()) | members
    write_json(file, {key: value for key, value in content.items() if key not in dropped})


def write_json(file: Path, content: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=2) + "\n")
