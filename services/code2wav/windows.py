"""Cuts of an utterance, for decoders that need frames ahead.

They depend on the settings and the position only: equal frames give equal sound.
"""

from dataclasses import dataclass, replace
from itertools import accumulate

# Frames of a step that decodes nothing, before the end of a stream without windows.
_WHOLE_STEP = 64


@dataclass(frozen=True)
class Windows:
    """The cuts of every utterance. A window without full context after it takes all remaining frames.

    Attributes:
        sizes: frames of the first, second, ... window, the last for all that follow; empty: one window.
        past: context frames before a window.
        future: context frames after it.
    """

    sizes: tuple[int, ...]
    past: int = 0
    future: int = 0

    @property
    def largest_step(self) -> int:
        """Most frames of a step."""
        return max(self.sizes[0] + self.future, *self.sizes) if self.sizes else _WHOLE_STEP

    @property
    def most_decoded(self) -> int:
        """Most frames of a window with its context. 0: no limit."""
        return self.past + max(self.sizes) + self.future if self.sizes else 0

    def size_at(self, start: int) -> int:
        """Frames of the window that begins at frame `start`."""
        for size, end in zip(self.sizes, accumulate(self.sizes), strict=True):
            if start < end:
                return size
        return self.sizes[-1]

    def step_frames(self, taken: int) -> int:
        """Frames that complete the next window and its context, after `taken` frames."""
        if not self.sizes:
            return _WHOLE_STEP
        start = max(0, taken - self.future)
        return start + self.size_at(start) + self.future - taken

    def decodable(self, frames: int, complete: bool, taken: int) -> int:
        step = self.step_frames(taken)
        return step if frames >= step else frames if complete else 0

    def check(self, granularity: int) -> None:
        """Raises ValueError unless all sizes are multiples of `granularity`."""
        sizes = ", ".join(map(str, self.sizes))
        if any(n < 0 or n % granularity for n in self.sizes):
            raise ValueError(f"--window-frames: {sizes} must be multiples of {granularity}")
        if self.sizes and min(self.sizes) < 1:
            raise ValueError(f"--window-frames: {sizes} must be at least {granularity}")


@dataclass(frozen=True)
class WindowSettings:
    """A user's settings; None leaves the decoder's own."""

    decoding: str | None = None
    frames: tuple[int, ...] | None = None

    def over(self, default: Windows) -> Windows:
        """Applies these settings to a decoder's `default`. Raises ValueError if they contradict each other."""
        if self.decoding == "whole":
            if self.frames is not None:
                raise ValueError("--decoding whole has no windows: leave out --window-frames")
            return Windows(())
        return default if self.frames is None else replace(default, sizes=self.frames)
