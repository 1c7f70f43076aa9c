"""Qwen3-Omni's codec decoder: a mean of code embeddings, a transformer and causal convolutions.

It has the layers and parameter names of transformers' Qwen3OmniMoeCode2Wav.
"""

from typing import Any

import torch
from torch import nn

from services.code2wav.causal import Carry
from services.code2wav.family import DecoderSpec
from services.code2wav.wave import WaveDecoder, WaveSizes, read_sizes

# Codec frames a second (arXiv:2509.17765). The published config.json has neither this nor a sample rate.
FRAMES_PER_SECOND = 12.5
_PREFIX = "code2wav."


def parameter_of(tensor: str) -> str | None:
    return tensor.removeprefix(_PREFIX) if tensor.startswith(_PREFIX) else None


def new_decoder(config: dict[str, Any]) -> "Qwen3OmniDecoder":
    part = config["code2wav_config"]
    stated_hz = part.get("output_sample_rate") or part.get("sampling_rate")
    return Qwen3OmniDecoder(read_sizes(part, "code2wav_config"), stated_hz)


class Qwen3OmniDecoder(WaveDecoder):
    """A decoder that averages the embeddings of a frame's codes.

    Args:
        stated_sample_rate_hz: the checkpoint's; None: the frame rate gives it.
    """

    def __init__(self, sizes: WaveSizes, stated_sample_rate_hz: int | None = None) -> None:
        spec = DecoderSpec(
            sample_rate_hz=stated_sample_rate_hz or round(sizes.samples_per_frame * FRAMES_PER_SECOND),
            samples_per_frame=sizes.samples_per_frame,
            codebook_sizes=(sizes.codebook_size,) * sizes.num_code_groups,
            trimmed_samples=sizes.left_trims[-1],
        )
        super().__init__(spec, sizes)
        self.code_embedding = nn.Embedding(sizes.codebook_size * sizes.num_code_groups, sizes.latent)

    def embed(self, codes: torch.Tensor, carry: Carry) -> torch.Tensor:
        return self.code_embedding(self.table_rows(codes)).mean(2)
