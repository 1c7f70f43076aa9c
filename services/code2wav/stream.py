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

    `frames` and `first_sample` count from the end of the stream's prompt: frames decoded with these, samples given out
    before. `taken`: frames of the step that this is of, those of the prompt too.
    """

    samples: torch.Tensor
    first_sample: int
    frames: int
    taken: int


@dataclass(frozen=True)
class Finished:
    """All frames are decoded; those of the prompt are not counted. `waited_ms`: how long the stream had a slot but no
    frame to decode."""

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
        self.prompt_frames = self.samples_to_drop = 0
        self.playback = Playback()
        self.waiting = WaitClock()
        self._codes = torch.empty(0)  # those that are ready, once there are any

    @property
    def prompt_left(self) -> int:
        """Frames of the prompt that are still to be decoded."""
        return max(0, self.prompt_frames - self.frames_decoded)

    @property
    def frames_given(self) -> int:
        """Frames decoded that are not of the prompt."""
        return max(0, self.frames_decoded - self.prompt_frames)

    def add(self, codes: torch.Tensor) -> None:
        """Appends (frames, groups)."""
        self._codes = torch.cat([self._codes, codes]) if self.frames_ready else codes
        self.frames_ready += len(codes)
        self.playback.arrived(len(codes), time.monotonic(), paced=not self.prompt_left)
        self.update_wait()

    def heard(self, samples: torch.Tensor) -> torch.Tensor:
        """`samples`, which follow on those before, without those of the prompt."""
        dropped = min(self.samples_to_drop, len(samples))
        self.samples_to_drop -= dropped
        return samples[dropped:]

    def take(self, frames: int) -> torch.Tensor:
        """Removes the next `frames`: (frames, groups)."""
        self.frames_ready -= frames
        taken, self._codes = self._codes[:frames], self._codes[frames:]
        return taken

    def update_wait(self) -> None:
        """Starts or stops the clock that measures waiting for frames: it had a slot but no frame to decode."""
        self.waiting.set(self.slot is not None and not self.frames_ready and not self.complete)
