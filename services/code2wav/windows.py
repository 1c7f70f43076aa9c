"""How an utterance is cut into windows, for decoders that make sound of a stretch of frames at a time.

The cuts depend on these settings and the position only, never on when frames arrive or what else is decoded: the same
frames give the same sound.
"""

from dataclasses import dataclass
from itertools import accumulate

# Frames that a stream hands over at a time where nothing is decoded before its end.
_WHOLE_STEP = 64


@dataclass(frozen=True)
class Windows:
    """The cuts of every utterance.

    A window is decoded with frames before and after it as context, as far as the utterance has them. One whose frames
    after it the utterance lacks is the last one: it takes all that is left.

    Attributes:
        sizes: frames of the first, second, ... window, the last for all that follow; none: the utterance is one window.
        past: frames before a window that it is decoded with.
        future: frames after it, likewise.
    """

    sizes: tuple[int, ...]
    past: int = 0
    future: int = 0

    @property
    def largest_step(self) -> int:
        """Most frames that a step takes in."""
        return max(self.sizes[0] + self.future, *self.sizes) if self.sizes else _WHOLE_STEP

    @property
    def most_decoded(self) -> int:
        """Most frames that a window is decoded from, context included. 0: any number."""
        return self.past + max(self.sizes) + self.future if self.sizes else 0

    def size_at(self, start: int) -> int:
        """Frames of the window that begins at frame `start`."""
        for size, end in zip(self.sizes, accumulate(self.sizes), strict=True):
            if start < end:
                return size
        return self.sizes[-1]

    def step_frames(self, taken: int) -> int:
        """Frames of the next step, of a stream that has handed over `taken`: those that its next window lacks."""
        if not self.sizes:
            return _WHOLE_STEP
        start = max(0, taken - self.future)
        return start + self.size_at(start) + self.future - taken

    def decodable(self, frames: int, complete: bool, taken: int) -> int:
        """As `DecoderSpec.decodable`."""
        step = self.step_frames(taken)
        return step if frames >= step else frames if complete else 0

    def check(self, granularity: int) -> None:
        """Raises ValueError, naming the setting, unless sizes and contexts are multiples of `granularity`."""
        for name, frames in {
            "--window-frames": self.sizes,
            "--window-past-frames": (self.past,),
            "--window-future-frames": (self.future,),
        }.items():
            if any(n < 0 or n % granularity for n in frames):
                raise ValueError(f"{name}: {', '.join(map(str, frames))} must be multiples of {granularity}")
        if self.sizes and min(self.sizes) < 1:
            raise ValueError(f"--window-frames: {', '.join(map(str, self.sizes))} must be at least {granularity}")


@dataclass(frozen=True)
class WindowSettings:
    """What a user set; None is the decoder's own choice."""

    decoding: str | None = None
    frames: tuple[int, ...] | None = None
    past: int | None = None
    future: int | None = None

    def over(self, default: Windows) -> Windows:
        """The cuts that these settings make of a decoder's own.

        Raises:
            ValueError: sizes of windows for a decoding without any; names the setting.
        """
        if self.decoding == "whole":
            if self != WindowSettings("whole"):
                raise ValueError(
                    "--decoding whole has no windows: leave out --window-frames and the frames around them"
                )
            return Windows(())
        return Windows(
            default.sizes if self.frames is None else self.frames,
            default.past if self.past is None else self.past,
            default.future if self.future is None else self.future,
        )
