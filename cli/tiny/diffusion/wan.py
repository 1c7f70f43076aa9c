"""Wan 2.2's large models: one transformer for the noisy steps, another for the rest."""

from dataclasses import dataclass

from diffusers.models.transformers.transformer_wan import WanTransformer3DModel
from diffusers.pipelines.wan.pipeline_wan import WanPipeline
from diffusers.pipelines.wan.pipeline_wan_i2v import WanImageToVideoPipeline
from diffusers.schedulers.scheduling_unipc_multistep import UniPCMultistepScheduler
from transformers import UMT5Config, UMT5EncoderModel

from cli.tiny.diffusion.encoders import t5_sizes
from cli.tiny.diffusion.tokenizers import t5_tokenizer
from cli.tiny.diffusion.vae import wan_vae


@dataclass(frozen=True)
class _Size:
    words: int
    umt5: tuple[int, int, int]  # hidden, layers, heads
    layers: int
    heads: int
    head_dim: int
    latent_channels: int
    vae_channels: int


_SIZES = {
    "tiny": _Size(200, (64, 2, 4), 2, 2, 24, 16, 8),
    "small": _Size(300, (80, 3, 2), 3, 3, 16, 8, 12),
}


def wan(size: str) -> WanPipeline:
    """Text to video."""
    s = _SIZES[size]
    return WanPipeline(**_components(s, in_channels=s.latent_channels), boundary_ratio=0.875)


def wan_i2v(size: str) -> WanImageToVideoPipeline:
    """Image to video: the transformers also read the first frame's latents and a mask of 4 channels."""
    s = _SIZES[size]
    return WanImageToVideoPipeline(**_components(s, in_channels=2 * s.latent_channels + 4), boundary_ratio=0.9)


def _components(s: _Size, in_channels: int) -> dict:
    tokenizer = t5_tokenizer(s.words, max_length=512)
    return {
        "tokenizer": tokenizer,
        "text_encoder": UMT5EncoderModel(UMT5Config(**t5_sizes(len(tokenizer), *s.umt5))),
        "vae": wan_vae(s.vae_channels, s.latent_channels),
        "scheduler": UniPCMultistepScheduler(
            prediction_type="flow_prediction",
            use_flow_sigmas=True,
            flow_shift=3.0,
        ),
        "transformer": _transformer(s, in_channels),
        "transformer_2": _transformer(s, in_channels),
    }


def _transformer(s: _Size, in_channels: int) -> WanTransformer3DModel:
    return WanTransformer3DModel(
        num_attention_heads=s.heads,
        attention_head_dim=s.head_dim,
        in_channels=in_channels,
        out_channels=s.latent_channels,
        text_dim=s.umt5[0],
        freq_dim=32,
        ffn_dim=2 * s.heads * s.head_dim,
        num_layers=s.layers,
    )
