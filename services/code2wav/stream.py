"""One request in the engine: the frames it waits with, and the callback its samples go to."""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from services.code2wav.policy import Playback
from services.common.engine.thread import WaitClock


@dataclass(frozen=True)
class Samples:
    """The next samples of a stream: (n,), float32 or, where asked for, int16, on the CPU; n may be 0.

    `frames` and `first_sample` count from the stream's start: frames decoded with these, samples given out before.
    """

    samples: torch.Tensor
    first_sample: int
    frames: int


@dataclass(frozen=True)
class Finished:
    """All frames are decoded. `waited_ms`: how long the stream had a slot but no frame to decode."""

    frames: int
    samples: int
    waited_ms: float


Event = Samples | Finished | Exception
"""What an engine tells of a stream; after an error no more comes."""


class Stream:
    """State of one request. Its fields belong to the engine and change under the engine's lock."""

    def __init__(
        self, emit: Callable[[Event], object], on_started: Callable[[], object], pcm16: bool, voice: str, seed: int
    ) -> None:
        self.emit, self.on_started = emit, on_started
        self.pcm16, self.voice, self.seed = pcm16, voice, seed
        self.slot: int | None = None
        self.in_step = self.complete = self.flushed = self.ended = False
        self.frames_ready = self.frames_decoded = self.samples_emitted = 0
        self.playback = Playback()
        self.waiting = WaitClock()
        self._codes = torch.empty(0)  # those that are ready, once there are any

    def add(self, codes: torch.Tensor) -> None:
        """Appends (frames, groups)."""
        self._codes = torch.cat([self._codes, codes]) if self.frames_ready else codes
        self.frames_ready += len(codes)
        self.playback.arrived(len(codes), time.monotonic())
        self.update_wait()

    def take(self, frames: int) -> torch.Tensor:
        """Removes the next `frames`: (frames, groups)."""
        self.frames_ready -= frames
        taken, self._codes = self._codes[:frames], self._codes[frames:]
        return taken

    def update_wait(self) -> None:
        """Starts or stops the clock that measures waiting for frames: it had a slot but no frame to decode."""
        self.waiting.set(self.slot is not None and not self.frames_ready and not self.complete)
