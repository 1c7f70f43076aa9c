"""`quartet up`: all stages and the gateway on this machine, until ctrl-C."""

import asyncio
import contextlib
import signal
import threading
import time
from collections.abc import Iterator, Sequence

from rich.console import Console

from cli.plan import Options
from cli.supervisor import Supervisor

console = Console(stderr=True)


async def serve(options: Options) -> None:
    """Starts, says when it is ready, restarts what dies, and stops everything on SIGINT or SIGTERM.

    Raises:
        StartError: a process could not start; all others have been stopped.
    """
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stopped.set)
    started_s = time.monotonic()
    supervisor = Supervisor(options, progress=say)
    console.print(f"starting {listed(supervisor.names)}; logs in {supervisor.run_directory}")
    starting = asyncio.create_task(supervisor.start())
    stopping = asyncio.create_task(stopped.wait())
    try:
        with console.status("loading the model"):
            await asyncio.wait({starting, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if not stopped.is_set():
            await starting
            console.print(f"ready after {time.monotonic() - started_s:.0f} s: {supervisor.url}/v1 (ctrl-C stops it)")
            await stopped.wait()
    finally:
        for task in (starting, stopping):
            task.cancel()
        await asyncio.gather(starting, stopping, return_exceptions=True)
        console.print("stopping")
        await supervisor.stop()


def listed(names: Sequence[str]) -> str:
    """ "a, b and c"."""
    return " and ".join(filter(None, (", ".join(names[:-1]), *names[-1:])))


def say(name: str, what: str) -> None:
    """Progress as a line: readable on a terminal and in a log."""
    console.print(f"  [bold]{name:<9}[/bold] {what}")


@contextlib.contextmanager
def running(options: Options) -> Iterator[Supervisor]:
    """Runs a system around a block of ordinary code, e.g. a demo or a benchmark.

    Raises:
        StartError: a process could not start.
    """
    supervisor = Supervisor(options, progress=say)
    console.print(f"starting {listed(supervisor.names)}, each a process of its own")
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="supervisor", daemon=True)
    thread.start()
    starting = asyncio.run_coroutine_threadsafe(supervisor.start(), loop)
    try:
        starting.result()
        yield supervisor
    finally:
        starting.cancel()  # ctrl-C may come while it starts
        asyncio.run_coroutine_threadsafe(supervisor.stop(), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
