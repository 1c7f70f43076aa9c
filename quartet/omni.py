"""`Omni`: a model for programs without an event loop."""

import atexit
import os
import weakref
from collections.abc import Coroutine, Generator, Sequence
from typing import Any, Self, TypeVar, Unpack, overload

import uvloop
from PIL import Image
from rich.console import Console

from quartet.answers import Answer, Event
from quartet.async_omni import AsyncOmni
from quartet.loops import LoopThread
from quartet.messages import Chat, Message, Prompt, PromptOptions
from quartet.system import Setup

Result = TypeVar("Result")


class Omni:
    """A model on stages, used without HTTP and without an event loop. Thread-safe.

    `Omni(model)` starts the stages as `quartet up` does, and returns when they serve. They end with the `with` block,
    `close`, this process, or when the Omni is garbage.

    Args:
        model: checkpoint directory or hub id; None with `address`.
        setup: see `quartet.system.Setup`.

    Raises:
        StartError: a stage cannot start, or is not reached; nothing is left running.
    """

    def __init__(self, model: str | os.PathLike[str] | None = None, **setup: Unpack[Setup]) -> None:
        self._state = _OmniState(AsyncOmni(model, **setup))
        weakref.finalize(self, self._state.begin_to_close).atexit = False
        console = Console(stderr=True)
        try:
            if console.is_terminal:
                with console.status("starting the stages" if model is not None else "reaching the stages"):
                    self._state.thread.run(self._state.omni.start())
            else:
                self._state.thread.run(self._state.omni.start())
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the stages and waits for their end; running calls fail. May be called again."""
        self._state.close()

    @overload
    def generate(
        self, prompt: str | Message | Chat, *, progress: bool | None = None, **options: Unpack[PromptOptions]
    ) -> Answer: ...
    @overload
    def generate(
        self,
        prompt: list[str] | list[Chat] | list[Prompt],
        *,
        progress: bool | None = None,
        **options: Unpack[PromptOptions],
    ) -> list[Answer]: ...
    @overload
    def generate(
        self, prompt: Any, *, progress: bool | None = None, **options: Unpack[PromptOptions]
    ) -> Answer | list[Answer]: ...
    def generate(
        self, prompt: Any, *, progress: bool | None = None, **options: Unpack[PromptOptions]
    ) -> Answer | list[Answer]:
        """Answers a prompt or a list; see `AsyncOmni.generate`. Ctrl-C frees every stage, and the Omni can be used
        again.

        Raises:
            Error: the prompt cannot be answered, or an option is at fault. In a list, a prompt's error is in its
                answer.
        """
        return self._run(self._state.omni.generate(prompt, progress=progress, **options))

    def stream(self, prompt: Prompt, **options: Unpack[PromptOptions]) -> Generator[Event, None, None]:
        """Yields `TextDelta` and `AudioDelta`, last the whole `Answer`. Closing the iterator frees every stage.

        Raises:
            Error: the prompt cannot be answered, or a stage was lost.
        """
        events = self._state.omni.stream(prompt, **options)

        async def following() -> Event | None:
            return await anext(events, None)

        async def close() -> None:
            await events.aclose()

        try:
            while (event := self._run(following())) is not None:
                yield event
        finally:
            thread = self._state.thread
            if thread.is_current:  # collected there: the thread cannot wait for itself
                thread.begin(close())
            elif not thread.has_ended:
                thread.run(close())

    def images(self, prompt: str, *, images: Sequence[Any] = (), mask: Any = None, **options: Any) -> list[Image.Image]:
        """Makes Pillow images; see `AsyncOmni.images`.

        Raises:
            Error: they cannot be made.
        """
        return self._run(self._state.omni.images(prompt, images=images, mask=mask, **options))

    def _run(self, work: Coroutine[Any, Any, Result]) -> Result:
        if not self._state.is_ours or self._state.thread.has_ended:
            work.close()
            reason = "closed" if self._state.is_ours else "of the process that this one was forked from; make one here"
            raise RuntimeError(f"the Omni is {reason}")
        return self._state.thread.run(work)


class _OmniState:
    """The stages and thread of an Omni; they outlive it until they end."""

    def __init__(self, omni: AsyncOmni) -> None:
        self.omni, self._process_id, self._closing = omni, os.getpid(), False
        self.thread = LoopThread("quartet-omni", uvloop.new_event_loop)
        _all.add(self)

    @property
    def is_ours(self) -> bool:
        """Whether this process has the thread: a fork has none."""
        return self._process_id == os.getpid()

    def begin_to_close(self) -> None:
        """Ends all without waiting. For any thread; may be called again."""
        if self.is_ours and not self._closing:
            self._closing = True
            self.thread.end(self.omni.close)

    def close(self) -> None:
        """Ends all; an interrupted wait goes on in the background."""
        self.begin_to_close()
        if self.is_ours:
            self.thread.join()
        _all.discard(self)


_all: set[_OmniState] = set()


@atexit.register
def _close_all() -> None:
    for held in list(_all):
        held.begin_to_close()
    for held in list(_all):
        held.close()
