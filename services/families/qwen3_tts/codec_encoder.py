"""The encoder of Qwen3-TTS's codec: Mimi's. The decoder is another: code2wav.py."""

from typing import Any

import torch
from torch import nn
from transformers import MimiConfig, MimiModel


class CodecEncoder(nn.Module):
    """Mimi without its decoder, with published tensor names.

    Args:
        mimi: its parts are used, not copied.
    """

    def __init__(self, mimi: MimiModel) -> None:
        super().__init__()
        whole: Any = mimi
        seanet = getattr(whole.encoder, "encoder_seanet", None)
        half: Any = whole if seanet is None else whole.encoder  # transformers 5.21 and later
        self.encoder = whole.encoder if seanet is None else seanet
        self.encoder_transformer, self.downsample = half.encoder_transformer, half.downsample
        self.quantizer = whole.quantizer

    def forward(self, sound: torch.Tensor, groups: int | None = None) -> torch.Tensor:
        """Codes (batch, groups, frames) int64 of (batch, 1, samples). The last frame is padded."""
        hidden = self.encoder_transformer(self.encoder(sound).transpose(1, 2), use_cache=False)[0]
        return self.quantizer.encode(self.downsample(hidden.transpose(1, 2)), groups).transpose(0, 1)


def new_codec_encoder(settings: dict[str, Any]) -> CodecEncoder:
    """An encoder with random weights, from `encoder_config` of the codec's config.json."""
    return CodecEncoder(MimiModel(MimiConfig(**{key: value for key, value in settings.items() if key != "model_type"})))
