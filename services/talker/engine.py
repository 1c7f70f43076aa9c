"""Continuous batching: a thread that makes one codec frame for every request that has text, step after step."""

import asyncio
import heapq
from collections import deque
from collections.abc import Callable
from dataclasses import replace

import torch
from prometheus_client import Counter, Gauge

from services.common.engine.device import Staging
from services.common.engine.thread import ThreadedEngine
from services.common.errors import InvalidInput, StageError, require
from services.common.stream.frames_in_flight import FRAMES_IN_FLIGHT
from services.common.telemetry import metrics
from services.talker.attention import PromptChunk
from services.talker.runner import Advance, StepInput, TalkerRunner
from services.talker.speech import End, Speech, SpeechRequest

REQUESTS_WAITING = Gauge("quartet_talker_requests_waiting", "Requests that wait for a slot")
REQUESTS_RUNNING = Gauge("quartet_talker_requests_running", "Requests that have a slot")
REQUESTS_PARKED = Gauge(
    "quartet_talker_requests_parked",
    "Requests with a slot that cannot have a frame now, by what they wait for: the thinker's next token (text), or "
    "their consumer (consumer)",
    ["reason"],
)
FRAMES = Counter("quartet_talker_frames_total", "Codec frames made")
PREFILL_POSITIONS = Counter("quartet_talker_prefill_positions_total", "Prompt positions run")
STEP_SECONDS = metrics.STEP_SECONDS.labels("talker", "frame")  # prefill not counted
STEP_BATCH = metrics.STEP_BATCH.labels("talker", "frame")
KV_CACHE_USED = metrics.KV_CACHE_USED.labels("talker")

# Of prompts, between two frames: long prompts do not hold up frames. A GPU takes some 9 ms to launch the 900 kernels of
# a piece, however short it is.
PREFILL_CHUNK_POSITIONS = 512
GPU_PREFILL_CHUNK_POSITIONS = 2048

_Output = tuple[Speech, torch.Tensor | End | StageError]


class TalkerEngine(ThreadedEngine):
    """Speaks many answers at a time.

    A step admits new requests to free slots, runs a bounded piece of the waiting prompts, then makes a frame of every
    request that has its next text. A request whose text is late keeps its slot and sits out.

    Args:
        prefill_chunk: most prompt positions of a step, of all prompts; None: the device's constant.
        max_frames_ahead: unread frames of a request after which it stands still.
        on_fatal: see `ThreadedEngine`.
    """

    def __init__(
        self,
        runner: TalkerRunner,
        prefill_chunk: int | None = None,
        max_frames_ahead: int = FRAMES_IN_FLIGHT,
        on_fatal: Callable[[BaseException], object] = lambda error: None,
    ) -> None:
        super().__init__("talker", runner.model.device, on_fatal)
        self.spec, self.runner = runner.model.spec, runner
        on_cpu = self._device.type == "cpu"
        self._prefill_chunk = prefill_chunk or (PREFILL_CHUNK_POSITIONS if on_cpu else GPU_PREFILL_CHUNK_POSITIONS)
        self._max_frames_ahead = max_frames_ahead
        self._staging = Staging(runner.model.device)
        self._waiting: deque[Speech] = deque()  # guarded by `changed`
        self._running: list[Speech] = []
        self._free = list(range(runner.slots))
        self._loop = asyncio.get_running_loop()
        REQUESTS_WAITING.set_function(lambda: len(self._waiting))
        REQUESTS_RUNNING.set_function(lambda: len(self._running))
        KV_CACHE_USED.set_function(self._kv_cache_used)
        self._thread.start()

    def _kv_cache_used(self) -> float:
        return sum(speech.length for speech in self._running) / (self.runner.slots * self.runner.positions)

    def submit(self, request: SpeechRequest) -> Speech:
        """Queues `request`. Call on the event loop.

        Raises:
            InvalidInput: it has no text, or does not fit a slot.
            Unavailable: the engine failed or is stopped.
        """
        after_text = request.prompt.after_text or self.spec.after_text
        speech = Speech(self.changed, request, self._most_frames(request), after_text)
        with self.changed:
            self._check_running()
            self._waiting.append(speech)
            self.changed.notify()
        return speech

    def _most_frames(self, request: SpeechRequest) -> int:
        length, capacity = len(request.prompt), self.runner.positions
        require(request.text.ids, "token_ids", "there is no answer to speak")
        require(length <= capacity, "token_ids", f"the prompt takes {length} positions; this talker has {capacity}")
        return min(request.sampling.max_frames, capacity - length + 1)  # the last frame needs no step after it

    # What follows runs in the engine's thread.

    def _has_work(self) -> bool:
        if self._waiting and (self._free or any(speech.cancelled for speech in self._waiting)):
            return True
        return any(speech.cancelled or speech.rows is not None or self._is_runnable(speech) for speech in self._running)

    def _is_runnable(self, speech: Speech) -> bool:
        """Whether it can have a frame once its prompt is run."""
        has_room = speech.frames_made - speech.frames_read < self._max_frames_ahead
        return has_room and (speech.has_state or speech.text_ready)

    def _work(self) -> None:
        outputs: list[_Output] = []
        with self.changed:
            self.changed.wait_for(lambda: self._stopping or self._has_work())
            if self._stopping:
                return
            self._drop_cancelled()
        while self._free and self._waiting:
            self._admit(self._waiting[0], outputs)
            with self.changed:
                self._waiting.popleft()  # not before: were the engine to fail at it, its caller would wait for ever
        self._prefill()
        self._speak(outputs)
        if outputs:
            self._deliver(outputs)

    def _drop_cancelled(self) -> None:
        self._waiting = deque(speech for speech in self._waiting if not speech.cancelled)
        for speech in [speech for speech in self._running if speech.cancelled]:
            self._release(speech)

    def _release(self, speech: Speech) -> None:
        self._running.remove(speech)
        speech.rows = None
        heapq.heappush(self._free, speech.slot)

    def _admit(self, speech: Speech, outputs: list[_Output]) -> None:
        """Gives `speech` the lowest free slot and embeds its prompt. It alone fails if states are not finite."""
        request, prompt = speech.request, speech.request.prompt
        request.timings.mark_started()
        rows = self.runner.model.embed(prompt, self._staging)
        if prompt.states is not None:
            if not rows.isfinite().all():  # in the cache, they would spoil the slot's next requests
                outputs.append((speech, InvalidInput(prompt.states.name, "must be finite numbers")))
                return
            # The states may be the thinker's memory, which waits to be used again.
            speech.request = replace(request, prompt=replace(prompt, states=None))
        speech.rows, speech.rope_position = rows, int(prompt.positions.max()) + 1
        speech.slot = heapq.heappop(self._free)
        self.runner.assign(speech.slot, request.sampling)
        self._running.append(speech)

    def _prefill(self) -> None:
        """Runs the oldest waiting prompts in one pass, as much as a step may take."""
        chunks, done, room = [], [], self._prefill_chunk
        for speech in self._running:
            if speech.rows is None or not room:
                continue
            begin, total = speech.prefilled, len(speech.rows)
            end = min(begin + room, total)
            positions = speech.request.prompt.positions[begin:end]
            chunks.append(PromptChunk(speech.slot, begin, end, speech.rows[begin:end], positions))
            room -= end - begin
            speech.prefilled = speech.length = end
            if end == total:
                speech.rows, speech.has_state = None, True
                done.append(speech)
        if chunks:
            self.runner.prefill(chunks)
            PREFILL_POSITIONS.inc(self._prefill_chunk - room)
        for speech in done:
            speech.request.timings.mark_prefilled()

    def _speak(self, outputs: list[_Output]) -> None:
        """Makes a frame of every request that can have one; ends those that are done."""
        speaking = self._runnable()
        if not speaking:
            return
        self._compact(speaking)
        with STEP_SECONDS.time():
            frames = self.runner.step([self._step_input(speech) for speech in speaking])
        STEP_BATCH.observe(len(speaking))
        for speech, frame, code in zip(speaking, frames, frames[:, 0].tolist(), strict=True):
            speech.has_state = False
            end: End | None = "stop" if code in self.spec.end_codes else None
            if not end:
                outputs.append((speech, frame))
                FRAMES.inc()
                with self.changed:
                    speech.frames_made += 1
                if speech.frames_made >= speech.most_frames:
                    end = "length"
            if end:
                outputs.append((speech, end))
                self._release(speech)

    def _runnable(self) -> list[Speech]:
        """Requests that can have a frame now. Starts the clock of those whose text is late."""
        runnable, no_text, no_reader = [], 0, 0
        with self.changed:
            for speech in self._running:
                if speech.rows is not None:
                    continue
                if self._is_runnable(speech):
                    runnable.append(speech)
                elif speech.has_state or speech.text_ready:
                    no_reader += 1
                else:
                    no_text += 1
                    speech.waiting.set(True)
        REQUESTS_PARKED.labels("text").set(no_text)
        REQUESTS_PARKED.labels("consumer").set(no_reader)
        return runnable

    def _compact(self, speaking: list[Speech]) -> None:
        """Moves requests from high slots to free low ones where that halves a step."""
        while self._free:
            last = max(speaking, key=lambda speech: speech.slot)
            if last.slot < 2 * len(self._running) or self._free[0] > last.slot:
                return
            target = heapq.heapreplace(self._free, last.slot)
            self.runner.move(last.slot, target, last.length)
            last.slot = target

    def _step_input(self, speech: Speech) -> StepInput:
        sampling, spec = speech.request.sampling, self.spec
        width = sampling.temperature and _kept(sampling.top_k, spec.talker.vocab)
        predictor_width = 0
        if spec.predictor:
            predictor_width = sampling.predictor_temperature and _kept(sampling.predictor_top_k, spec.predictor.vocab)
        advance = None
        if not speech.has_state:
            text_state = speech.text_states.pop(speech.frames_made, None)
            advance = Advance(speech.text_id, speech.length, speech.rope_position, text_state)
            speech.length += 1
            speech.rope_position += 1
        return StepInput(speech.slot, speech.frames_made, int(width), int(predictor_width), advance)

    def _end_all(self, error: StageError) -> None:
        with self.changed:
            ended = [*self._waiting, *self._running]
            self._waiting.clear()
        self._running.clear()
        self._deliver([(speech, error) for speech in ended])

    def _deliver(self, outputs: list[_Output]) -> None:
        """Gives requests their outputs on the event loop."""

        def deliver() -> None:
            for speech, output in outputs:
                speech.deliver(output)

        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(deliver)


def _kept(top_k: int, vocab: int) -> int:
    """Codes that are kept, of `vocab`."""
    return min(top_k or vocab, vocab)
