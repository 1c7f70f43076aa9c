"""Chooses the streams and frames of the next step. Pure Python; the caller passes the time."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol


@dataclass
class PlaybackEstimate:
    """A real-time player. Times are seconds of one monotonic clock."""

    runs_dry_at: float | None = None
    """End of the sent samples' playback; None before the first."""
    waits_since: float | None = None
    """Arrival of the oldest undecoded frame."""
    last_arrival: float | None = None
    arrival_interval_s: float | None = None
    """Seconds between frames, a moving average; None before the second."""

    def arrived(self, frames: int, now: float, paced: bool = True) -> None:
        """Counts `frames` new frames (at least 1). `paced`: later frames will follow at this rate."""
        if paced and self.last_arrival is not None:
            interval_s = (now - self.last_arrival) / frames
            mean_s = interval_s if self.arrival_interval_s is None else self.arrival_interval_s
            self.arrival_interval_s = mean_s + (interval_s - mean_s) * _MEAN_GAIN
        if paced:
            self.last_arrival = now
        if self.waits_since is None:
            self.waits_since = now

    def sent(self, audio_s: float, frames_left: int, now: float) -> float | None:
        """Counts samples that leave now, with `frames_left` frames still to decode. Returns the lead over playback
        before them, in seconds; below 0: silence. None for the first samples."""
        lead_s = None if self.runs_dry_at is None else self.runs_dry_at - now
        if audio_s:
            self.runs_dry_at = max(now, self.runs_dry_at or now) + audio_s
        self.waits_since = now if frames_left else None
        return lead_s


class StreamView(Protocol):
    """The policy's view of a stream: see `services.code2wav.stream.Stream`."""

    frames_ready: int
    frames_decoded: int
    complete: bool
    playback: PlaybackEstimate

    @property
    def prompt_left(self) -> int: ...


@dataclass(frozen=True)
class StepPlan:
    """`frames` frames of each stream in `streams`, a list of indices."""

    frames: int
    streams: list[int]


# TCP's estimate of a varying time (RFC 6298, section 2): mean + 4 deviations.
_MEAN_GAIN, _DEVIATION_GAIN, _DEVIATIONS = 1 / 8, 1 / 4, 4


@dataclass
class ChunkPolicy:
    """Chooses large chunks while the listener has sound, and small ones before it runs out.

    A stream is *due* with its first frame, with `max_frames` ready frames, and when its input is complete. Otherwise it
    waits until its lead over playback falls to the margin, or until no frame is expected before that. The margin covers
    a running step, the decoding of all ready frames (both measured), and `transport_s`. Windows fix the size of a step,
    which is due once its frames are there.

    A stream's first chunk is one frame, or the decoder's granularity. Prompt frames come before it, as many as fit a
    step.

    A step is a rectangle of frames x streams: the largest one that includes the due stream that runs dry first. A
    stream joins if the step takes at least half of its ready frames, as small chunks cost messages.

    Milliseconds per frame of audio, one core with AVX-512, float32, the checkpoint of `quartet tiny`, eager. On a CPU a
    step of more than 16 frames gains nothing and delays other streams:

        frames of each stream    1     2     4     8     16    25
        1 stream                 2.14  1.51  1.21  0.93  0.74  0.69
        8 streams                1.13  0.85  0.68  0.67  0.68  0.69
        32 streams               0.81  0.71  0.68  0.71  0.71  0.73

    (`python -m benchmarks.code2wav_steps MODEL` prints this table.)
    """

    max_frames: int
    """Of one stream in a step."""
    max_batch_frames: int
    """Of all streams in a step."""
    transport_s: float
    """Time of the samples from here to the listener."""
    powers_of_two: bool = False
    """Whether chunks are 1, 2, 4, 8... frames, for captured steps."""
    decodable: Callable[[int, bool, int], int] = lambda frames, complete, taken: frames
    """See `DecoderSpec.decodable`."""
    in_windows: bool = False
    """Whether windows fix the size of steps."""
    _step_s: float = field(default=0.0, init=False)
    _step_deviation_s: float = field(default=0.0, init=False)
    _step_frames: float = field(default=0.0, init=False)

    def stepped(self, seconds: float, frames: int) -> None:
        """Records the duration of a step of `frames` frames in all."""
        if not self._step_frames:
            self._step_s, self._step_deviation_s, self._step_frames = seconds, seconds / 2, frames
            return
        error = seconds - self._step_s
        self._step_deviation_s += (abs(error) - self._step_deviation_s) * _DEVIATION_GAIN
        self._step_s += error * _MEAN_GAIN
        self._step_frames += (frames - self._step_frames) * _MEAN_GAIN

    def margin_s(self, frames_ready: int) -> float:
        """The least lead while `frames_ready` frames of all streams wait."""
        longest_step_s = self._step_s + _DEVIATIONS * self._step_deviation_s
        frame_cost_s = self._step_s / self._step_frames if self._step_frames else 0.0
        return self.transport_s + longest_step_s + frames_ready * frame_cost_s

    def due_at(self, stream: StreamView, margin_s: float) -> float | None:
        """When `stream` is due; 0 or past: at once. None: it cannot be decoded."""
        if not self.decodable(stream.frames_ready, stream.complete, stream.frames_decoded):
            return None
        playback = stream.playback
        if self.in_windows or stream.complete or stream.frames_ready >= self.max_frames or playback.runs_dry_at is None:
            return 0.0
        due = playback.runs_dry_at - margin_s
        if playback.last_arrival is not None and playback.last_arrival + (playback.arrival_interval_s or 0.0) > due:
            return 0.0  # waiting would bring no frame
        return due

    def choose(self, streams: Sequence[StreamView], now: float) -> StepPlan | float | None:
        """The next step, or the seconds until one is due without new frames, if one will be."""
        margin_s = self.margin_s(sum(stream.frames_ready for stream in streams))
        times = {i: at for i, stream in enumerate(streams) if (at := self.due_at(stream, margin_s)) is not None}
        due = [i for i, at in times.items() if at <= now]
        if not due:
            return min(times.values()) - now if times else None
        due.sort(key=lambda i: dry_since(streams[i], now))
        return self._rectangle(streams, due)

    def _rectangle(self, streams: Sequence[StreamView], due: list[int]) -> StepPlan:
        """The largest step that includes the first of `due`; of equal ones the longest."""
        ready = [self._takes(streams[i]) for i in due]
        best = StepPlan(0, [])
        for frames in sorted({min(ready[0], r) for r in ready}, reverse=True):
            if 2 * frames < ready[0]:
                break
            if not self._may_take(streams[due[0]], frames):
                continue
            members = [i for i, r in zip(due, ready, strict=True) if frames <= r <= 2 * frames]
            members = [i for i in members if self._may_take(streams[i], frames)]
            members = members[: max(1, self.max_batch_frames // frames)]
            if frames * len(members) > best.frames * len(best.streams):
                best = StepPlan(frames, members)
        return best

    def _takes(self, stream: StreamView) -> int:
        """Most frames of `stream` in a step now."""
        if stream.playback.runs_dry_at is None:
            prompt = self._in_step(stream, stream.prompt_left) if stream.prompt_left else 0
            return prompt or next(frames for frames in itertools.count(1) if self._may_take(stream, frames))
        return self._in_step(stream, stream.frames_ready)

    def _in_step(self, stream: StreamView, most: int) -> int:
        """Most frames of `stream`, up to `most`, in a step; 0 if the decoder needs more."""
        frames = min(most, stream.frames_ready, self.max_frames, self.max_batch_frames)
        if self.powers_of_two:
            frames = 1 << (frames.bit_length() - 1)
        return self._decodable(stream, frames)

    def _may_take(self, stream: StreamView, frames: int) -> bool:
        return self._decodable(stream, frames) == frames

    def _decodable(self, stream: StreamView, frames: int) -> int:
        return self.decodable(frames, stream.complete and frames == stream.frames_ready, stream.frames_decoded)


def dry_since(stream: StreamView, now: float) -> float:
    """When the listener of `stream` runs out of sound. The least goes first."""
    playback = stream.playback
    if playback.runs_dry_at is not None:
        return playback.runs_dry_at
    return now if playback.waits_since is None else playback.waits_since
