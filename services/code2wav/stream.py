"""One request in the engine."""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from services.code2wav.policy import PlaybackEstimate
from services.common.engine.thread import WaitClock


@dataclass(frozen=True)
class Samples:
    """The next samples of a stream.

    Attributes:
        samples: (n,) on the CPU, float32 or int16; n may be 0.
        first_sample: number of samples before.
        frames: of these samples, without the prompt's.
        taken: frames of the step, with the prompt's.
    """

    samples: torch.Tensor
    first_sample: int
    frames: int
    taken: int


@dataclass(frozen=True)
class DecodeEnd:
    """All frames are decoded. The numbers leave out the prompt. `waited_ms` is the time with a slot but no frame."""

    frames: int
    samples: int
    waited_ms: float


Event = Samples | DecodeEnd | Exception
"""The last one is a DecodeEnd or an exception."""


class Stream:
    """State of one request. It changes under the engine's lock."""

    def __init__(
        self, emit: Callable[[Event], object], on_started: Callable[[], object], pcm16: bool, voice: str, seed: int
    ) -> None:
        self.emit, self.on_started = emit, on_started
        self.pcm16, self.voice, self.seed = pcm16, voice, seed
        self.slot: int | None = None
        self.in_step = self.complete = self.flushed = self.ended = False
        self.frames_ready = self.frames_decoded = self.samples_emitted = 0
        self.prompt_frames = self.samples_to_drop = 0
        self.playback = PlaybackEstimate()
        self.waiting = WaitClock()
        self._codes = torch.empty(0)

    @property
    def prompt_left(self) -> int:
        """Prompt frames still to decode."""
        return max(0, self.prompt_frames - self.frames_decoded)

    @property
    def frames_given(self) -> int:
        """Frames decoded after the prompt."""
        return max(0, self.frames_decoded - self.prompt_frames)

    def add(self, codes: torch.Tensor) -> None:
        """Appends (frames, groups)."""
        self._codes = torch.cat([self._codes, codes]) if self.frames_ready else codes
        self.frames_ready += len(codes)
        self.playback.arrived(len(codes), time.monotonic(), paced=not self.prompt_left)
        self.update_wait()

    def without_prompt(self, samples: torch.Tensor) -> torch.Tensor:
        """Drops the prompt's samples from the next `samples`."""
        dropped = min(self.samples_to_drop, len(samples))
        self.samples_to_drop -= dropped
        return samples[dropped:]

    def take(self, frames: int) -> torch.Tensor:
        """Removes the next `frames`: (frames, groups)."""
        self.frames_ready -= frames
        taken, self._codes = self._codes[:frames], self._codes[frames:]
        return taken

    def update_wait(self) -> None:
        self.waiting.set(self.slot is not None and not self.frames_ready and not self.complete)
