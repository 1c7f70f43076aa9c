"""Config, random weights and voices of token2wav, as loud as speech. Every code, the voice and the noise matter."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

MEL_BINS, VOICE_WIDTH = 80, 192  # defaults of the config
SPEECH_RMS = 0.12  # loud, and clipping nearly nothing
LOG_MEL_MEAN, LOG_MEL_STD = -4.0, 2.0  # about those of speech
# Attention is sharp and strong, so that distant frames matter. The last convolution before a residual is weak.
_GAINS = {".to_q.": 3.0, ".to_k.": 3.0, ".to_out.": 4.0, ".convs2.": 0.3}
_REFERENCE_FRAMES = 30
_CALIBRATION_FRAMES = 80


def token2wav_config(codebook: int, width: int) -> dict[str, Any]:
    """`token2wav_config` of a config.json, without defaults of the config classes.

    Args:
        width: scale of all widths, at least 64, in steps of 4. Different ones share no dimension.
    """
    speaker, inner = width // 2 - 6, width // 4 - 2
    dit = {
        "hidden_size": width + 8,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "head_dim": width // 4 + 6,
        "emb_dim": width - 20,
        "look_ahead_layers": [1],
        "look_backward_layers": [0, 2],
        "num_embeds": codebook + 1,
        "enc_dim": width - 36,
        "enc_channels": [speaker, speaker, speaker, 2 * speaker],
        "enc_kernel_sizes": [5, 3, 3, 1],
        "enc_dilations": [1, 2, 3, 1],
        "enc_attention_channels": inner,
        "enc_se_channels": inner + 2,
    }
    return {"dit_config": dit, "bigvgan_config": {"upsample_initial_channel": width}}


def voices(bos_token_ids: Mapping[str, int]) -> dict[str, dict[str, Any]]:
    """Random content of spk_dict.pt."""
    return {
        name: {
            "cond": torch.randn(1, VOICE_WIDTH),
            "ref_mel": LOG_MEL_MEAN + LOG_MEL_STD * torch.randn(1, _REFERENCE_FRAMES + 11 * i, MEL_BINS),
            "bos_token": bos,
        }
        for i, (name, bos) in enumerate(bos_token_ids.items())
    }


@torch.no_grad()
def randomize(model: nn.Module) -> None:
    """Draws the weights of transformers' Qwen2_5OmniToken2WavModel from torch's global generator."""
    for name, parameter in model.named_parameters():
        parameter.copy_(random_weights(name, parameter.shape))
    dit: Any = model.code2wav_dit_model
    dit.proj_out.bias.fill_(LOG_MEL_MEAN)
    vocoder: Any = model.code2wav_bigvgan_model
    mel = LOG_MEL_MEAN + LOG_MEL_STD * torch.randn(1, MEL_BINS, _CALIBRATION_FRAMES)
    vocoder.conv_post.weight.mul_(0.01)  # so that nothing clips yet
    vocoder.conv_post.weight.mul_(SPEECH_RMS / vocoder(mel).std())


def random_weights(name: str, shape: torch.Size) -> torch.Tensor:
    """A parameter by its published name."""
    if len(shape) < 2:
        return 0.2 * torch.randn(shape)
    if "codec_embed" in name:
        return torch.randn(shape)
    if ".ups." in name:  # transposed: (inputs, outputs, kernel); an output has about two taps
        return torch.randn(shape) * (2 * shape[0]) ** -0.5
    gain = next((gain for part, gain in _GAINS.items() if part in name), 1.0)
    return gain * torch.randn(shape) * (shape[1:].numel()) ** -0.5
