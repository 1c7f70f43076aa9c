"""Stable Audio Open: "tiny" makes stereo, "small" mono at another rate."""

from dataclasses import dataclass

from diffusers.models.autoencoders.autoencoder_oobleck import AutoencoderOobleck
from diffusers.models.transformers.stable_audio_transformer import StableAudioDiTModel
from diffusers.pipelines.stable_audio.modeling_stable_audio import StableAudioProjectionModel
from diffusers.pipelines.stable_audio.pipeline_stable_audio import StableAudioPipeline
from diffusers.schedulers.scheduling_cosine_dpmsolver_multistep import CosineDPMSolverMultistepScheduler

from cli.tiny.diffusion.encoders import t5_encoder
from cli.tiny.diffusion.tokenizers import t5_tokenizer


@dataclass(frozen=True)
class _Size:
    words: int
    t5: tuple[int, int, int]  # hidden, layers, heads
    conditioning: int
    layers: int
    heads: int
    key_heads: int
    head_dim: int
    latent_channels: int
    frames: int  # latents of the longest sound; every sound is denoised at this length
    ratios: tuple[int, ...]  # together the samples of a latent
    vae_channels: int
    audio_channels: int
    rate_hz: int


_SIZES = {
    "tiny": _Size(200, (48, 2, 4), 48, 2, 4, 2, 16, 16, 128, (2, 4, 4, 8), 8, 2, 44_100),
    "small": _Size(300, (80, 3, 2), 64, 3, 3, 1, 32, 8, 224, (2, 4, 10), 12, 1, 24_000),
}


def stable_audio(size: str) -> StableAudioPipeline:
    """Pipeline whose prompt is a text, a start and an end in seconds."""
    s = _SIZES[size]
    tokenizer = t5_tokenizer(s.words, max_length=128)
    transformer = StableAudioDiTModel(
        sample_size=s.frames,
        in_channels=s.latent_channels,
        out_channels=s.latent_channels,
        num_layers=s.layers,
        attention_head_dim=s.head_dim,
        num_attention_heads=s.heads,
        num_key_value_attention_heads=s.key_heads,
        cross_attention_dim=s.conditioning,
        cross_attention_input_dim=s.conditioning,
        global_states_input_dim=2 * s.conditioning,
        time_proj_dim=64,
    )
    vae = AutoencoderOobleck(
        encoder_hidden_size=s.vae_channels,
        downsampling_ratios=list(s.ratios),
        channel_multiples=[1, 2, 2, 3][: len(s.ratios)],
        decoder_channels=s.vae_channels,
        decoder_input_channels=s.latent_channels,
        audio_channels=s.audio_channels,
        sampling_rate=s.rate_hz,
    )
    return StableAudioPipeline(
        vae=vae,
        text_encoder=t5_encoder(tokenizer, *s.t5),
        projection_model=StableAudioProjectionModel(s.t5[0], s.conditioning, min_value=0, max_value=512),
        tokenizer=tokenizer,
        transformer=transformer,
        # What the published checkpoint has, whatever the pipeline's signature says.
        scheduler=CosineDPMSolverMultistepScheduler(  # pyright: ignore[reportArgumentType]
            sigma_min=0.3, sigma_max=500, sigma_data=1.0, sigma_schedule="exponential", prediction_type="v_prediction"
        ),
    )
