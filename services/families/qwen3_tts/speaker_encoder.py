"""Qwen3-TTS's speaker encoder: its mel spectrogram and its sizes."""

from typing import Any

import torch
from torch.nn import functional as F
from transformers.audio_utils import mel_filter_bank

from services.common.engine.ecapa import SpeakerEncoder

WINDOW, HOP = 1024, 256  # samples
# Defaults of a checkpoint's config.
_DEFAULTS: dict[str, Any] = {
    "mel_dim": 128,
    "enc_channels": [512, 512, 512, 512, 1536],
    "enc_kernel_sizes": [5, 3, 3, 3, 1],
    "enc_dilations": [1, 2, 3, 4, 1],
    "enc_attention_channels": 128,
    "enc_res2net_scale": 8,
    "enc_se_channels": 128,
}


def mel_spectrogram(samples: torch.Tensor, sample_rate_hz: int, bins: int) -> torch.Tensor:
    """Log mel spectrogram up to half the sample rate, (bins, mel frames) float32, of sound (samples,) float32."""
    padding = (WINDOW - HOP) // 2
    padded = F.pad(samples[None], (padding, padding), mode="reflect")[0]
    window = torch.hann_window(WINDOW, device=samples.device)
    spectrum = torch.stft(padded, WINDOW, HOP, window=window, center=False, return_complex=True)
    magnitudes = (torch.view_as_real(spectrum).square().sum(-1) + 1e-9).sqrt()
    filters = mel_filter_bank(
        WINDOW // 2 + 1, bins, 0.0, sample_rate_hz / 2, sample_rate_hz, norm="slaney", mel_scale="slaney"
    )
    mels = torch.tensor(filters.T, dtype=torch.float32, device=samples.device) @ magnitudes
    return mels.clamp(min=1e-5).log()


def new_speaker_encoder(config: dict[str, Any]) -> SpeakerEncoder:
    """The encoder of a checkpoint's `speaker_encoder_config`, without parameters.

    Raises:
        ValueError: the vector's width is missing, or widths do not fit each other.
    """
    return SpeakerEncoder({**_DEFAULTS, **config}, "speaker_encoder_config")
