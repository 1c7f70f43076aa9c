"""Decodes batches of streams in a thread; `ChunkPolicy` chooses each batch."""

import time
from collections import deque
from collections.abc import Callable, Sequence

import structlog
import torch
from prometheus_client import Counter, Gauge, Histogram

from services.code2wav.family import Decoder
from services.code2wav.policy import ChunkPolicy, StepPlan, dry_since
from services.code2wav.stream import DecodeEnd, Event, Samples, Stream
from services.common.engine.device import Capturer
from services.common.engine.thread import ThreadedEngine
from services.common.errors import StageError
from services.common.telemetry import metrics

LEAD = Histogram(
    "quartet_code2wav_lead_seconds",
    "Audio sent but not yet played when the next chunk leaves, for a player that began with the first; "
    "below 0: how long it was silent",
    buckets=(-1.0, -0.5, -0.1, -0.05, 0.0, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0),
)
UNDERRUNS = Counter("quartet_code2wav_underruns_total", "Chunks that left after playback had run dry")
UNDERRUN_SECONDS = Counter("quartet_code2wav_underrun_seconds_total", "Silence before those chunks")
FRAMES_QUEUED = Gauge("quartet_code2wav_frames_queued", "Codec frames taken in and not yet decoded, of all streams")
STREAMS_RUNNING = Gauge("quartet_code2wav_streams_running", "Streams that have a slot")
STREAMS_WAITING = Gauge("quartet_code2wav_streams_waiting", "Streams that wait for a slot")
FRAMES_DECODED = Counter("quartet_code2wav_frames_decoded_total", "Codec frames whose samples were given out")
FRAMES_COMPUTED = Counter(
    "quartet_code2wav_frames_computed_total",
    "Codec frames that went through the decoder, those of cancelled streams and of padding included",
)
STEP_FRAMES = Histogram(
    "quartet_code2wav_step_frames", "Codec frames of each stream in a step", buckets=(1, 2, 4, 8, 16, 32, 64)
)
STEP_SECONDS = metrics.STEP_SECONDS.labels("code2wav", "decode")
STEP_BATCH = metrics.STEP_BATCH.labels("code2wav", "decode")

log = structlog.get_logger()

# Frames of a step whose intermediate results fit a core's cache: see the table in `ChunkPolicy`.
CPU_BATCH_FRAMES = 16
# Audio that a listener still has when a chunk leaves, beside the time of decoding: the way to the listener.
LEAD_MARGIN_MS = 100.0


class DecodeEngine(ThreadedEngine):
    """Decodes up to `max_streams` streams at a time; others wait in order. Thread-safe.

    Args:
        max_frames_per_step: of one stream.
        lead_margin_ms: see `ChunkPolicy.transport_s`.
        capturer: captures the steps in the constructor; None: eager steps.
        on_fatal: see `ThreadedEngine`.
    """

    def __init__(
        self,
        decoder: Decoder,
        max_streams: int,
        max_frames_per_step: int,
        lead_margin_ms: float = LEAD_MARGIN_MS,
        capturer: Capturer | None = None,
        on_fatal: Callable[[BaseException], object] = lambda error: None,
    ) -> None:
        super().__init__("code2wav", decoder.device, on_fatal)
        self.decoder, self.spec = decoder, decoder.spec
        self._states = decoder.new_states(max_streams)
        log.info("state is reserved", slots=max_streams, state_bytes=self._states.slot_bytes * max_streams)
        windows = self.spec.windows
        least = self.spec.granularity_frames if windows is None else windows.largest_step
        max_frames_per_step = max(max_frames_per_step, least)
        on_cpu = self._device.type == "cpu"
        batch_frames = max(CPU_BATCH_FRAMES, max_frames_per_step) if on_cpu else max_frames_per_step * max_streams
        self._decode = decoder.captured_step(capturer, self._states, max_frames_per_step) if capturer else decoder.step
        self.policy = ChunkPolicy(
            max_frames_per_step,
            batch_frames,
            lead_margin_ms / 1000,
            powers_of_two=capturer is not None and windows is None,
            decodable=self.spec.decodable,
            in_windows=windows is not None,
        )
        # With windows or granularity any frame may complete the next step.
        self._steps_are_given = windows is not None or self.spec.granularity_frames > 1
        self._waiting: deque[Stream] = deque()  # for a slot
        self._running: list[Stream] = []  # have a slot
        STREAMS_WAITING.set_function(lambda: len(self._waiting))
        STREAMS_RUNNING.set_function(lambda: len(self._running))
        FRAMES_QUEUED.set_function(lambda: sum(stream.frames_ready for stream in [*self._waiting, *self._running]))
        self._thread.start()

    def open(
        self,
        emit: Callable[[Event], object],
        on_started: Callable[[], object] = lambda: None,
        pcm16: bool = False,
        voice: str = "",
        seed: int = 0,
    ) -> Stream:
        """Creates a stream and queues it for a slot. The callbacks run on any thread under the engine's lock and must
        not block.

        Args:
            emit: takes Samples, then one DecodeEnd or an error, until `cancel`.
            on_started: called when the stream gets its slot.
            pcm16: samples are round(x * 32768), clipped, int16.
            voice, seed: see `DecoderStates.open`.

        Raises:
            Unavailable: the engine failed or is stopped.
        """
        stream = Stream(emit, on_started, pcm16, voice, seed)
        with self.changed:
            self._check_running()
            self._waiting.append(stream)
            self.changed.notify()
        return stream

    def begin(self, stream: Stream, prompt_frames: int) -> None:
        """Marks the first `prompt_frames` frames as prompt, before any is put. Their samples are dropped."""
        with self.changed:
            stream.prompt_frames = prompt_frames
            stream.samples_to_drop = max(0, prompt_frames * self.spec.samples_per_frame - self.spec.trimmed_samples)

    def put(self, stream: Stream, codes: torch.Tensor) -> None:
        """Appends checked frames, (frames, groups) int64. See `check_codes`."""
        with self.changed:
            if not stream.ended and len(codes):
                first = not stream.frames_ready
                stream.add(codes)
                # Otherwise the engine's thread already knows how long this stream can wait.
                if first or self._steps_are_given or stream.frames_ready >= self.policy.max_frames:
                    self.changed.notify()

    def finish(self, stream: Stream) -> None:
        with self.changed:
            stream.complete = True
            stream.update_wait()
            self.changed.notify()

    def cancel(self, stream: Stream) -> None:
        """Drops the stream. Its slot is free after the running step. Harmless after its end."""
        with self.changed:
            self._end(stream)
            self.changed.notify()

    def _work(self) -> None:
        if batch := self._next_batch():
            self._step(*batch)

    def _next_batch(self) -> tuple[Sequence[Stream], torch.Tensor | None] | None:
        """Waits for the next streams and their codes, (streams, frames, groups) or None for a flush. None: stop."""
        with self.changed:
            while not self._stopping:
                self._admit()
                self._retire()
                now = time.monotonic()
                plan = self.policy.choose(self._running, now)
                if held_back := self._to_flush(plan, now):
                    for stream in held_back:
                        stream.in_step = stream.flushed = True
                    return held_back, None
                if isinstance(plan, StepPlan):
                    streams = [self._running[i] for i in plan.streams]
                    for stream in streams:
                        stream.in_step = True
                    return streams, torch.stack([stream.take(plan.frames) for stream in streams])
                self.changed.wait(plan)
        return None

    def _to_flush(self, plan: StepPlan | float | None, now: float) -> list[Stream]:
        """The streams to flush before `plan`; none if one of the plan runs dry earlier. With windows a flush takes as
        long as a step, so their number is limited."""
        held_back = sorted((s for s in self._running if self._must_flush(s)), key=lambda stream: dry_since(stream, now))
        if not held_back or not self.spec.windows:
            return held_back
        if isinstance(plan, StepPlan) and dry_since(self._running[plan.streams[0]], now) < dry_since(held_back[0], now):
            return []
        most = 1 if self.spec.decodes_whole else max(1, self.policy.max_batch_frames // self.policy.max_frames)
        return held_back[:most]

    def _must_flush(self, stream: Stream) -> bool:
        """Whether all frames of `stream` are decoded but look-ahead holds its last samples back."""
        decoded_whole = stream.complete and not stream.frames_ready and stream.frames_decoded > 0
        return decoded_whole and not stream.flushed and self.spec.lookahead_frames > 0

    def _admit(self) -> None:
        while self._waiting and self._states.free_slots:
            stream = self._waiting.popleft()
            stream.slot = self._states.acquire(stream.voice, stream.seed)
            self._running.append(stream)
            stream.on_started()
            stream.update_wait()

    def _retire(self) -> None:
        for stream in [s for s in self._running if s.complete and not s.frames_ready and not self._must_flush(s)]:
            stream.emit(DecodeEnd(stream.frames_given, stream.samples_emitted, stream.waiting.waited_ms))
            self._end(stream)
        self._admit()

    def _step(self, streams: Sequence[Stream], codes: torch.Tensor | None) -> None:
        batch = self._states.batch([stream.slot for stream in streams if stream.slot is not None])
        frames = 0 if codes is None else codes.shape[1]
        computed, began = self.decoder.frames_computed, time.monotonic()
        decoded = self.decoder.flush(batch) if codes is None else self._decode(codes.to(self._device), batch)
        FRAMES_COMPUTED.inc(self.decoder.frames_computed - computed)
        samples = [piece.float() for piece in decoded]
        pieces = [_pcm16(piece) if s.pcm16 else piece for s, piece in zip(streams, samples, strict=True)]
        with self.changed:
            now = time.monotonic()
            if frames:
                self.policy.stepped(now - began, frames * len(streams))
                STEP_SECONDS.observe(now - began)
                STEP_FRAMES.observe(frames)
                STEP_BATCH.observe(len(streams))
            for stream, piece in zip(streams, pieces, strict=True):
                stream.in_step = False
                if stream.ended:  # cancelled during the step
                    self._release(stream)
                else:
                    self._give(stream, piece, frames, now)

    def _give(self, stream: Stream, piece: torch.Tensor, frames: int, now: float) -> None:
        given = stream.frames_given
        stream.frames_decoded += frames
        piece = stream.without_prompt(piece)
        first_sample = stream.samples_emitted
        stream.samples_emitted += len(piece)
        lead_s = stream.playback.sent(len(piece) / self.spec.sample_rate_hz, stream.frames_ready, now)
        stream.emit(Samples(piece, first_sample, stream.frames_given, frames))
        stream.update_wait()
        FRAMES_DECODED.inc(stream.frames_given - given)
        if lead_s is not None:
            LEAD.observe(lead_s)
            if lead_s < 0:
                UNDERRUNS.inc()
                UNDERRUN_SECONDS.inc(-lead_s)

    def _end(self, stream: Stream) -> None:
        """Removes a stream. A running step keeps the slots of its batch."""
        if stream.ended:
            return
        stream.ended = True
        if stream.slot is None:
            self._waiting.remove(stream)
        else:
            self._running.remove(stream)
        if not stream.in_step:
            self._release(stream)

    def _release(self, stream: Stream) -> None:
        if stream.slot is not None:
            self._states.release(stream.slot)
            stream.slot = None

    def _end_all(self, error: StageError) -> None:
        with self.changed:
            for stream in [*self._waiting, *self._running]:
                stream.emit(error)
                self._end(stream)


def _pcm16(samples: torch.Tensor) -> torch.Tensor:
    return (samples * 32768).round().clamp(-32768, 32767).to(torch.int16)
