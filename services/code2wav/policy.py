"""Which streams decode how many frames next: large chunks while the listener has sound, small ones before it runs out.

Pure Python; the clock is passed in, so that every decision can be tested.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol


@dataclass
class Playback:
    """What a real-time player at the other end has: it begins with the first samples, stalls when it runs dry and goes
    on with the next ones. Times are seconds of one monotonic clock."""

    runs_dry_at: float | None = None
    """When the samples sent so far will have been played; None before the first."""
    waits_since: float | None = None
    """When the oldest frame that is not decoded arrived; None if there is none."""
    last_arrival: float | None = None
    arrival_interval_s: float | None = None
    """Seconds between frames, averaged with weight 1/8 for the newest; None before the second."""

    def arrived(self, frames: int, now: float, paced: bool = True) -> None:
        """`frames` frames (at least 1) came in. `paced`: others will follow as these did."""
        if paced and self.last_arrival is not None:
            interval_s = (now - self.last_arrival) / frames
            mean_s = interval_s if self.arrival_interval_s is None else self.arrival_interval_s
            self.arrival_interval_s = mean_s + (interval_s - mean_s) * _MEAN_GAIN
        if paced:
            self.last_arrival = now
        if self.waits_since is None:
            self.waits_since = now

    def sent(self, audio_s: float, frames_left: int, now: float) -> float | None:
        """Counts samples that leave now; `frames_left` frames are still to be decoded.

        Returns:
            The lead over playback before them, in seconds; negative: for how long there was silence. None for the
            first samples.
        """
        lead_s = None if self.runs_dry_at is None else self.runs_dry_at - now
        if audio_s:
            self.runs_dry_at = max(now, self.runs_dry_at or now) + audio_s
        self.waits_since = now if frames_left else None
        return lead_s


class Paced(Protocol):
    """A stream, as the policy sees it."""

    frames_ready: int
    frames_decoded: int
    """Frames of the steps that it was part of."""
    complete: bool
    """No more frames come."""
    playback: Playback

    @property
    def prompt_left(self) -> int:
        """Of the next frames, how many nobody hears."""
        ...


@dataclass(frozen=True)
class StepPlan:
    """The next step: `frames` frames of each of `streams` (indices into what was given)."""

    frames: int
    streams: list[int]


# RFC 6298, section 2: how TCP tracks a time that varies. Mean with gain 1/8, deviation with gain 1/4, bound mean + 4
# deviations.
_MEAN_GAIN, _DEVIATION_GAIN, _DEVIATIONS = 1 / 8, 1 / 4, 4


@dataclass
class ChunkPolicy:
    """Decides what a step decodes.

    A stream is *due* at once with its first frame, with `max_frames` ready frames, and when its input is complete.
    Otherwise it waits for more frames until its lead over playback is down to the margin, or until no further frame is
    expected before that. The margin is what may pass before its samples reach the listener: a running step, the
    decoding of everything that is ready (both as measured), and `transport_s`. So a stream whose talker is slower than
    playback never has a lead, and its frames are decoded as they come. Of the due streams, those nearest to running
    dry go first; a stream that has not begun counts as dry since its first frame came.

    Where a decoder cuts utterances into windows, the sizes of a stream's steps are given: each is due once it is there.

    A stream's first chunk is one frame, or the few that the decoder takes at a time. Before it come the frames of a
    prompt, which nobody hears and no playback waits for: at once, and as many at a time as a step takes.

    A step is a rectangle of frames x streams: of those that the most urgent stream can be part of, the one with the
    most frames, as a step costs a fixed time plus a time per frame. A stream joins if the step takes at least half of
    what it has ready: being cut into crumbs would cost more messages than it saves.

    Why chunks are large, and why on a CPU a step of more than 16 frames gains nothing and only lets others wait:
    milliseconds per frame of audio, one core with AVX-512, float32, the checkpoint of `quartet tiny`, eager:

        frames of each stream    1     2     4     8     16    25
        1 stream                 2.14  1.51  1.21  0.93  0.74  0.69
        8 streams                1.13  0.85  0.68  0.67  0.68  0.69
        32 streams               0.81  0.71  0.68  0.71  0.71  0.73

    (`python -m benchmarks.code2wav_steps MODEL` prints this table.)
    """

    max_frames: int
    """Most frames of one stream in a step."""
    max_batch_frames: int
    """Most frames of all streams in a step."""
    transport_s: float
    """What to allow for the way of the samples from here to the listener's ear, beside the steps."""
    powers_of_two: bool = False
    """Whether chunks are 1, 2, 4, 8... frames, for steps that are captured per size."""
    decodable: Callable[[int, bool, int], int] = lambda frames, complete, taken: frames
    """Of a stream's next frames, how many a step may take, given whether no more will follow and how many it has had:
    see `DecoderSpec`."""
    in_windows: bool = False
    """Whether the size of a stream's next step is given: it is due once its frames are there, as waiting would not make
    it larger."""
    _step_s: float = field(default=0.0, init=False)
    _step_deviation_s: float = field(default=0.0, init=False)
    _step_frames: float = field(default=0.0, init=False)

    def stepped(self, seconds: float, frames: int) -> None:
        """Learns from a step that decoded `frames` frames, of all streams together."""
        if not self._step_frames:
            self._step_s, self._step_deviation_s, self._step_frames = seconds, seconds / 2, frames
            return
        error = seconds - self._step_s
        self._step_deviation_s += (abs(error) - self._step_deviation_s) * _DEVIATION_GAIN
        self._step_s += error * _MEAN_GAIN
        self._step_frames += (frames - self._step_frames) * _MEAN_GAIN

    def margin_s(self, frames_ready: int) -> float:
        """The least lead to keep while `frames_ready` frames of all streams wait to be decoded."""
        longest_step_s = self._step_s + _DEVIATIONS * self._step_deviation_s
        frame_cost_s = self._step_s / self._step_frames if self._step_frames else 0.0
        return self.transport_s + longest_step_s + frames_ready * frame_cost_s

    def due_at(self, stream: Paced, margin_s: float) -> float | None:
        """When `stream` should be decoded, as it is now; in the past or 0 for at once. None: it cannot be."""
        if not self.decodable(stream.frames_ready, stream.complete, stream.frames_decoded):
            return None
        playback = stream.playback
        if self.in_windows or stream.complete or stream.frames_ready >= self.max_frames or playback.runs_dry_at is None:
            return 0.0
        due = playback.runs_dry_at - margin_s
        if playback.last_arrival is not None and playback.last_arrival + (playback.arrival_interval_s or 0.0) > due:
            return 0.0  # waiting would bring no frame
        return due

    def choose(self, streams: Sequence[Paced], now: float) -> StepPlan | float | None:
        """The next step; or the seconds until one is due if no frame comes; or None if only a frame can change that."""
        margin_s = self.margin_s(sum(stream.frames_ready for stream in streams))
        times = {i: at for i, stream in enumerate(streams) if (at := self.due_at(stream, margin_s)) is not None}
        due = [i for i, at in times.items() if at <= now]
        if not due:
            return min(times.values()) - now if times else None
        due.sort(key=lambda i: dry_since(streams[i], now))
        return self._rectangle(streams, due)

    def _rectangle(self, streams: Sequence[Paced], due: list[int]) -> StepPlan:
        """The largest step with the first of `due` in it; of equal ones the one with the most frames a stream."""
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

    def _takes(self, stream: Paced) -> int:
        """Most frames of `stream` that may be decoded now."""
        if stream.playback.runs_dry_at is None:
            prompt = self._in_step(stream, stream.prompt_left) if stream.prompt_left else 0
            return prompt or next(frames for frames in itertools.count(1) if self._may_take(stream, frames))
        return self._in_step(stream, stream.frames_ready)

    def _in_step(self, stream: Paced, most: int) -> int:
        """Frames of `stream`, up to `most` (at least 1), of the largest step; 0 if the decoder takes more at a time."""
        frames = min(most, stream.frames_ready, self.max_frames, self.max_batch_frames)
        if self.powers_of_two:
            frames = 1 << (frames.bit_length() - 1)
        return self._decodable(stream, frames)

    def _may_take(self, stream: Paced, frames: int) -> bool:
        """Whether a step may decode exactly that many frames of `stream`."""
        return self._decodable(stream, frames) == frames

    def _decodable(self, stream: Paced, frames: int) -> int:
        """Of the next `frames` frames of `stream`, how many a step may take."""
        return self.decodable(frames, stream.complete and frames == stream.frames_ready, stream.frames_decoded)


def dry_since(stream: Paced, now: float) -> float:
    """When the listener of `stream` had, or will have, nothing left to play: the least goes first."""
    playback = stream.playback
    if playback.runs_dry_at is not None:
        return playback.runs_dry_at
    return now if playback.waits_since is None else playback.waits_since
