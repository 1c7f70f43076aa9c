"""The toy's code2wav: a wave for each code, 25 a second."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from services.code2wav.family import Decoder, DecoderSpec, DecoderStates

SAMPLE_RATE_HZ = 24_000


def parameter_of(tensor: str) -> str | None:
    """As `services.code2wav.family.DecoderFamily`."""
    return "waves" if tensor == "waves" else None


def new_decoder(config: dict[str, Any]) -> Decoder:
    """As `services.code2wav.family.DecoderFamily`."""
    return ToyDecoder(config["sounds"], SAMPLE_RATE_HZ // config["frame_rate"])


class ToyStates(DecoderStates):
    """A frame's samples depend on no other frame: there is nothing to carry."""

    @property
    def slot_bytes(self) -> int:
        return 0

    def open(self, slot: int, voice: str, seed: int) -> None:
        pass

    def batch(self, slots: Sequence[int]) -> Sequence[int]:
        return slots


class ToyDecoder(Decoder):
    """Looks the waves up."""

    def __init__(self, sounds: int, samples_per_frame: int) -> None:
        super().__init__(DecoderSpec(SAMPLE_RATE_HZ, samples_per_frame, codebook_sizes=(sounds,)))
        self.waves = nn.Parameter(torch.empty(sounds, samples_per_frame))

    def new_states(self, slots: int) -> ToyStates:
        return ToyStates(slots)

    def step(self, codes: torch.Tensor, batch: Sequence[int]) -> list[torch.Tensor]:
        self.frames_computed += codes.shape[0] * codes.shape[1]
        return list(self.waves[codes[:, :, 0].long()].flatten(1).cpu())
