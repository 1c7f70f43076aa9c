"""`Omni`: a model for programs without an event loop."""

import os
import weakref
from collections.abc import Coroutine, Generator, Sequence
from contextlib import nullcontext
from typing import Any, Self, TypeVar, Unpack, overload

import uvloop
from PIL import Image
from rich.console import Console

from quartet.answers import Answer, Event
from quartet.async_omni import AsyncOmni
from quartet.loops import LoopThread
from quartet.messages import Chat, Message, Prompt, PromptOptions, Prompts
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
        self._omni = AsyncOmni(model, **setup)
        self._thread = LoopThread("quartet-omni", uvloop.new_event_loop, self._omni.close)
        weakref.finalize(self, self._thread.end).atexit = False
        console = Console(stderr=True)
        what = "starting the stages" if model is not None else "reaching the stages"
        try:
            with console.status(what) if console.is_terminal else nullcontext():
                self._thread.run(self._omni.start())
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the stages and waits for their end; running calls fail. May be called again."""
        self._thread.end()
        self._thread.join()

    @overload
    def generate(
        self, prompt: str | Message | Chat, *, progress: bool | None = None, **options: Unpack[PromptOptions]
    ) -> Answer: ...
    @overload
    def generate(
        self, prompt: Prompts, *, progress: bool | None = None, **options: Unpack[PromptOptions]
    ) -> list[Answer]: ...
    @overload
    def generate(
        self, prompt: Any, *, progress: bool | None = None, **options: Unpack[PromptOptions]
    ) -> Answer | list[Answer]: ...
    def generate(
        self, prompt: Any, *, progress: bool | None = None, **options: Unpack[PromptOptions]
    ) -> Answer | list[Answer]:
        """Answers a prompt or a list; see `AsyncOmni.generate`. Ctrl-C frees every stage; the Omni remains usable.

        Raises:
            Error: the prompt cannot be answered, or an option is at fault. In a list the answer has it.
        """
        return self._run(self._omni.generate(prompt, progress=progress, **options))

    def stream(self, prompt: Prompt, **options: Unpack[PromptOptions]) -> Generator[Event, None, None]:
        """Yields `TextDelta` and `AudioDelta`, last the whole `Answer`. Closing the iterator frees every stage.

        Raises:
            Error: the prompt cannot be answered, or a stage was lost.
        """
        events = self._omni.stream(prompt, **options)

        async def following() -> Event | None:
            return await anext(events, None)

        async def close() -> None:
            await events.aclose()

        try:
            while (event := self._run(following())) is not None:
                yield event
        finally:
            if self._thread.is_current:  # collected there: the thread cannot wait for itself
                self._thread.begin(close())
            elif not self._thread.has_ended:
                self._thread.run(close())

    def images(
        self,
        prompt: str,
        *,
        images: Sequence[Any] = (),
        mask: Any = None,
        control_images: Sequence[Any] = (),
        **options: Any,
    ) -> list[Image.Image]:
        """Makes images; see `AsyncOmni.images`.

        Raises:
            Error: they cannot be made.
        """
        given = {"images": images, "mask": mask, "control_images": control_images}
        return self._run(self._omni.images(prompt, **given, **options))

    def _run(self, work: Coroutine[Any, Any, Result]) -> Result:
        if not self._thread.is_ours or self._thread.has_ended:
            work.close()
            reason = "closed" if self._thread.is_ours else "of the process that this one was forked from; make one here"
            raise RuntimeError(f"the Omni is {reason}")
        return self._thread.run(work)
