"""Z-Image: prompt and picture in one sequence."""

from dataclasses import dataclass

from diffusers.models.transformers.transformer_z_image import ZImageTransformer2DModel
from diffusers.pipelines.z_image.pipeline_z_image import ZImagePipeline
from diffusers.schedulers.scheduling_flow_match_euler_discrete import FlowMatchEulerDiscreteScheduler
from transformers import Qwen3Model

from cli.tiny.diffusion.encoders import qwen3_config
from cli.tiny.diffusion.tokenizers import qwen_tokenizer
from cli.tiny.diffusion.vae import image_vae


@dataclass(frozen=True)
class _Size:
    merges: int
    text: tuple[int, int, int]  # hidden, layers, heads
    layers: int
    refiner_layers: int
    heads: int
    rope: tuple[int, int, int]  # together the width of a head
    latent_channels: int
    vae_channels: int


_SIZES = {
    "tiny": _Size(200, (64, 2, 4), 2, 1, 2, (8, 12, 12), 16, 8),
    "small": _Size(300, (80, 3, 2), 3, 2, 3, (4, 6, 6), 8, 12),
}


def z_image(size: str) -> ZImagePipeline:
    """Pipeline with Qwen3 as the prompt encoder."""
    s = _SIZES[size]
    tokenizer = qwen_tokenizer(s.merges)
    transformer = ZImageTransformer2DModel(
        in_channels=s.latent_channels,
        dim=s.heads * sum(s.rope),
        n_layers=s.layers,
        n_refiner_layers=s.refiner_layers,
        n_heads=s.heads,
        n_kv_heads=s.heads,
        cap_feat_dim=s.text[0],
        axes_dims=list(s.rope),
        axes_lens=[1536, 512, 512],
    )
    return ZImagePipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
        vae=image_vae(s.vae_channels, s.latent_channels, scaling_factor=0.3611, shift_factor=0.1159),
        text_encoder=Qwen3Model(qwen3_config(tokenizer, *s.text)),
        tokenizer=tokenizer,  # pyright: ignore[reportArgumentType]
        transformer=transformer,
    )
