"""One answer being spoken: what the request's side feeds in and reads out, and what the engine's thread keeps of it."""

import asyncio
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from threading import Condition
from typing import Literal, Protocol, cast

import torch

from services.talker.family import Prompt, Text
from services.talker.sampling import Sampling

End = Literal["stop", "length"]


class Marks(Protocol):
    """Told, from the engine's thread, of the moments in a request's life."""

    def mark_started(self) -> None: ...

    def mark_prefilled(self) -> None: ...


@dataclass(frozen=True)
class SpeechRequest:
    """What is to be spoken, and how. `text` is what is known of it so far: at least its first id, which the prompt's
    last row takes."""

    prompt: Prompt
    text: Text
    sampling: Sampling
    marks: Marks | None = None


class Speech:
    """Handle of a submitted request. `feed`, `finish_text` and `cancel` may be called from any thread.

    Args:
        changed: guards the shared part of `state`, and tells the engine of changes to it.

    Attributes:
        end: why speech ended, once `frames` is exhausted: "stop" (end-of-speech) or "length".
        frame_count: frames delivered so far.
        waited_ms: milliseconds for which speech stood still because the text was late.
    """

    def __init__(self, changed: Condition, request: SpeechRequest, state: "SpeechState") -> None:
        self.request, self.state = request, state
        self.end: End | None = None
        self.frame_count = 0
        self._changed = changed
        self._outputs: asyncio.Queue[torch.Tensor | End | Exception] = asyncio.Queue()

    @property
    def waited_ms(self) -> float:
        return self.state.waited_s * 1000

    def feed(self, text: Text) -> None:
        """Appends text of the answer."""
        with self._changed:
            self.state.add_text(text)
            self._wake()

    def finish_text(self) -> None:
        """The answer is complete: what was fed is all there is to say."""
        with self._changed:
            self.state.text_complete = True
            self._wake()

    def cancel(self) -> None:
        """Ends the request: its slot is free at the engine's next step. Harmless when it has ended already."""
        with self._changed:
            self.state.cancelled = True
            self._changed.notify()

    def fail(self, error: Exception) -> None:
        """Ends the request because its input failed: `frames` raises `error`. Call on the event loop."""
        self.cancel()
        self.deliver(error)

    def _wake(self) -> None:
        if self.state.waiting_since is not None and self.state.text_ready:
            self.state.waited_s += time.monotonic() - self.state.waiting_since
            self.state.waiting_since = None
        self._changed.notify()

    async def frames(self) -> AsyncGenerator[torch.Tensor, None]:
        """Codec frames as they come to exist, those that are ready together at once: (n, groups) int32 on the CPU.

        Asking for the next ones says that those before were dealt with: the engine runs only so far ahead.

        Raises:
            StageError: the engine failed.
            Exception: what `fail` was given.
        """
        while True:
            with self._changed:
                self.state.frames_read = self.frame_count
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


class SpeechState:
    """What the engine keeps of a request. Text, flags and waiting times are guarded by the engine's lock; everything
    else belongs to its thread.

    Attributes:
        text: all text of the answer that is known.
        text_states: of the text whose steps are to come, by its index, where there are any.
        slot: place in the runner, once admitted.
        rows: the prefill (rows, hidden), until it is done.
        prefilled: rows of it that were run.
        length: cached positions.
        rope_position: of the next step.
        frames: frames made.
        frames_read: of them, those that the reader has dealt with.
        most_frames: the request's limit, or what fits into the slot.
        has_state: whether the talker's state is there and waits for its frame.
    """

    def __init__(self, text: Text, most_frames: int, after_text: tuple[int, ...]) -> None:
        self.text: list[int] = []
        self.text_states: dict[int, torch.Tensor] = {}
        self.add_text(text)
        self.text_complete = False
        self.cancelled = False
        self.waiting_since: float | None = None
        self.waited_s = 0.0
        self.slot: int | None = None
        self.rows: torch.Tensor | None = None
        self.prefilled = 0
        self.length = 0
        self.rope_position = 0
        self.frames = 0
        self.frames_read = 0
        self.most_frames = most_frames
        self.has_state = False
        self._after_text = after_text

    def add_text(self, text: Text) -> None:
        """Appends text of the answer."""
        if text.states is not None:
            self.text_states.update(enumerate(text.states, start=len(self.text)))
        self.text.extend(text.ids)

    @property
    def text_ready(self) -> bool:
        """Whether the next talker step has its text."""
        return self.text_complete or self.frames < len(self.text)

    @property
    def text_id(self) -> int:
        """Text of the next talker step: an id a frame, then those that follow all text. Prefill took the first."""
        if self.frames < len(self.text):
            return self.text[self.frames]
        return self._after_text[min(self.frames - len(self.text), len(self._after_text) - 1)]
