"""What code2wav needs to know of a checkpoint: sizes, and how many samples its frames come to. All read from it."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import AutoConfig

# Codec frames a second of the Qwen3-Omni codec (Qwen3-Omni Technical Report, arXiv:2509.17765). The published
# config.json states neither this nor a sample rate.
FRAMES_PER_SECOND = 12.5


@dataclass(frozen=True)
class Code2WavSpec:
    """The codec decoder of one checkpoint. Sizes are in channels unless said otherwise."""

    codebook_size: int
    num_code_groups: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    attention_bias: bool
    activation: str
    norm_eps: float
    rope_theta: float
    window: int
    """Positions a frame attends to, itself included."""
    upsampling_ratios: tuple[int, ...]
    upsample_rates: tuple[int, ...]
    decoder_dim: int
    stated_sample_rate_hz: int | None
    """Sample rate that the checkpoint states, if it does."""

    @property
    def samples_per_frame(self) -> int:
        """Samples a codec frame stands for."""
        return math.prod(self.upsampling_ratios) * math.prod(self.upsample_rates)

    @property
    def sample_rate_hz(self) -> int:
        """What the checkpoint states, else samples_per_frame at the codec's 12.5 frames a second."""
        return self.stated_sample_rate_hz or round(self.samples_per_frame * FRAMES_PER_SECOND)

    @property
    def leads(self) -> tuple[int, ...]:
        """For each decoder block, how many samples before the first real one it makes.

        A transposed convolution of kernel 2r and stride r is trimmed by r on both sides. On the right that is what
        later input would still change. On the left it delays the stream by r samples, which later blocks stretch.
        """
        lead, leads = 0, []
        for rate in self.upsample_rates:
            lead = (lead + 1) * rate
            leads.append(lead)
        return tuple(leads)

    @property
    def trimmed_samples(self) -> int:
        """Samples by which a whole decode is shorter than its frames x samples_per_frame."""
        return self.leads[-1]


def read_spec(folder: Path) -> Code2WavSpec:
    """Reads `config.json` of the checkpoint in `folder`.

    Raises:
        ValueError: the checkpoint has no code2wav, or one of a kind this engine does not run.
    """
    whole = AutoConfig.from_pretrained(folder)
    config = getattr(whole, "code2wav_config", None)
    if config is None or not getattr(whole, "enable_audio_output", True):
        raise ValueError(f"the checkpoint in {folder} has no code2wav (model type {whole.model_type})")
    rope: dict[str, Any] = config.rope_parameters
    if rope.get("rope_type", "default") != "default":
        raise ValueError(f"code2wav_config: rope_type {rope['rope_type']} is not supported, only default")
    if not config.upsample_rates:
        raise ValueError("code2wav_config.upsample_rates is empty")
    return Code2WavSpec(
        codebook_size=config.codebook_size,
        num_code_groups=config.num_quantizers,
        hidden=config.hidden_size,
        layers=config.num_hidden_layers,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        intermediate=config.intermediate_size,
        attention_bias=config.attention_bias,
        activation=config.hidden_act,
        norm_eps=config.rms_norm_eps,
        rope_theta=rope["rope_theta"],
        window=config.sliding_window,
        upsampling_ratios=tuple(config.upsampling_ratios),
        upsample_rates=tuple(config.upsample_rates),
        decoder_dim=config.decoder_dim,
        stated_sample_rate_hz=getattr(config, "output_sample_rate", None) or getattr(config, "sampling_rate", None),
    )
