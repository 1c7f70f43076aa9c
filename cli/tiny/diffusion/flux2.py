"""FLUX.2 [klein]: "tiny" is the base model, which is guided by a second prompt, "small" the distilled one."""

from dataclasses import dataclass

from diffusers.models.autoencoders.autoencoder_kl_flux2 import AutoencoderKLFlux2
from diffusers.models.transformers.transformer_flux2 import Flux2Transformer2DModel
from diffusers.pipelines.flux2.pipeline_flux2_klein import Flux2KleinPipeline
from diffusers.schedulers.scheduling_flow_match_euler_discrete import FlowMatchEulerDiscreteScheduler
from transformers import Qwen3ForCausalLM

from cli.tiny.diffusion.encoders import qwen3_config
from cli.tiny.diffusion.tokenizers import qwen_tokenizer


@dataclass(frozen=True)
class _Size:
    merges: int
    text: tuple[int, int, int]  # hidden, layers, heads; states behind layers 9, 18 and 27 are the prompt
    layers: int  # that treat text and picture apart
    single_layers: int
    heads: int
    rope: tuple[int, int, int, int]  # together the width of a head
    latent_channels: int
    vae_channels: int
    is_distilled: bool


_SIZES = {
    "tiny": _Size(200, (32, 28, 2), 1, 2, 2, (8, 8, 8, 8), 8, 8, False),
    "small": _Size(300, (48, 30, 4), 2, 3, 3, (4, 4, 4, 4), 4, 12, True),
}


def klein(size: str) -> Flux2KleinPipeline:
    """Pipeline that takes a prompt and, if wanted, pictures."""
    s = _SIZES[size]
    tokenizer = qwen_tokenizer(s.merges)
    transformer = Flux2Transformer2DModel(
        in_channels=4 * s.latent_channels,
        num_layers=s.layers,
        num_single_layers=s.single_layers,
        attention_head_dim=sum(s.rope),
        num_attention_heads=s.heads,
        joint_attention_dim=3 * s.text[0],
        axes_dims_rope=s.rope,
        guidance_embeds=False,
    )
    vae = AutoencoderKLFlux2(
        block_out_channels=(s.vae_channels, 2 * s.vae_channels, 2 * s.vae_channels, 3 * s.vae_channels),
        layers_per_block=1,
        latent_channels=s.latent_channels,
        norm_num_groups=4,
        sample_size=64,
    )
    return Flux2KleinPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=True),
        vae=vae,
        text_encoder=Qwen3ForCausalLM(qwen3_config(tokenizer, *s.text)),
        tokenizer=tokenizer,
        transformer=transformer,
        is_distilled=s.is_distilled,
    )
