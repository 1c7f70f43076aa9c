"""Random weights under which every input changes the output.

A fresh diffusion transformer's output is constant. These weights preserve variance from layer to layer instead.
"""

import math
from typing import Any

import torch
from diffusers.models.autoencoders.autoencoder_kl_qwenimage import AutoencoderKLQwenImage
from diffusers.models.transformers.transformer_qwenimage import QwenImageTransformer2DModel
from diffusers.pipelines.pipeline_utils import DiffusionPipeline
from torch import nn

from services.families.tiny_parts import fill

# Standard deviation of decoded noise, where the range is -1 to 1: few values are clipped.
CONTRAST = 0.4
LOUDNESS = 0.03  # of decoded noise; denoised latents are several times as large
TEXT_GAIN = 2.5  # of Qwen-Image's keys of the prompt: else drowned by an edit's thousands of image tokens
GAINS = ("gamma", "weight_g")  # multiply what has unit variance
# Logarithm of the frequency of Snake activations. From 0 on a stack of them multiplies rounding errors by hundreds.
SNAKE_ALPHA = -1.5


@torch.no_grad()
def randomize_pipeline(pipeline: DiffusionPipeline) -> None:
    """Draws from torch's global generator."""
    for model in pipeline.components.values():
        if isinstance(model, nn.Module):
            model.float().eval()
            _randomize(model)
    _set_contrast(pipeline)


def _randomize(model: nn.Module) -> None:
    done: set[int] = set()  # tied weights are filled once
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            if id(parameter) not in done:
                done.add(id(parameter))
                _fill(module, name, parameter)
        if isinstance(module, nn.BatchNorm2d) and module.running_mean is not None and module.running_var is not None:
            module.running_mean.normal_(std=0.1)
            module.running_var.uniform_(0.5, 1.5)
        if isinstance(model, QwenImageTransformer2DModel) and path.endswith("norm_added_k"):
            module.weight.mul_(TEXT_GAIN)  # type: ignore[operator]
        if path.endswith("Attention.q"):  # T5 does not divide the scores by the root of the head's width
            module.weight.mul_(1 / math.sqrt(model.config.d_kv))  # type: ignore[operator, union-attr]


def _fill(module: nn.Module, name: str, parameter: nn.Parameter) -> None:
    frequencies = "Fourier" in type(module).__name__ or name == "weights"
    if frequencies or isinstance(module, nn.Embedding) or name.endswith("pad_token"):
        parameter.normal_()
    elif name in GAINS:
        parameter.normal_(mean=1, std=0.1)
    elif name == "alpha":
        parameter.normal_(mean=SNAKE_ALPHA, std=0.1)
    elif name in ("beta", "bias") or name.endswith("_bias"):
        parameter.normal_(std=0.1)
    else:
        fill(name, parameter)


def _set_contrast(pipeline: DiffusionPipeline) -> None:
    """Scales the decoder so that decoded noise has a standard deviation of `CONTRAST`."""
    vae: Any = pipeline.components["vae"]
    if "decoder_input_channels" in vae.config:  # it makes sound
        last, gain, wanted = vae.decoder.conv2, vae.decoder.conv2.weight_g, LOUDNESS
    else:
        last, gain, wanted = vae.decoder.conv_out, vae.decoder.conv_out.weight, CONTRAST
    if last.bias is not None:
        last.bias.zero_()
    # Video decoders clip: far from that the scale is linear.
    gain.mul_(1e-3)
    gain.mul_(wanted / vae.decode(_latents(vae)).sample.std())


def _latents(vae: Any) -> torch.Tensor:
    """Noise, scaled as the pipelines scale latents before they decode them."""
    config = vae.config
    if "decoder_input_channels" in config:  # a sound's
        return torch.randn(1, config.decoder_input_channels, 32)
    if "z_dim" in config:  # a video's
        latents = torch.randn(1, config.z_dim, 1 if isinstance(vae, AutoencoderKLQwenImage) else 3, 16, 16)
    else:
        latents = torch.randn(1, config.latent_channels, 16, 16)
    if config.get("latents_mean"):
        shape = (1, -1, *(1,) * (latents.ndim - 2))
        return latents * torch.tensor(config.latents_std).view(shape) + torch.tensor(config.latents_mean).view(shape)
    return latents / (config.get("scaling_factor") or 1) + (config.get("shift_factor") or 0)
