"""One answer being spoken: its text, its frames, and what the engine's thread keeps of it."""

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from threading import Condition
from typing import Literal, cast

import torch

from services.common.engine.thread import WaitClock
from services.common.telemetry.stopwatch import Stopwatch
from services.talker.inputs import Prompt, Text
from services.talker.sampling import Sampling

End = Literal["stop", "length"]


@dataclass(frozen=True)
class SpeechRequest:
    """What is to be spoken, and how. `text` has at least its first id, which the prompt's last row takes; the engine
    marks `timings`."""

    prompt: Prompt
    text: Text
    sampling: Sampling
    timings: Stopwatch = field(default_factory=Stopwatch)


class Speech:
    """A submitted request. `feed`, `finish_text` and `cancel` may be called from any thread; the attributes are the
    engine's, but for those of the reader.

    Args:
        changed: guards text, flags, clock and `frames_made`, and tells the engine of changes.
        most_frames: the request's limit, or what fits into the slot.
        after_text: see `TalkerSpec`.

    Attributes:
        end: for the reader, once `frames` is exhausted: "stop" (end of speech) or "length".
        frame_count: for the reader: frames delivered so far.
        waiting: time for which the text was late.
        text_states: of text whose steps are to come, by its index.
        slot: -1 before it has one.
        rows: the prefill (rows, hidden), until it is done.
        prefilled: rows of it that were run.
        length: cached positions.
        frames_read: frames that the reader has dealt with.
        has_state: whether the talker's state waits for its frame.
    """

    def __init__(
        self, changed: Condition, request: SpeechRequest, most_frames: int, after_text: tuple[int, ...]
    ) -> None:
        self.request, self.most_frames = request, most_frames
        self.end: End | None = None
        self.frame_count = 0
        self.waiting = WaitClock()
        self.text: list[int] = []
        self.text_states: dict[int, torch.Tensor] = {}
        self.text_complete = self.cancelled = self.has_state = False
        self.rows: torch.Tensor | None = None
        self.prefilled = self.length = self.rope_position = 0
        self.slot = -1
        self.frames_made = self.frames_read = 0
        self._changed, self._after_text = changed, after_text
        self._outputs: asyncio.Queue[torch.Tensor | End | Exception] = asyncio.Queue()
        self.feed(request.text)

    def feed(self, text: Text) -> None:
        with self._changed:
            if text.states is not None:
                self.text_states.update(enumerate(text.states, start=len(self.text)))
            self.text.extend(text.ids)
            self._wake()

    def finish_text(self) -> None:
        """The text is complete."""
        with self._changed:
            self.text_complete = True
            self._wake()

    def cancel(self) -> None:
        """Ends the request: its slot is free at the engine's next step. Harmless after its end."""
        with self._changed:
            self.cancelled = True
            self._changed.notify()

    def fail(self, error: Exception) -> None:
        """Ends the request: `frames` raises `error`. Call on the event loop."""
        self.cancel()
        self.deliver(error)

    def _wake(self) -> None:
        if self.text_ready:
            self.waiting.set(False)
        self._changed.notify()

    async def frames(self) -> AsyncGenerator[torch.Tensor, None]:
        """All frames that are ready, again and again: (n, groups) int32 on the CPU.

        Asking for the next ones counts those before as read.

        Raises:
            StageError: the engine failed.
            Exception: what `fail` was given.
        """
        while True:
            with self._changed:
                self.frames_read = self.frame_count
                self._changed.notify()
            ready = [await self._outputs.get()]
            while not self._outputs.empty():
                ready.append(self._outputs.get_nowait())
            frames = [output for output in ready if isinstance(output, torch.Tensor)]
            if frames:
                self.frame_count += len(frames)
                yield torch.stack(frames)
            for output in ready:  # a frame may come after a failure, from the step that was under way
                if isinstance(output, Exception):
                    raise output
                if not isinstance(output, torch.Tensor):
                    self.end = cast("End", output)
                    return

    def deliver(self, output: torch.Tensor | End | Exception) -> None:
        """For the engine, on the event loop: a frame (groups,), or the end."""
        self._outputs.put_nowait(output)

    @property
    def text_ready(self) -> bool:
        """Whether the next talker step has its text."""
        return self.text_complete or self.frames_made < len(self.text)

    @property
    def text_id(self) -> int:
        """Text of the next talker step: an id a frame, then `after_text`. Prefill took the first."""
        if self.frames_made < len(self.text):
            return self.text[self.frames_made]
        return self._after_text[min(self.frames_made - len(self.text), len(self._after_text) - 1)]
