"""`AsyncOmni`: a model in the caller's event loop."""

import asyncio
import logging
import os
import weakref
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import aclosing, contextmanager
from typing import Any, Self, Unpack, overload

from PIL import Image
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from quartet.answers import Answer, Event
from quartet.client import Client, start
from quartet.errors import Error, StartError
from quartet.messages import Chat, Message, Prompt, PromptOptions, Prompts, is_batch
from quartet.system import Setup, deployment_for

CONCURRENCY = 64  # of one Omni; a stage takes 160 by default, running and queued
TIMEOUT_S = 600.0
log = logging.getLogger("quartet")


class AsyncOmni:
    """A model on stages, used from one event loop without HTTP.

    `async with AsyncOmni(model) as omni:` starts the stages as `quartet up` does, and ends them. Without the block the
    first call starts them; `close` or the end of the process ends them.

    Args:
        model: checkpoint directory or hub id; None with `address`.
        setup: see `quartet.system.Setup`.

    Raises:
        StartError: the arguments contradict each other, or name what cannot be used.
    """

    def __init__(self, model: str | os.PathLike[str] | None = None, **setup: Unpack[Setup]) -> None:
        if unknown := setup.keys() - Setup.__annotations__.keys():
            name = min(unknown)
            raise StartError(f"{name}: no such argument; there are: {', '.join(Setup.__annotations__)}", name)
        self._concurrency, self._timeout_s = setup.get("concurrency", CONCURRENCY), setup.get("timeout_s", TIMEOUT_S)
        if self._concurrency < 1:
            raise StartError(f"concurrency: must be 1 or more, not {self._concurrency}", "concurrency")
        if not self._timeout_s > 0:
            raise StartError(f"timeout_s: must be above 0, not {self._timeout_s}", "timeout_s")
        self._process_id = os.getpid()
        self._deployment = deployment_for(model, setup)
        if self._deployment.processes is not None:
            # any thread may find the garbage, so nothing waits
            weakref.finalize(self, self._deployment.processes.begin_to_close).atexit = False
        self._starting: asyncio.Task[Client] | None = None
        self._closing: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        try:
            await self.start()
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def start(self) -> None:
        """Returns when every stage serves; other calls wait for this. Raises StartError."""
        await self._client()

    async def close(self) -> None:
        """Ends the stages; running calls fail. May be called again."""
        if self._process_id != os.getpid():
            return
        if self._closing is None:
            self._closing = asyncio.create_task(self._close())
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        try:
            # a loop that has ended left nothing to close
            if self._starting is not None and self._starting.get_loop() is asyncio.get_running_loop():
                self._starting.cancel()
                (client,) = await asyncio.gather(self._starting, return_exceptions=True)
                if isinstance(client, Client):
                    await client.close()
        finally:
            if (processes := self._deployment.processes) is not None:
                processes.begin_to_close()
                await processes.closed()

    @overload
    async def generate(
        self, prompt: str | Message | Chat, *, progress: bool | None = None, **options: Unpack[PromptOptions]
    ) -> Answer: ...
    @overload
    async def generate(
        self, prompt: Prompts, *, progress: bool | None = None, **options: Unpack[PromptOptions]
    ) -> list[Answer]: ...
    @overload
    async def generate(
        self, prompt: Any, *, progress: bool | None = None, **options: Unpack[PromptOptions]
    ) -> Answer | list[Answer]: ...
    async def generate(
        self, prompt: Any, *, progress: bool | None = None, **options: Unpack[PromptOptions]
    ) -> Answer | list[Answer]:
        """Answers a prompt, or a list of prompts at the same time. Cancelling frees every stage.

        Args:
            prompt: a text, a message, a list of messages in OpenAI's form, or a list of texts and such lists.
            progress: shows a bar for a list; None: on a terminal.
            options: see `quartet.messages.PromptOptions`.

        Raises:
            Error: the prompt cannot be answered, or an option is at fault. In a list the answer has it.
            StartError: the stages cannot be started.
        """
        client = await self._client()
        if not is_batch(prompt):
            return await client.answer(prompt, options)
        client.check(options)
        prompts: Sequence[Any] = prompt
        with _bar(len(prompts), progress) as report:

            async def one(each: Any) -> Answer:
                try:
                    return await client.answer(each, options)
                except Error as error:
                    return Answer(error=error)
                finally:
                    report()

            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(one(each)) for each in prompts]
        answers = [task.result() for task in tasks]
        if failed := [answer.error for answer in answers if answer.error]:
            log.warning("%d of %d prompts were not answered; the first: %s", len(failed), len(answers), failed[0])
        return answers

    async def stream(self, prompt: Prompt, **options: Unpack[PromptOptions]) -> AsyncGenerator[Event, None]:
        """Yields `TextDelta` and `AudioDelta`, last the whole `Answer`. Closing the iterator frees every stage.

        Raises:
            Error: the prompt cannot be answered, or a stage was lost.
            StartError: the stages cannot be started.
        """
        client = await self._client()
        async with aclosing(client.stream(prompt, options)) as events:
            async for event in events:
                yield event

    async def images(
        self,
        prompt: str,
        *,
        images: Sequence[Any] = (),
        mask: Any = None,
        control_images: Sequence[Any] = (),
        **options: Any,
    ) -> list[Image.Image]:
        """Makes images, by a pipeline with a dit.

        Args:
            images: to edit: paths, bytes, Pillow images or arrays.
            mask: of the first of them.
            control_images: for the model's ControlNets, in their order.
            options: n, size ("WIDTHxHEIGHT"), seed, num_inference_steps, guidance_scale, negative_prompt, lora.

        Raises:
            Error: they cannot be made.
            StartError: the stages cannot be started.
        """
        client = await self._client()
        return await client.images(prompt, images, mask, control_images, options)

    async def _client(self) -> Client:
        if self._process_id != os.getpid():
            raise RuntimeError("this process was forked from the one that made the Omni; make one here")
        if self._closing is not None:
            raise RuntimeError("the Omni is closed")
        if self._starting is None:
            self._starting = asyncio.create_task(start(self._deployment, self._concurrency, self._timeout_s))
            # only the caller may hold `self`
            self._starting.add_done_callback(lambda task, me=weakref.ref(self): _watch(task, me))
        if self._starting.get_loop() is not asyncio.get_running_loop():
            raise RuntimeError("the Omni belongs to another event loop")
        return await asyncio.shield(self._starting)


def _watch(task: "asyncio.Task[Client]", owner: Callable[[], object | None]) -> None:
    """Closes the connections when their owner is garbage."""
    if task.cancelled() or task.exception() is not None:
        return
    client, loop, found = task.result(), task.get_loop(), owner()

    def close() -> None:
        if not loop.is_closed():
            loop.call_soon_threadsafe(lambda: loop.create_task(client.close()))

    if found is not None:
        weakref.finalize(found, close).atexit = False


@contextmanager
def _bar(prompts: int, shown: bool | None) -> Iterator[Callable[[], None]]:
    """A bar on stderr; the yielded function counts an answer. None: only on a terminal."""
    console = Console(stderr=True)
    columns = (TextColumn("answers"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    hidden = not console.is_terminal if shown is None else not shown
    with Progress(*columns, console=console, disable=hidden) as progress:
        task = progress.add_task("", total=prompts)
        yield lambda: progress.advance(task)
