"""An event loop in its own thread."""

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

Result = TypeVar("Result")


class LoopThread:
    """Runs coroutines for other threads, until `end`.

    The thread is a daemon: processes that it starts must end before the interpreter does."""

    def __init__(self, name: str, factory: Callable[[], asyncio.AbstractEventLoop]) -> None:
        self.loop = factory()
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._thread.start()

    @property
    def is_current(self) -> bool:
        return threading.current_thread() is self._thread

    @property
    def has_ended(self) -> bool:
        return not self._thread.is_alive()

    def begin(self, coroutine: Coroutine[Any, Any, Result]) -> "Future[Result]":
        """Starts `coroutine`; cancelling the future cancels it. Raises RuntimeError: the thread has ended."""
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

    def end(self, last: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Runs `last`, then ends the thread. Does not wait; may be called in the thread."""

        async def finish() -> None:
            try:
                await last()
            finally:
                self.loop.stop()

        if not self.has_ended:
            self.loop.call_soon_threadsafe(lambda: setattr(self, "_last", self.loop.create_task(finish())))

    def join(self) -> None:
        """Waits for the thread's end; returns at once in the thread itself."""
        if not self.is_current:
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


def _pass_on(task: "asyncio.Task[Result]", outcome: "Future[Result]") -> None:
    if task.cancelled():
        outcome.set_exception(asyncio.CancelledError())
    elif (error := task.exception()) is not None:
        outcome.set_exception(error)
    else:
        outcome.set_result(task.result())
