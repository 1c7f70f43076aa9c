"""Stable Diffusion 3: "tiny" has 3.0's blocks, "small" those of 3.5 (normalised queries and keys, dual attention)."""

from dataclasses import dataclass

from diffusers.models.transformers.transformer_sd3 import SD3Transformer2DModel
from diffusers.pipelines.stable_diffusion_3.pipeline_stable_diffusion_3 import StableDiffusion3Pipeline
from diffusers.schedulers.scheduling_flow_match_euler_discrete import FlowMatchEulerDiscreteScheduler
from transformers import CLIPTextModelWithProjection

from cli.tiny.diffusion.encoders import clip_config, t5_encoder
from cli.tiny.diffusion.tokenizers import clip_tokenizer, t5_tokenizer
from cli.tiny.diffusion.vae import image_vae


@dataclass(frozen=True)
class _Size:
    merges: int
    clip: tuple[int, int, int]  # hidden, layers, heads
    clip_2: tuple[int, int, int]
    t5: tuple[int, int, int]  # at least as wide as both CLIPs side by side
    layers: int
    heads: int
    head_dim: int
    sample_size: int  # pictures have 8 times as many pixels a side by default
    latent_channels: int
    vae_channels: int
    dual_attention_layers: tuple[int, ...]
    qk_norm: str | None


_SIZES = {
    "tiny": _Size(200, (32, 2, 2), (48, 3, 3), (96, 2, 4), 2, 2, 32, 8, 16, 8, (), None),
    "small": _Size(300, (48, 3, 3), (64, 4, 4), (128, 3, 2), 3, 3, 16, 12, 8, 12, (0,), "rms_norm"),
}


def sd3(size: str) -> StableDiffusion3Pipeline:
    """Pipeline with three prompt encoders."""
    s = _SIZES[size]
    tokenizer, tokenizer_2 = clip_tokenizer(s.merges), clip_tokenizer(s.merges, pad_token="!")
    tokenizer_3 = t5_tokenizer(s.merges, max_length=512)
    transformer = SD3Transformer2DModel(
        sample_size=s.sample_size,
        in_channels=s.latent_channels,
        out_channels=s.latent_channels,
        num_layers=s.layers,
        num_attention_heads=s.heads,
        attention_head_dim=s.head_dim,
        caption_projection_dim=s.heads * s.head_dim,
        joint_attention_dim=s.t5[0],
        pooled_projection_dim=s.clip[0] + s.clip_2[0],
        pos_embed_max_size=64,
        dual_attention_layers=s.dual_attention_layers,
        qk_norm=s.qk_norm,
    )
    return StableDiffusion3Pipeline(
        transformer=transformer,
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
        vae=image_vae(s.vae_channels, s.latent_channels, scaling_factor=1.5305, shift_factor=0.0609),
        text_encoder=CLIPTextModelWithProjection(clip_config(tokenizer, *s.clip)),
        tokenizer=tokenizer,
        text_encoder_2=CLIPTextModelWithProjection(clip_config(tokenizer_2, *s.clip_2)),
        tokenizer_2=tokenizer_2,
        text_encoder_3=t5_encoder(tokenizer_3, *s.t5),
        tokenizer_3=tokenizer_3,
    )
