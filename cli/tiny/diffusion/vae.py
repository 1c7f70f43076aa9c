"""VAEs in small. All scale by 8, as published, so that sizes have the published divisors."""

from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL
from diffusers.models.autoencoders.autoencoder_kl_qwenimage import AutoencoderKLQwenImage
from diffusers.models.autoencoders.autoencoder_kl_wan import AutoencoderKLWan


def image_vae(
    channels: int,
    latent_channels: int,
    scaling_factor: float = 1,
    shift_factor: float | None = None,
    statistics: bool = False,
) -> AutoencoderKL:
    """The VAE of SD3, FLUX.1, Z-Image and GLM-Image: four levels, no quantizing convolutions.

    Args:
        channels: of the level with the most pixels, a multiple of 4.
        latent_channels: of the latents.
        scaling_factor: as in the published config.
        shift_factor: as in the published config.
        statistics: latents are scaled by channel instead.
    """
    means, deviations = _statistics(latent_channels) if statistics else (None, None)
    return AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 4,  # type: ignore[arg-type]
        up_block_types=("UpDecoderBlock2D",) * 4,  # type: ignore[arg-type]
        block_out_channels=(channels, 2 * channels, 2 * channels, 3 * channels),  # type: ignore[arg-type]
        layers_per_block=1,
        latent_channels=latent_channels,
        norm_num_groups=4,
        sample_size=64,
        scaling_factor=scaling_factor,
        shift_factor=shift_factor,
        latents_mean=means,  # type: ignore[arg-type]
        latents_std=deviations,  # type: ignore[arg-type]
        force_upcast=False,
        use_quant_conv=False,
        use_post_quant_conv=False,
    )


def qwen_vae(channels: int, latent_channels: int) -> AutoencoderKLQwenImage:
    """The VAE of Qwen-Image, which takes a picture as a video of one frame."""
    means, deviations = _statistics(latent_channels)
    return AutoencoderKLQwenImage(
        base_dim=channels,
        z_dim=latent_channels,
        dim_mult=[1, 2, 2, 3],
        num_res_blocks=1,
        latents_mean=means,
        latents_std=deviations,
    )


def wan_vae(channels: int, latent_channels: int) -> AutoencoderKLWan:
    """The VAE of Wan 2.1 and of 2.2's large models: 4 frames become one."""
    means, deviations = _statistics(latent_channels)
    return AutoencoderKLWan(
        base_dim=channels,
        z_dim=latent_channels,
        dim_mult=[1, 2, 2, 3],
        num_res_blocks=1,
        latents_mean=means,
        latents_std=deviations,
    )


def _statistics(latent_channels: int) -> tuple[list[float], list[float]]:
    """Mean and standard deviation of each latent channel: no two equal, so that a mixed-up order shows."""
    means = [0.1 * (channel - latent_channels / 2) for channel in range(latent_channels)]
    return means, [1 + 0.05 * channel for channel in range(latent_channels)]
