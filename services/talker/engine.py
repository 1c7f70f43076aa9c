"""Continuous batching: a thread that makes one codec frame for every request that has text, step after step."""

import asyncio
import heapq
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace

import structlog
import torch

from services.common.engine.device import Staging, make_current
from services.common.engine.process import lower_engine_priority
from services.common.rpc.errors import InternalError, InvalidInput, StageError, Unavailable
from services.talker import metrics
from services.talker.prompt import answer_head, is_media, prompt_length, prompt_rows, rope_positions
from services.talker.runner import Advance, PromptChunk, StepInput, TalkerRunner
from services.talker.speech import End, Speech, SpeechRequest, SpeechState

log = structlog.get_logger()

_Output = tuple[Speech, torch.Tensor | End | StageError]


class TalkerEngine:
    """Speaks many answers at a time.

    A step admits new requests to free slots, runs a bounded piece of the prompts that are not done, then moves every
    request that has its next text by one frame. A request whose text is late keeps its slot and sits out; nobody waits
    for it.

    Args:
        runner: model and slots.
        max_frames_ahead: most frames of a request that nobody has read yet. Beyond that it stands still.
        prefill_chunk: most prompt positions run in a step, of all prompts, so that long prompts do not hold up frames.
        on_failure: called on the event loop with what broke the engine, after every request was told.
    """

    def __init__(
        self,
        runner: TalkerRunner,
        prefill_chunk: int = 512,
        max_frames_ahead: int = 128,
        on_failure: Callable[[BaseException], None] = lambda error: None,
    ) -> None:
        self.spec = runner.model.spec
        self.changed = threading.Condition()  # guards _waiting, _stopping, _failure and the shared part of each state
        self.runner, self._prefill_chunk, self._on_failure = runner, prefill_chunk, on_failure
        self._max_frames_ahead = max_frames_ahead
        self._staging = Staging(runner.model.device)
        self._waiting: deque[Speech] = deque()
        self._running: list[Speech] = []
        self._free = list(range(runner.slots))
        self._stopping = False
        self._failure: BaseException | None = None
        self._loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._run, name="talker-engine", daemon=True)
        self._thread.start()

    @property
    def free_slots(self) -> int:
        """Slots that no request holds."""
        return len(self._free)

    def submit(self, request: SpeechRequest) -> Speech:
        """Queues `request`. Call on the event loop.

        Raises:
            InvalidInput: it does not fit the checkpoint or a slot.
            Unavailable: the engine failed or is closed.
        """
        most_frames = self._check(request)
        head = answer_head(request.prompt.token_ids, self.spec)
        state = SpeechState([*head, *request.text], most_frames, self.spec.tts_eos_id, self.spec.tts_pad_id)
        speech = Speech(self, request, state)
        with self.changed:
            if self._stopping or self._failure:
                raise Unavailable("the talker's engine has stopped")
            self._waiting.append(speech)
            self.changed.notify()
        return speech

    def close(self) -> None:
        """Stops the thread; requests that are not done get Unavailable."""
        with self.changed:
            self._stopping = True
            self.changed.notify()
        self._thread.join()

    def _check(self, request: SpeechRequest) -> int:
        """Most frames that `request` can have."""
        prompt, capacity = request.prompt, self.runner.positions
        if not request.text:
            raise InvalidInput("token_ids", "there is no answer to speak")
        media = int(is_media(prompt.token_ids, self.spec).sum())
        rows = sum(map(len, prompt.media_states))
        if rows != media or any(states.shape[1:] != (self.spec.thinker_hidden,) for states in prompt.media_states):
            raise InvalidInput(
                f"hidden_states.{self.spec.accept_hidden_layer}",
                f"has {rows} rows, the prompt needs {media} of {self.spec.thinker_hidden}",
            )
        length = prompt_length(prompt, self.spec)
        if length > capacity:
            raise InvalidInput("token_ids", f"the prompt takes {length} positions; this talker has {capacity}")
        return min(request.sampling.max_frames, capacity - length + 1)  # the last frame needs no step after it

    # What follows runs in the engine's thread.

    def _run(self) -> None:
        make_current(self.runner.model.device)
        if self.runner.model.device.type == "cpu":
            lower_engine_priority()
        try:
            while self._await_work():
                self._step()
            self._end_all(Unavailable("the talker is shutting down"))
        except BaseException as error:
            log.exception("talker engine failed")
            with self.changed:
                self._failure = error
            self._end_all(InternalError("the talker's engine failed; its log has the details"))
            self._call(self._on_failure, error)

    def _await_work(self) -> bool:
        """Blocks until there is something to do; false when the engine is to stop."""
        with self.changed:
            while not self._stopping and not self._has_work():
                self.changed.wait()
            return not self._stopping

    def _has_work(self) -> bool:
        if self._waiting and (self._free or any(speech.state.cancelled for speech in self._waiting)):
            return True
        states = [speech.state for speech in self._running]
        return any(state.cancelled or state.rows or self._is_runnable(state) for state in states)

    def _is_runnable(self, state: SpeechState) -> bool:
        """Whether it can have a frame now, prefill aside."""
        return (state.ready or state.text_ready) and state.frames - state.frames_read < self._max_frames_ahead

    def _step(self) -> None:
        outputs: list[_Output] = []
        with self.changed:
            self._drop_cancelled()
            metrics.REQUESTS_WAITING.set(len(self._waiting))
        while self._free and self._waiting:
            self._admit(self._waiting[0], outputs)
            with self.changed:
                self._waiting.popleft()  # not before: were the engine to fail at it, it would never be told
        self._prefill()
        self._speak(outputs)
        held = sum(speech.state.length for speech in self._running)
        metrics.KV_CACHE_USED.set(held / (self.runner.slots * self.runner.positions))
        if outputs:
            self._call(_deliver, outputs)

    def _drop_cancelled(self) -> None:
        self._waiting = deque(speech for speech in self._waiting if not speech.state.cancelled)
        for speech in [speech for speech in self._running if speech.state.cancelled]:
            self._release(speech)

    def _release(self, speech: Speech) -> None:
        self._running.remove(speech)
        metrics.REQUESTS_RUNNING.dec()
        speech.state.rows = None
        if speech.state.slot is not None:
            heapq.heappush(self._free, speech.state.slot)

    def _admit(self, speech: Speech, outputs: list[_Output]) -> None:
        """Gives `speech` the lowest free slot and embeds its prompt. A prompt that cannot be embedded fails alone."""
        request, state = speech.request, speech.state
        if request.marks:
            request.marks.mark_started()
        try:
            positions = rope_positions(request.prompt, self.spec)
            state.rows = prompt_rows(
                request.prompt, state.text[0], request.speaker, self.runner.model, positions, self._staging
            )
            if not state.rows.embeddings.isfinite().all():  # in the cache, they would spoil the slot's next requests
                raise InvalidInput(f"hidden_states.{self.spec.accept_hidden_layer}", "must be finite numbers")
        except StageError as error:
            outputs.append((speech, error))
            return
        # The states may be the thinker's memory, which waits to be used again.
        speech.request = replace(request, prompt=replace(request.prompt, media_states=()))
        state.rope_position = int(positions.max()) + 1
        state.slot = heapq.heappop(self._free)
        self.runner.assign(state.slot, request.sampling)
        self._running.append(speech)
        metrics.REQUESTS_RUNNING.inc()

    def _prefill(self) -> None:
        """Runs the oldest prompts that are not done, as much of them as a step may take, in one pass."""
        chunks, done, room = [], [], self._prefill_chunk
        for speech in self._running:
            state = speech.state
            if state.rows is None or state.slot is None or not room:
                continue
            begin, total = state.prefilled, len(state.rows.embeddings)
            end = min(begin + room, total)
            chunks.append(PromptChunk(state.slot, begin, end, state.rows))
            room -= end - begin
            state.prefilled = state.length = end
            if end == total:
                state.rows, state.ready = None, True
                done.append(speech)
        if chunks:
            self.runner.prefill(chunks)
            metrics.PREFILL_POSITIONS.inc(self._prefill_chunk - room)
        for speech in done:
            if speech.request.marks:
                speech.request.marks.mark_prefilled()

    def _speak(self, outputs: list[_Output]) -> None:
        """Draws a frame for every request that has its state or the text for its next one; ends those that are done."""
        speaking = self._runnable()
        if not speaking:
            return
        self._compact(speaking)
        with metrics.STEP_SECONDS.time():
            frames = self.runner.step([self._step_input(speech) for speech in speaking])
        metrics.STEP_BATCH.observe(len(speaking))
        for speech, frame, is_end in zip(speaking, frames, frames[:, 0] == self.spec.codec_eos_id, strict=True):
            state = speech.state
            state.ready = False
            end: End | None = "stop" if is_end else None
            if not is_end:
                outputs.append((speech, frame))
                metrics.FRAMES.inc()
                with self.changed:
                    state.frames += 1
                if state.frames >= state.most_frames:
                    end = "length"
            if end:
                outputs.append((speech, end))
                self._release(speech)

    def _runnable(self) -> list[Speech]:
        """Requests that can have a frame now. The clock starts for those whose text is late."""
        runnable, no_text, no_reader = [], 0, 0
        with self.changed:
            for speech in self._running:
                state = speech.state
                if state.rows:
                    continue
                if self._is_runnable(state):
                    runnable.append(speech)
                elif state.ready or state.text_ready:
                    no_reader += 1
                else:
                    no_text += 1
                    state.waiting_since = state.waiting_since or time.monotonic()
        metrics.REQUESTS_PARKED.labels("text").set(no_text)
        metrics.REQUESTS_PARKED.labels("consumer").set(no_reader)
        return runnable

    def _compact(self, speaking: list[Speech]) -> None:
        """Moves requests from high slots to free low ones where that halves what a step computes."""
        while self._free:
            last = max(speaking, key=lambda speech: speech.state.slot or 0)
            state, rows = last.state, len(self._running)
            assert state.slot is not None
            if state.slot < 2 * rows or self._free[0] > state.slot:
                return
            target = heapq.heapreplace(self._free, state.slot)
            self.runner.move(state.slot, target, state.length)
            state.slot = target

    def _step_input(self, speech: Speech) -> StepInput:
        sampling, state, spec = speech.request.sampling, speech.state, self.spec
        assert state.slot is not None
        width = sampling.temperature and (sampling.top_k or spec.talker.vocab)
        predictor_width = sampling.predictor_temperature and (sampling.predictor_top_k or spec.predictor.vocab)
        advance = None
        if not state.ready:
            advance = Advance(state.text_id, state.length, state.rope_position)
            state.length += 1
            state.rope_position += 1
        return StepInput(state.slot, state.frames, int(width), int(predictor_width), advance)

    def _end_all(self, error: StageError) -> None:
        with self.changed:
            self._stopping = True
            ended = [*self._waiting, *self._running]
            self._waiting.clear()
        self._running.clear()
        metrics.REQUESTS_RUNNING.set(0)
        metrics.KV_CACHE_USED.set(0)
        self._call(_deliver, [(speech, error) for speech in ended])

    def _call(self, function: Callable, argument: object) -> None:
        """Calls `function` on the event loop, if that still runs."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(function, argument)


def _deliver(outputs: list[_Output]) -> None:
    for speech, output in outputs:
        speech.deliver(output)
