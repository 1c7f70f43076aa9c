"""FLUX.1 [dev]: the guidance is an input of the transformer."""

from dataclasses import dataclass

from diffusers.models.transformers.transformer_flux import FluxTransformer2DModel
from diffusers.pipelines.flux.pipeline_flux import FluxPipeline
from diffusers.schedulers.scheduling_flow_match_euler_discrete import FlowMatchEulerDiscreteScheduler
from transformers import CLIPTextModel

from cli.tiny.diffusion.encoders import clip_config, t5_encoder
from cli.tiny.diffusion.tokenizers import clip_tokenizer, t5_tokenizer
from cli.tiny.diffusion.vae import image_vae


@dataclass(frozen=True)
class _Size:
    merges: int
    clip: tuple[int, int, int]  # hidden, layers, heads
    t5: tuple[int, int, int]
    layers: int  # that treat text and picture apart
    single_layers: int
    heads: int
    rope: tuple[int, int, int]  # together the width of a head
    latent_channels: int
    vae_channels: int


_SIZES = {
    "tiny": _Size(200, (32, 2, 2), (64, 2, 4), 1, 2, 2, (8, 12, 12), 16, 8),
    "small": _Size(300, (48, 3, 3), (80, 3, 2), 2, 3, 3, (4, 6, 6), 8, 12),
}


def flux(size: str) -> FluxPipeline:
    """Pipeline with two prompt encoders."""
    s = _SIZES[size]
    tokenizer, tokenizer_2 = clip_tokenizer(s.merges), t5_tokenizer(s.merges, max_length=512)
    transformer = FluxTransformer2DModel(
        in_channels=4 * s.latent_channels,
        num_layers=s.layers,
        num_single_layers=s.single_layers,
        attention_head_dim=sum(s.rope),
        num_attention_heads=s.heads,
        joint_attention_dim=s.t5[0],
        pooled_projection_dim=s.clip[0],
        guidance_embeds=True,
        axes_dims_rope=s.rope,
    )
    return FluxPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=True),
        vae=image_vae(s.vae_channels, s.latent_channels, scaling_factor=0.3611, shift_factor=0.1159),
        text_encoder=CLIPTextModel(clip_config(tokenizer, *s.clip)),
        tokenizer=tokenizer,
        text_encoder_2=t5_encoder(tokenizer_2, *s.t5),
        tokenizer_2=tokenizer_2,
        transformer=transformer,
    )
