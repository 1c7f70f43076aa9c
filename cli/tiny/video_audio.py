"""Families that make videos or sounds."""

# diffusers exports its classes lazily, which pyright does not take for an export:
# pyright: reportPrivateImportUsage=false

import diffusers
from transformers import T5EncoderModel, UMT5EncoderModel

from cli.tiny import parts
from cli.tiny.parts import Size


def wan(s: Size) -> diffusers.WanPipeline:
    """Wan 2.2's large text-to-video models: one transformer for the noisy steps, another for the rest."""
    return diffusers.WanPipeline(**_wan_components(s, in_channels=s.latent_channels), boundary_ratio=0.875)


def wan_i2v(s: Size) -> diffusers.WanImageToVideoPipeline:
    """Image to video: the transformers also read the first frame's latents and a mask of 4 channels."""
    return diffusers.WanImageToVideoPipeline(
        **_wan_components(s, in_channels=2 * s.latent_channels + 4), boundary_ratio=0.9
    )


def _wan_components(s: Size, in_channels: int) -> dict:
    return parts.t5(UMT5EncoderModel, parts.t5_tokenizer(s.words), s.t5) | {
        "vae": diffusers.AutoencoderKLWan(**parts.video_vae_sizes(s.vae_channels, s.latent_channels)),
        "scheduler": diffusers.UniPCMultistepScheduler(
            prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0
        ),
        "transformer": _wan_transformer(s, in_channels),
        "transformer_2": _wan_transformer(s, in_channels),
    }


def _wan_transformer(s: Size, in_channels: int) -> diffusers.WanTransformer3DModel:
    head_dim = s.pick(24, 16)
    return diffusers.WanTransformer3DModel(
        num_attention_heads=s.heads,
        attention_head_dim=head_dim,
        in_channels=in_channels,
        out_channels=s.latent_channels,
        text_dim=s.t5[0],
        freq_dim=32,
        ffn_dim=2 * s.heads * head_dim,
        num_layers=s.layers,
    )


def stable_audio(s: Size) -> diffusers.StableAudioPipeline:
    """Stable Audio Open: "tiny" makes stereo, "small" mono at another rate."""
    t5, conditioning = s.pick((48, 2, 4), (80, 3, 2)), s.pick(48, 64)
    transformer = diffusers.StableAudioDiTModel(
        sample_size=s.pick(128, 224),  # latents of the longest sound; every sound is denoised at this length
        in_channels=s.latent_channels,
        out_channels=s.latent_channels,
        **s.blocks | {"attention_head_dim": s.pick(16, 32), "num_attention_heads": s.pick(4, 3)},
        num_key_value_attention_heads=s.pick(2, 1),
        cross_attention_dim=conditioning,
        cross_attention_input_dim=conditioning,
        global_states_input_dim=2 * conditioning,
        time_proj_dim=64,
    )
    ratios = s.pick([2, 4, 4, 8], [2, 4, 10])  # together the samples of a latent
    vae = diffusers.AutoencoderOobleck(
        encoder_hidden_size=s.vae_channels,
        downsampling_ratios=ratios,
        channel_multiples=[1, 2, 2, 3][: len(ratios)],
        decoder_channels=s.vae_channels,
        decoder_input_channels=s.latent_channels,
        audio_channels=s.pick(2, 1),
        sampling_rate=s.pick(44_100, 24_000),
    )
    return diffusers.StableAudioPipeline(
        vae=vae,
        **parts.t5(T5EncoderModel, parts.t5_tokenizer(s.words, max_length=128), t5),
        projection_model=diffusers.StableAudioProjectionModel(t5[0], conditioning, min_value=0, max_value=512),
        transformer=transformer,
        # What the published checkpoint has, whatever the pipeline's signature says; its settings are the defaults.
        scheduler=diffusers.CosineDPMSolverMultistepScheduler(),  # pyright: ignore[reportArgumentType]
    )
