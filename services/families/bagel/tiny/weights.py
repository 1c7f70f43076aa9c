"""Random weights of reader, denoiser and VAE, under the published names. Every input matters."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL
from safetensors.torch import save_file  # pyright: ignore[reportUnknownVariableType]
from torch import nn

from services.families.bagel.checkpoint import VAE_LEVELS, vae_arguments
from services.families.bagel.denoiser import BagelDenoiser
from services.families.bagel.files import LLM, MARKS, VAE_WEIGHTS, VISION_EPS, WEIGHTS
from services.families.bagel.mot import MotSizes
from services.families.bagel.names import published, published_vae
from services.families.bagel.reader import BagelReader
from services.families.bagel.sizes import BagelSizes
from services.families.bagel.tiny.shape import BagelShape
from services.families.bagel.vision import VisionSizes
from services.families.qwen3_omni.tiny.processor import SPECIAL_TOKENS
from services.families.tiny_parts import prefer_text, randomize

CONTRAST = 0.4  # standard deviation of decoded noise, where the range is -1 to 1: few values are clipped
READ_GAIN = 2.5  # of keys and values of what was read


@torch.no_grad()
def write_weights(out: Path, shape: BagelShape, tokenizer: Any) -> None:
    """Writes `ema.safetensors` and `ae.safetensors` beside the config files in `out`."""
    llm: dict[str, Any] = json.loads((out / LLM).read_text())
    first, last = tokenizer.convert_tokens_to_ids(MARKS)
    sizes = BagelSizes(
        MotSizes(**{name: llm[name] for name in MotSizes.__dataclass_fields__}),
        VisionSizes(**shape.vision, layer_norm_eps=VISION_EPS, num_positions=shape.vision_side**2),
        (first, last),
        shape.latent_channels,
        shape.latent_side,
        shape.vision_side,
        llm["max_position_embeddings"],
    )
    vae_sizes = vae_arguments(tuple(shape.vae), shape.vae_blocks, shape.latent_channels)
    reader, denoiser = BagelReader(asdict(sizes), vae_sizes), BagelDenoiser(asdict(sizes))
    vae: Any = AutoencoderKL(**vae_sizes)
    for model in (reader, denoiser, vae):
        randomize(model)
    layers: Any = reader.mot.layers
    for layer in layers:  # else what was read is drowned by the latents, which see each other
        layer.und.k_norm.weight.mul_(READ_GAIN)
        layer.und.v_proj.weight.mul_(READ_GAIN)
    denoiser.mot.load_state_dict(reader.mot.state_dict())
    prefer_text(reader.lm_head.weight, tokenizer, SPECIAL_TOKENS)
    _set_contrast(vae)
    tensors = {published(name): tensor for name, tensor in _state(denoiser).items()}
    tensors |= {published(name): tensor for name, tensor in _state(reader).items() if not name.startswith("encoder.")}
    save_file(tensors, out / WEIGHTS)
    own = {published_vae(name, VAE_LEVELS): tensor for name, tensor in _state(vae).items()}
    matrices = (".q.weight", ".k.weight", ".v.weight", ".proj_out.weight")  # published as 1 x 1 convolutions
    save_file(
        {name: each[..., None, None] if name.endswith(matrices) else each for name, each in own.items()},
        out / VAE_WEIGHTS,
    )


def _state(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.contiguous() for name, tensor in model.state_dict().items()}


def _set_contrast(vae: Any) -> None:
    last, config = vae.decoder.conv_out, vae.config
    last.bias.zero_()
    noise = torch.randn(1, config.latent_channels, 16, 16) / config.scaling_factor + config.shift_factor
    last.weight.mul_(CONTRAST / vae.decode(noise).sample.std())
