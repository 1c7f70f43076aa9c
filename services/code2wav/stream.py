"""One request in the engine: the frames it waits with, and the callback its samples go to."""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import torch

from services.code2wav.policy import Playback


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


@dataclass(frozen=True)
class Failed:
    """No more samples come."""

    error: Exception


Event = Samples | Finished | Failed


class Stream:
    """State of one request. Its fields belong to the engine and change under the engine's lock."""

    def __init__(
        self, emit: Callable[[Event], object], on_started: Callable[[], object], pcm16: bool, voice: str, seed: int
    ) -> None:
        self.emit = emit
        self.on_started = on_started
        self.pcm16 = pcm16
        self.voice, self.seed = voice, seed
        self.slot: int | None = None
        self.in_step = False
        self.complete = False
        self.flushed = False
        self.ended = False
        self.frames_decoded = 0
        self.samples_emitted = 0
        self.frames_ready = 0
        self.playback = Playback()
        self._parts: deque[torch.Tensor] = deque()
        self._starved_since: float | None = None
        self._waited_s = 0.0

    def add(self, codes: torch.Tensor) -> None:
        """Appends (frames, groups)."""
        self._parts.append(codes)
        self.frames_ready += len(codes)
        self.playback.arrived(len(codes), time.monotonic())
        self.update_wait()

    def take(self, frames: int) -> torch.Tensor:
        """Removes the next `frames`: (frames, groups)."""
        taken, missing = [], frames
        while missing:
            part = self._parts.popleft()
            if len(part) > missing:
                self._parts.appendleft(part[missing:])
            taken.append(part[:missing])
            missing -= len(taken[-1])
        self.frames_ready -= frames
        return torch.cat(taken)

    def update_wait(self) -> None:
        """Starts or stops the clock that measures waiting for frames."""
        starved = self.slot is not None and not self.frames_ready and not self.complete
        now = time.monotonic()
        if starved and self._starved_since is None:
            self._starved_since = now
        elif not starved and self._starved_since is not None:
            self._waited_s += now - self._starved_since
            self._starved_since = None

    @property
    def waited_ms(self) -> float:
        """Milliseconds with a slot but without frames, up to the last `update_wait`."""
        return self._waited_s * 1000
