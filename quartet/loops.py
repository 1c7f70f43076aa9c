"""An event loop in its own thread."""

import asyncio
import atexit
import os
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

Result = TypeVar("Result")


class LoopThread:
    """Runs coroutines for other threads, until `end` or the interpreter's exit. A fork has no such thread.

    `last` runs at the end, e.g. to end processes."""

    def __init__(
        self,
        name: str,
        factory: Callable[[], asyncio.AbstractEventLoop],
        last: Callable[[], Coroutine[Any, Any, None]],
    ) -> None:
        self.loop, self._last = factory(), last
        self._process_id = os.getpid()
        self._ending: Future[None] | None = None
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._thread.start()
        _threads[self] = None

    @property
    def is_ours(self) -> bool:
        """False in a fork."""
        return self._process_id == os.getpid()

    @property
    def is_current(self) -> bool:
        return threading.current_thread() is self._thread

    @property
    def has_ended(self) -> bool:
        return not self._thread.is_alive()

    def begin(self, coroutine: Coroutine[Any, Any, Result]) -> "Future[Result]":
        """Starts `coroutine`; cancelling the future cancels it."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop)

    def run(self, coroutine: Coroutine[Any, Any, Result]) -> Result:
        """The result of `coroutine`. An interrupt, such as ctrl-C, cancels it and waits for its end.

        Raises:
            RuntimeError: called in the thread itself, or the thread has ended.
        """
        if self.is_current or self.has_ended:
            coroutine.close()
            raise RuntimeError("called in its own thread" if self.is_current else "closed")
        outcome: Future[Result] = Future()
        tasks: list[asyncio.Task[Result]] = []

        def begin() -> None:
            tasks.append(self.loop.create_task(coroutine))
            tasks[0].add_done_callback(lambda task: _pass_on(task, outcome))

        self.loop.call_soon_threadsafe(begin)
        try:
            return outcome.result()
        except BaseException:
            if not outcome.done():
                self.loop.call_soon_threadsafe(lambda: tasks[0].cancel())
                outcome.exception()  # waits
            raise

    def end(self) -> None:
        """Ends the thread without waiting. For any thread, also this one; may be called again."""

        async def finish() -> None:
            try:
                await self._last()
            finally:
                self.loop.stop()

        if self.is_ours and self._ending is None:
            self._ending = self.begin(finish())

    def join(self) -> None:
        """Waits for the thread's end; returns at once in the thread itself."""
        if self.is_ours and not self.is_current:
            self._thread.join()

    def _serve(self) -> None:
        asyncio.set_event_loop(self.loop)
        try:
            self.loop.run_forever()
            left = asyncio.all_tasks(self.loop)
            for task in left:
                task.cancel()
            self.loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
            self.loop.run_until_complete(self.loop.shutdown_asyncgens())
        finally:
            self.loop.close()
            del _threads[self]


_threads: dict[LoopThread, None] = {}  # in the order of their start


@atexit.register
def _end_all() -> None:
    threads = list(reversed(_threads))
    for thread in threads:
        thread.end()
    for thread in threads:
        thread.join()


def _pass_on(task: "asyncio.Task[Result]", outcome: "Future[Result]") -> None:
    if task.cancelled():
        outcome.set_exception(asyncio.CancelledError())
    elif (error := task.exception()) is not None:
        outcome.set_exception(error)
    else:
        outcome.set_result(task.result())
