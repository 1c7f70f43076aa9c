"""Decodes many streams in one thread of its own, batch after batch, as `ChunkPolicy` says."""

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

import structlog
import torch

from services.code2wav import metrics
from services.code2wav.family import Decoder
from services.code2wav.policy import ChunkPolicy, StepPlan
from services.code2wav.stream import Event, Failed, Finished, Samples, Stream
from services.common.engine.device import Capturer, make_current
from services.common.engine.process import lower_engine_priority
from services.common.rpc.errors import InternalError, StageError, Unavailable

log = structlog.get_logger()

# Frames of a step that keep its intermediate results in a core's cache: see the figures in `ChunkPolicy`.
CPU_BATCH_FRAMES = 16


class DecodeEngine:
    """Decodes frames of up to `max_streams` streams at a time; streams beyond those wait for a slot in order.

    A stream's first frames are decoded at once, the following in chunks as large as `ChunkPolicy` allows. Public
    methods may be called from any thread.

    Args:
        max_frames_per_step: most frames of a stream in one step.
        lead_margin_ms: see `ChunkPolicy.transport_s`.
        threads: CPU threads of a step; 0 leaves torch's default.
        capturer: captures the steps, before this returns; None: steps run kernel by kernel.
        on_fatal: called in the engine's thread when a step failed; every stream has then been told, and the engine
            takes no more.
    """

    def __init__(
        self,
        decoder: Decoder,
        max_streams: int,
        max_frames_per_step: int,
        lead_margin_ms: float = 100.0,
        threads: int = 0,
        capturer: Capturer | None = None,
        on_fatal: Callable[[Exception], object] = lambda error: None,
    ) -> None:
        self.spec = decoder.spec
        self.decoder = decoder
        self._device = decoder.device
        self._states = decoder.new_states(max_streams)
        self._seconds_per_sample = 1 / self.spec.sample_rate_hz
        max_frames_per_step = max(max_frames_per_step, self.spec.granularity_frames)
        on_cpu = self._device.type == "cpu"
        batch_frames = max(CPU_BATCH_FRAMES, max_frames_per_step) if on_cpu else max_frames_per_step * max_streams
        self._decode = decoder.step
        if capturer is not None:
            self._decode = decoder.captured_step(capturer, self._states, max_frames_per_step)
        self.policy = ChunkPolicy(
            max_frames_per_step, batch_frames, lead_margin_ms / 1000, capturer is not None, self.spec.decodable
        )
        self._threads = threads
        self._on_fatal = on_fatal
        self._changed = threading.Condition()
        self._waiting: deque[Stream] = deque()  # for a slot
        self._running: list[Stream] = []  # have a slot
        self._frames_computed = decoder.frames_computed
        self._stopped: str | None = None
        self._thread = threading.Thread(target=self._run, name="code2wav-engine", daemon=True)
        self._thread.start()

    @property
    def free_slots(self) -> int:
        """Streams that could start now."""
        with self._changed:
            return self._states.free_slots

    @property
    def frames_computed(self) -> int:
        """Frames that went through the decoder, whosever they were."""
        return self.decoder.frames_computed

    @property
    def state_bytes(self) -> int:
        """Memory of all slots."""
        return self._states.slot_bytes * self._states.slots

    def open(
        self,
        emit: Callable[[Event], object],
        on_started: Callable[[], object] = lambda: None,
        pcm16: bool = False,
        voice: str = "",
        seed: int = 0,
    ) -> Stream:
        """A new stream, in line for a slot.

        Args:
            emit: takes its events, Samples, then one Finished or Failed; none once `cancel` has returned. Called from
                whatever thread, under the engine's lock: must not block.
            on_started: called likewise when the stream gets its slot.
            pcm16: samples are round(x * 32768), clipped, int16.
            voice, seed: see `States.open`.

        Raises:
            Unavailable: the engine has stopped or failed.
        """
        stream = Stream(emit, on_started, pcm16, voice, seed)
        with self._changed:
            if self._stopped:
                raise Unavailable(self._stopped)
            self._waiting.append(stream)
            metrics.STREAMS_WAITING.inc()
            self._changed.notify()
        return stream

    def put(self, stream: Stream, codes: torch.Tensor) -> None:
        """Appends frames that `frames.check_codes` has returned: (frames, groups) int64."""
        with self._changed:
            if not stream.ended and len(codes):
                first = not stream.frames_ready
                stream.add(codes)
                metrics.FRAMES_QUEUED.inc(len(codes))
                # Otherwise the engine's thread knows already until when this stream can wait.
                if first or stream.frames_ready >= self.policy.max_frames:
                    self._changed.notify()

    def finish(self, stream: Stream) -> None:
        """No more frames come."""
        with self._changed:
            stream.complete = True
            stream.update_wait()
            self._changed.notify()

    def cancel(self, stream: Stream) -> None:
        """Drops the stream. Its slot is free at once, or after the step it is part of. Harmless after its end."""
        with self._changed:
            self._end(stream)
            self._changed.notify()

    def stop(self) -> None:
        """Fails what is open and ends the thread."""
        self._fail_all(Unavailable("code2wav has stopped"))
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self) -> None:
        make_current(self._device)
        if self._device.type == "cpu":
            lower_engine_priority()
        if self._threads:
            torch.set_num_threads(self._threads)
        try:
            while batch := self._next_batch():
                self._step(*batch)
        except Exception as error:
            log.exception("the engine failed")
            self._fail_all(InternalError("code2wav's engine failed; its log has the details"))
            self._on_fatal(error)

    def _next_batch(self) -> tuple[Sequence[Stream], torch.Tensor | None] | None:
        """Waits for work: the streams of the next step and their codes, (streams, frames, groups), or no codes where
        the streams are to be flushed. None to stop."""
        with self._changed:
            while not self._stopped:
                self._admit()
                self._retire()
                if held_back := [stream for stream in self._running if self._must_flush(stream)]:
                    for stream in held_back:
                        stream.in_step = stream.flushed = True
                    return held_back, None
                plan = self.policy.choose(self._running, time.monotonic())
                if isinstance(plan, StepPlan):
                    streams = [self._running[i] for i in plan.streams]
                    for stream in streams:
                        stream.in_step = True
                    metrics.FRAMES_QUEUED.dec(plan.frames * len(streams))
                    return streams, torch.stack([stream.take(plan.frames) for stream in streams])
                self._changed.wait(plan)
        return None

    def _must_flush(self, stream: Stream) -> bool:
        """Whether all frames of `stream` are decoded but look-ahead holds back the samples of the last ones."""
        decoded_whole = stream.complete and not stream.frames_ready and stream.frames_decoded > 0
        return decoded_whole and not stream.flushed and self.spec.lookahead_frames > 0

    def _admit(self) -> None:
        """Gives free slots to the streams that wait for one."""
        while self._waiting and self._states.free_slots:
            stream = self._waiting.popleft()
            stream.slot = self._states.acquire(stream.voice, stream.seed)
            self._running.append(stream)
            metrics.STREAMS_WAITING.dec()
            metrics.STREAMS_RUNNING.inc()
            stream.on_started()
            stream.update_wait()

    def _retire(self) -> None:
        """Ends the streams that are decoded whole; admits others in their place."""
        for stream in [s for s in self._running if s.complete and not s.frames_ready and not self._must_flush(s)]:
            stream.emit(Finished(stream.frames_decoded, stream.samples_emitted, stream.waited_ms))
            self._end(stream)
        self._admit()

    def _step(self, streams: Sequence[Stream], codes: torch.Tensor | None) -> None:
        """Decodes `codes`, or flushes where there are none, and gives the streams their samples."""
        batch = self._states.batch([stream.slot for stream in streams if stream.slot is not None])
        frames, began = 0 if codes is None else codes.shape[1], time.monotonic()
        decoded = self.decoder.flush(batch) if codes is None else self._decode(codes.to(self._device), batch)
        samples = [piece.float() for piece in decoded]
        pieces = [_pcm16(piece) if s.pcm16 else piece for s, piece in zip(streams, samples, strict=True)]
        with self._changed:
            now = time.monotonic()
            if frames:
                self.policy.stepped(now - began, frames * len(streams))
                self._count_step(now - began, frames, len(streams))
            for stream, piece in zip(streams, pieces, strict=True):
                stream.in_step = False
                if stream.ended:  # cancelled during the step
                    self._release(stream)
                else:
                    self._give(stream, piece, frames, now)

    def _give(self, stream: Stream, piece: torch.Tensor, frames: int, now: float) -> None:
        """Sends a stream the samples of its next `frames` frames."""
        stream.frames_decoded += frames
        first_sample = stream.samples_emitted
        stream.samples_emitted += len(piece)
        lead_s = stream.playback.sent(len(piece) * self._seconds_per_sample, stream.frames_ready, now)
        stream.emit(Samples(piece, first_sample, stream.frames_decoded))
        stream.update_wait()
        metrics.FRAMES_DECODED.inc(frames)
        if lead_s is not None:
            metrics.LEAD.observe(lead_s)
            if lead_s < 0:
                metrics.UNDERRUNS.inc()
                metrics.UNDERRUN_SECONDS.inc(-lead_s)

    def _count_step(self, seconds: float, frames: int, streams: int) -> None:
        metrics.STEP_SECONDS.observe(seconds)
        metrics.STEP_FRAMES.observe(frames)
        metrics.STEP_BATCH.observe(streams)
        computed = self.decoder.frames_computed
        metrics.FRAMES_COMPUTED.inc(computed - self._frames_computed)
        self._frames_computed = computed

    def _end(self, stream: Stream) -> None:
        """Takes a stream out. A running step keeps the slots of its batch until it is done."""
        if stream.ended:
            return
        stream.ended = True
        if stream.slot is None:
            self._waiting.remove(stream)
            metrics.STREAMS_WAITING.dec()
        else:
            self._running.remove(stream)
            metrics.STREAMS_RUNNING.dec()
        metrics.FRAMES_QUEUED.dec(stream.frames_ready)
        if not stream.in_step:
            self._release(stream)

    def _release(self, stream: Stream) -> None:
        if stream.slot is not None:
            self._states.release(stream.slot)
            stream.slot = None

    def _fail_all(self, error: StageError) -> None:
        with self._changed:
            if not self._stopped:
                self._stopped = str(error)
            for stream in [*self._waiting, *self._running]:
                stream.emit(Failed(error))
                self._end(stream)
            self._changed.notify()


def _pcm16(samples: torch.Tensor) -> torch.Tensor:
    return (samples * 32768).round().clamp(-32768, 32767).to(torch.int16)
