"""Small random checkpoints of pipeline classes that no row of the dit's table is about."""

# diffusers exports its classes lazily, which pyright does not take for an export:
# pyright: reportPrivateImportUsage=false, reportArgumentType=false, reportPrivateUsage=false

from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import torch
from diffusers.models.autoencoders.autoencoder_dc import AutoencoderDC
from diffusers.pipelines.ltx2 import LTX2TextConnectors
from diffusers.pipelines.ltx2.vocoder import LTX2Vocoder
from transformers import (
    CLIPImageProcessor,
    CLIPTextModel,
    CLIPTextModelWithProjection,
    CLIPVisionConfig,
    CLIPVisionModelWithProjection,
    Gemma2Config,
    Gemma2Model,
    T5EncoderModel,
)

from cli.tiny import parts
from cli.tiny.weights import _randomize
from tests.support.kept import kept_folder

SIZE = parts.SIZES["tiny"]
CLIP_2 = (48, 3, 3)
_CONNECTOR = {"num_attention_heads": 4, "attention_head_dim": 8, "num_layers": 1, "num_learnable_registers": None}


_XL: dict[str, Any] = {
    "cross_attention_dim": SIZE.clip[0] + CLIP_2[0],
    "addition_embed_type": "text_time",
    "addition_time_embed_dim": 8,
    "projection_class_embeddings_input_dim": CLIP_2[0] + 6 * 8,
}
_CONTROL: dict[str, Any] = {
    "block_out_channels": (16, 32),
    "layers_per_block": 1,
    "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
    "attention_head_dim": 8,
    "norm_num_groups": 4,
    "cross_attention_dim": SIZE.clip[0],
    "conditioning_embedding_out_channels": (4, 8, 8, 16),  # latents are an eighth as wide
}


def _unet(**more: Any) -> diffusers.UNet2DConditionModel:
    return diffusers.UNet2DConditionModel(
        sample_size=8,
        block_out_channels=(16, 32),
        layers_per_block=1,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        attention_head_dim=8,
        norm_num_groups=4,
        **more,
    )


def _vae(**scale: float) -> diffusers.AutoencoderKL:
    blocks = {"down_block_types": ("DownEncoderBlock2D",) * 4, "up_block_types": ("UpDecoderBlock2D",) * 4}
    return diffusers.AutoencoderKL(**parts.vae_sizes(8, 4), **blocks, **scale)


def _clip(model: Any = CLIPTextModel, widths: parts.Widths = SIZE.clip, suffix: str = "") -> dict[str, Any]:
    return parts.clip(model, parts.clip_tokenizer(SIZE.words), widths, suffix)


def _t5() -> dict[str, Any]:
    return parts.t5(T5EncoderModel, parts.t5_tokenizer(SIZE.words), SIZE.t5)


def _gemma() -> dict[str, Any]:
    tokenizer = parts.qwen_tokenizer(SIZE.words)
    config = Gemma2Config(**parts.language_sizes(len(tokenizer), (32, 2, 2)), head_dim=16)
    return {"tokenizer": tokenizer, "text_encoder": Gemma2Model(config)}


def stable_diffusion(cls: Any = diffusers.StableDiffusionPipeline) -> Any:
    return cls(
        unet=_unet(cross_attention_dim=SIZE.clip[0]),
        scheduler=diffusers.PNDMScheduler(skip_prk_steps=True, steps_offset=1),
        vae=_vae(),
        **_clip(),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )


def stable_diffusion_xl() -> Any:
    return diffusers.StableDiffusionXLPipeline(
        unet=_unet(**_XL),
        scheduler=diffusers.EulerDiscreteScheduler(steps_offset=1),
        vae=_vae(),
        **_clip(),
        **_clip(CLIPTextModelWithProjection, CLIP_2, "_2"),
        add_watermarker=False,
    )


def pixart_sigma() -> Any:
    return diffusers.PixArtSigmaPipeline(
        transformer=diffusers.PixArtTransformer2DModel(
            num_attention_heads=2,
            attention_head_dim=8,
            in_channels=4,
            num_layers=2,
            norm_num_groups=4,
            cross_attention_dim=16,
            caption_channels=SIZE.t5[0],
            sample_size=32,
        ),
        scheduler=diffusers.DPMSolverMultistepScheduler(),
        vae=_vae(),
        **_t5(),
    )


def sana() -> Any:
    sides = {"out_channels": (8, 8, 16, 16), "layers_per_block": (1, 1, 1, 1), "qkv_multiscales": ((), (), (), (5,))}
    blocks = ("ResBlock", "ResBlock", "ResBlock", "EfficientViTBlock")
    halves = {f"{half}_{name}": value for half in ("encoder", "decoder") for name, value in sides.items()}
    return diffusers.SanaPipeline(
        transformer=diffusers.SanaTransformer2DModel(
            in_channels=4,
            out_channels=4,
            num_attention_heads=2,
            attention_head_dim=8,
            num_layers=2,
            num_cross_attention_heads=2,
            cross_attention_head_dim=8,
            cross_attention_dim=16,
            caption_channels=32,
            sample_size=32,
        ),
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0),
        vae=AutoencoderDC(
            latent_channels=4,
            attention_head_dim=8,
            encoder_block_types=blocks,
            decoder_block_types=blocks,
            **{name.replace("out_channels", "block_out_channels"): value for name, value in halves.items()},
        ),
        **_gemma(),
    )


def lumina2() -> Any:
    return diffusers.Lumina2Pipeline(
        transformer=diffusers.Lumina2Transformer2DModel(
            sample_size=8,
            in_channels=4,
            hidden_size=24,
            num_layers=2,
            num_refiner_layers=1,
            num_attention_heads=2,
            num_kv_heads=2,
            multiple_of=16,
            axes_dim_rope=(4, 4, 4),
            cap_feat_dim=32,
        ),
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0),
        vae=_vae(shift_factor=0.1),
        **_gemma(),
    )


def ltx() -> Any:
    return diffusers.LTXPipeline(
        transformer=diffusers.LTXVideoTransformer3DModel(
            in_channels=8,
            out_channels=8,
            num_attention_heads=2,
            attention_head_dim=16,
            cross_attention_dim=32,
            num_layers=2,
            caption_channels=SIZE.t5[0],
        ),
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(),
        vae=diffusers.AutoencoderKLLTXVideo(
            latent_channels=8,
            block_out_channels=(8, 8, 8, 8),
            decoder_block_out_channels=(8, 8, 8, 8),
            layers_per_block=(1,) * 5,
            decoder_layers_per_block=(1,) * 5,
            spatio_temporal_scaling=(True, True, False, False),
            decoder_spatio_temporal_scaling=(True, True, False, False),
            decoder_inject_noise=(False,) * 5,
            upsample_residual=(False,) * 4,
            upsample_factor=(1,) * 4,
            patch_size=1,
        ),
        **_t5(),
    )


def ltx2() -> Any:
    """Videos with sound."""
    heads = {f"{kind}_connector_{name}": value for kind in ("video", "audio") for name, value in _CONNECTOR.items()}
    mel = {"mel_bins": 8, "sample_rate": 16_000, "mel_hop_length": 160}
    return diffusers.LTX2Pipeline(
        transformer=diffusers.LTX2VideoTransformer3DModel(
            in_channels=8,
            out_channels=8,
            num_attention_heads=2,
            attention_head_dim=16,
            cross_attention_dim=32,
            audio_in_channels=4,
            audio_out_channels=4,
            audio_num_attention_heads=2,
            audio_attention_head_dim=8,
            audio_cross_attention_dim=16,
            num_layers=2,
            caption_channels=32,
            rope_double_precision=False,
            rope_type="split",
        ),
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(),
        vae=diffusers.AutoencoderKLLTX2Video(
            latent_channels=8,
            block_out_channels=(8,),
            decoder_block_out_channels=(8,),
            layers_per_block=(1,),
            decoder_layers_per_block=(1, 1),
            spatio_temporal_scaling=(True,),
            decoder_spatio_temporal_scaling=(True,),
            decoder_inject_noise=(False, False),
            downsample_type=("spatial",),
            upsample_residual=(False,),
            upsample_factor=(1,),
            patch_size=1,
        ),
        audio_vae=diffusers.AutoencoderKLLTX2Audio(
            base_channels=4, ch_mult=(1,), num_res_blocks=1, resolution=32, latent_channels=2, **mel
        ),
        vocoder=LTX2Vocoder(
            in_channels=2 * mel["mel_bins"],
            hidden_channels=16,
            upsample_kernel_sizes=[4, 4],
            upsample_factors=[2, 2],
            resnet_kernel_sizes=[3],
            resnet_dilations=[[1, 3]],
            output_sampling_rate=mel["sample_rate"],
        ),
        connectors=LTX2TextConnectors(
            caption_channels=32,
            text_proj_in_factor=3,  # hidden states of two layers, and the embeddings
            rope_double_precision=False,
            rope_type="split",
            **heads,
        ),
        **_gemma(),
    )


def stable_video_diffusion() -> Any:
    """It reads no prompt."""
    vision = CLIPVisionConfig(
        hidden_size=32,
        intermediate_size=64,
        projection_dim=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        image_size=224,  # as the pipeline scales its picture
        patch_size=56,
    )
    return diffusers.StableVideoDiffusionPipeline(
        vae=diffusers.AutoencoderKLTemporalDecoder(
            block_out_channels=(32,) * 4, down_block_types=("DownEncoderBlock2D",) * 4
        ),
        image_encoder=CLIPVisionModelWithProjection(vision),
        unet=diffusers.UNetSpatioTemporalConditionModel(
            sample_size=8,
            in_channels=8,  # latents, and those of the picture
            out_channels=4,
            block_out_channels=(32, 64),
            layers_per_block=1,
            down_block_types=("CrossAttnDownBlockSpatioTemporal", "DownBlockSpatioTemporal"),
            up_block_types=("UpBlockSpatioTemporal", "CrossAttnUpBlockSpatioTemporal"),
            cross_attention_dim=32,
            num_attention_heads=(2, 2),
            addition_time_embed_dim=8,
            projection_class_embeddings_input_dim=3 * 8,  # frames a second, motion, noise
            num_frames=4,
        ),
        scheduler=diffusers.EulerDiscreteScheduler(prediction_type="v_prediction", use_karras_sigmas=True),
        feature_extractor=CLIPImageProcessor(),
    )


def perturbed_attention() -> Any:
    """It swaps the attention of its model during a call, so that calls disturb each other."""
    return stable_diffusion(diffusers.StableDiffusionPAGPipeline)


def self_attention_guidance() -> Any:
    """It keeps what its model's attention says in the middle of a call, so that a call fails among others."""
    return stable_diffusion(diffusers.StableDiffusionSAGPipeline)


def class_images() -> Any:
    """It makes pictures of a class, and reads no prompt."""
    pipeline = diffusers.DiTPipeline(
        transformer=diffusers.DiTTransformer2DModel(
            sample_size=8,
            num_layers=2,
            num_attention_heads=2,
            attention_head_dim=8,
            out_channels=8,
            num_embeds_ada_norm=1000,  # the number of the class that stands for none is in the pipeline's code
        ),
        vae=_vae(),
        scheduler=diffusers.DDIMScheduler(),
    )
    pipeline.register_to_config(id2label={0: "tench, Tinca tinca", 7: "cock", 207: "golden retriever"})
    return pipeline


def animate_diff() -> Any:
    components = stable_diffusion().components
    for name in ("safety_checker", "requires_safety_checker"):
        components.pop(name, None)
    motion = diffusers.MotionAdapter(
        block_out_channels=(16, 32), motion_layers_per_block=1, motion_norm_num_groups=4, motion_num_attention_heads=2
    )
    steps = diffusers.DDIMScheduler(beta_schedule="linear", clip_sample=False)
    return diffusers.AnimateDiffPipeline(**components | {"scheduler": steps}, motion_adapter=motion)


def ltx_condition() -> Any:
    """It continues a video."""
    return diffusers.LTXConditionPipeline(**ltx().components)


def panorama() -> Any:
    """It copies its scheduler's attributes for each of its views."""
    pipeline = stable_diffusion(diffusers.StableDiffusionPanoramaPipeline)
    return type(pipeline)(
        **pipeline.components | {"scheduler": diffusers.DDIMScheduler()}, requires_safety_checker=False
    )


# What reads control images for `stable_diffusion`.


def control_net() -> Any:
    return diffusers.ControlNetModel(**_CONTROL)


def further_control_net() -> Any:
    return diffusers.ControlNetModel(**_CONTROL, global_pool_conditions=True)


def control_net_xl() -> Any:
    """For `stable_diffusion_xl`."""
    return diffusers.ControlNetModel(**_CONTROL | _XL)


def union_control_net() -> Any:
    """For `stable_diffusion_xl`."""
    own = {"num_control_type": 3, "num_trans_channel": 16, "num_trans_head": 2, "num_proj_channel": 16}
    return diffusers.ControlNetUnionModel(**_CONTROL | _XL, **own)


def with_union_control_net(word: str = "") -> Callable[[], Any]:
    """Makes a Stable Diffusion XL with one: for a prompt alone, "Img2Img" or "Inpaint"."""

    def build() -> Any:
        cls = getattr(diffusers, f"StableDiffusionXLControlNetUnion{word}Pipeline")
        return cls(**stable_diffusion_xl().components, controlnet=union_control_net(), add_watermarker=False)

    build.__name__ = f"with_union_control_net_{word}"
    return build


def adapter() -> Any:
    return diffusers.T2IAdapter(channels=[16, 32], num_res_blocks=1, downscale_factor=8, adapter_type="full_adapter")


def unlisted_checkpoint(build: Callable[[], Any]) -> Path:
    """Of a pipeline, or of a model alone."""

    def make(out: Path) -> None:
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(0)
            made = build()
            for model in getattr(made, "components", {"": made}).values():
                if isinstance(model, torch.nn.Module):
                    _randomize(model.eval())
            made.save_pretrained(out)

    return kept_folder(make, "unlisted", build.__name__, Path(__file__), Path(parts.__file__).parent)
