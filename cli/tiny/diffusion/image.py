"""Families that make pictures and read their prompts by models of text alone."""

from typing import Any

from diffusers.models.autoencoders.autoencoder_kl_flux2 import AutoencoderKLFlux2
from diffusers.models.transformers.transformer_flux import FluxTransformer2DModel
from diffusers.models.transformers.transformer_flux2 import Flux2Transformer2DModel
from diffusers.models.transformers.transformer_sd3 import SD3Transformer2DModel
from diffusers.models.transformers.transformer_z_image import ZImageTransformer2DModel
from diffusers.pipelines.flux.pipeline_flux import FluxPipeline
from diffusers.pipelines.flux2.pipeline_flux2_klein import Flux2KleinPipeline
from diffusers.pipelines.stable_diffusion_3.pipeline_stable_diffusion_3 import StableDiffusion3Pipeline
from diffusers.pipelines.z_image.pipeline_z_image import ZImagePipeline
from diffusers.schedulers.scheduling_flow_match_euler_discrete import FlowMatchEulerDiscreteScheduler
from transformers import CLIPTextModel, CLIPTextModelWithProjection, Qwen3ForCausalLM, Qwen3Model

from cli.tiny.diffusion import parts
from cli.tiny.diffusion.parts import Size


def sd3(s: Size) -> StableDiffusion3Pipeline:
    """Stable Diffusion 3 with three prompt encoders: "tiny" has 3.0's blocks, "small" those of 3.5 (normalised queries
    and keys, dual attention)."""
    tokenizer, tokenizer_2 = parts.clip_tokenizer(s.words), parts.clip_tokenizer(s.words, pad_token="!")
    tokenizer_3 = parts.t5_tokenizer(s.words)
    clip_2 = s.pick((48, 3, 3), (64, 4, 4))
    t5 = s.pick((96, 2, 4), (128, 3, 2))  # at least as wide as both CLIPs side by side
    transformer = SD3Transformer2DModel(
        **s.blocks,
        sample_size=s.pick(8, 12),  # pictures have 8 times as many pixels a side by default
        in_channels=s.latent_channels,
        out_channels=s.latent_channels,
        caption_projection_dim=s.heads * sum(s.rope),
        joint_attention_dim=t5[0],
        pooled_projection_dim=s.clip[0] + clip_2[0],
        pos_embed_max_size=64,
        dual_attention_layers=s.pick((), (0,)),
        qk_norm=s.pick(None, "rms_norm"),
    )
    return StableDiffusion3Pipeline(
        transformer=transformer,
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
        vae=parts.image_vae(s, scaling_factor=1.5305, shift_factor=0.0609),
        text_encoder=CLIPTextModelWithProjection(parts.clip_config(tokenizer, s.clip)),
        tokenizer=tokenizer,
        text_encoder_2=CLIPTextModelWithProjection(parts.clip_config(tokenizer_2, clip_2)),
        tokenizer_2=tokenizer_2,
        text_encoder_3=parts.t5_encoder(len(tokenizer_3), t5),
        tokenizer_3=tokenizer_3,
    )


def flux(s: Size) -> FluxPipeline:
    """FLUX.1 [dev] with two prompt encoders: the guidance is an input of the transformer."""
    tokenizer, tokenizer_2 = parts.clip_tokenizer(s.words), parts.t5_tokenizer(s.words)
    transformer = FluxTransformer2DModel(
        **_flux_blocks(s),
        in_channels=4 * s.latent_channels,
        joint_attention_dim=s.t5[0],
        pooled_projection_dim=s.clip[0],
        guidance_embeds=True,
        axes_dims_rope=s.rope,
    )
    return FluxPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=True),
        vae=parts.image_vae(s, scaling_factor=0.3611, shift_factor=0.1159),
        text_encoder=CLIPTextModel(parts.clip_config(tokenizer, s.clip)),
        tokenizer=tokenizer,
        text_encoder_2=parts.t5_encoder(len(tokenizer_2), s.t5),
        tokenizer_2=tokenizer_2,
        transformer=transformer,
    )


def klein(s: Size) -> Flux2KleinPipeline:
    """FLUX.2 [klein], which takes a prompt and, if wanted, pictures: "tiny" is the base model, which is guided by a
    second prompt, "small" the distilled one."""
    tokenizer, latent_channels = parts.qwen_tokenizer(s.words), s.latent_channels // 2
    text = s.pick((32, 28, 2), (48, 30, 4))  # states behind layers 9, 18 and 27 are the prompt
    transformer = Flux2Transformer2DModel(
        **_flux_blocks(s),
        in_channels=4 * latent_channels,
        joint_attention_dim=3 * text[0],
        axes_dims_rope=(sum(s.rope) // 4,) * 4,
        guidance_embeds=False,
    )
    return Flux2KleinPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=True),
        vae=AutoencoderKLFlux2(**parts.vae_sizes(s.vae_channels, latent_channels)),
        text_encoder=Qwen3ForCausalLM(parts.qwen3_config(tokenizer, text)),
        tokenizer=tokenizer,
        transformer=transformer,
        is_distilled=s.pick(False, True),
    )


def z_image(s: Size) -> ZImagePipeline:
    """Z-Image: prompt, encoded by Qwen3, and picture in one sequence."""
    tokenizer = parts.qwen_tokenizer(s.words)
    transformer = ZImageTransformer2DModel(
        in_channels=s.latent_channels,
        dim=s.heads * sum(s.rope),
        n_layers=s.layers,
        n_refiner_layers=s.layers - 1,
        n_heads=s.heads,
        n_kv_heads=s.heads,
        cap_feat_dim=s.t5[0],
        axes_dims=list(s.rope),
        axes_lens=[1536, 512, 512],
    )
    return ZImagePipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
        vae=parts.image_vae(s, scaling_factor=0.3611, shift_factor=0.1159),
        text_encoder=Qwen3Model(parts.qwen3_config(tokenizer, s.t5)),
        tokenizer=tokenizer,  # pyright: ignore[reportArgumentType]
        transformer=transformer,
    )


def _flux_blocks(s: Size) -> dict[str, Any]:
    """Layers that treat text and picture apart, then layers that do not."""
    return s.blocks | {"num_layers": s.layers - 1, "num_single_layers": s.layers}
