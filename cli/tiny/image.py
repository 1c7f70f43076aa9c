"""Image families whose prompt encoders read text alone."""

# diffusers exports its classes lazily, which pyright does not take for an export:
# pyright: reportPrivateImportUsage=false

from typing import Any

import diffusers
from transformers import CLIPTextModel, CLIPTextModelWithProjection, Qwen3ForCausalLM, Qwen3Model, T5EncoderModel

from cli.tiny import parts
from cli.tiny.parts import Size


def sd3(s: Size) -> diffusers.StableDiffusion3Pipeline:
    """Stable Diffusion 3: "tiny" has 3.0's blocks, "small" 3.5's (normalised queries and keys, dual attention)."""
    clip_2 = s.pick((48, 3, 3), (64, 4, 4))
    t5 = s.pick((96, 2, 4), (128, 3, 2))  # at least as wide as both CLIPs side by side
    return diffusers.StableDiffusion3Pipeline(
        transformer=diffusers.SD3Transformer2DModel(
            **s.blocks,
            sample_size=s.pick(8, 12),  # images have 8 times as many pixels a side by default
            in_channels=s.latent_channels,
            out_channels=s.latent_channels,
            caption_projection_dim=s.heads * sum(s.rope),
            joint_attention_dim=t5[0],
            pooled_projection_dim=s.clip[0] + clip_2[0],
            pos_embed_max_size=64,
            dual_attention_layers=s.pick((), (0,)),
            qk_norm=s.pick(None, "rms_norm"),
        ),
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0),
        vae=parts.image_vae(s, scaling_factor=1.5305, shift_factor=0.0609),
        **parts.clip(CLIPTextModelWithProjection, parts.clip_tokenizer(s.words), s.clip),
        **parts.clip(CLIPTextModelWithProjection, parts.clip_tokenizer(s.words, pad_token="!"), clip_2, suffix="_2"),
        **parts.t5(T5EncoderModel, parts.t5_tokenizer(s.words), t5, suffix="_3"),
    )


def flux(s: Size) -> diffusers.FluxPipeline:
    """FLUX.1 [dev]: the guidance is an input of the transformer."""
    return diffusers.FluxPipeline(
        transformer=diffusers.FluxTransformer2DModel(
            **_flux_blocks(s),
            in_channels=4 * s.latent_channels,
            joint_attention_dim=s.t5[0],
            pooled_projection_dim=s.clip[0],
            guidance_embeds=True,
            axes_dims_rope=s.rope,
        ),
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=True),
        vae=parts.image_vae(s, scaling_factor=0.3611, shift_factor=0.1159),
        **parts.clip(CLIPTextModel, parts.clip_tokenizer(s.words), s.clip),
        **parts.t5(T5EncoderModel, parts.t5_tokenizer(s.words), s.t5, suffix="_2"),
    )


def flux2_klein(s: Size) -> diffusers.Flux2KleinPipeline:
    """FLUX.2 [klein]: "tiny" is the base model, guided by a second prompt, "small" the distilled one."""
    latent_channels = s.latent_channels // 2
    text = s.pick((32, 28, 2), (48, 30, 4))  # states behind layers 9, 18 and 27 are the prompt
    return diffusers.Flux2KleinPipeline(
        transformer=diffusers.Flux2Transformer2DModel(
            **_flux_blocks(s),
            in_channels=4 * latent_channels,
            joint_attention_dim=3 * text[0],
            axes_dims_rope=(sum(s.rope) // 4,) * 4,
            guidance_embeds=False,
        ),
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=True),
        vae=diffusers.AutoencoderKLFlux2(**parts.vae_sizes(s.vae_channels, latent_channels)),
        **parts.qwen3(Qwen3ForCausalLM, parts.qwen_tokenizer(s.words), text),
        is_distilled=s.pick(False, True),
    )


def z_image(s: Size) -> diffusers.ZImagePipeline:
    """Z-Image: prompt, encoded by Qwen3, and image in one sequence."""
    return diffusers.ZImagePipeline(
        transformer=diffusers.ZImageTransformer2DModel(
            in_channels=s.latent_channels,
            dim=s.heads * sum(s.rope),
            n_layers=s.layers,
            n_refiner_layers=s.layers - 1,
            n_heads=s.heads,
            n_kv_heads=s.heads,
            cap_feat_dim=s.t5[0],
            axes_dims=list(s.rope),
            axes_lens=[1536, 512, 512],
        ),
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0),
        vae=parts.image_vae(s, scaling_factor=0.3611, shift_factor=0.1159),
        **parts.qwen3(Qwen3Model, parts.qwen_tokenizer(s.words), s.t5),
    )


def _flux_blocks(s: Size) -> dict[str, Any]:
    """Layers that treat text and image apart, then layers that do not."""
    return s.blocks | {"num_layers": s.layers - 1, "num_single_layers": s.layers}
