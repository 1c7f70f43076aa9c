"""`quartet up`: all stages and the gateway on this machine, until ctrl-C."""

import asyncio
import contextlib
import shlex
import signal
import threading
import time
from collections.abc import Iterator, Sequence

from cli.gpu_plan import plan
from cli.plan import GATEWAY, WEBRTC, LaunchOptions
from cli.supervisor import STOP_GRACE_S, Supervisor
from cli.terminal import console


def show(options: LaunchOptions) -> None:
    """Prints what `serve` would start. Raises LaunchError."""
    launch = plan(options, starts=False)
    for line in (*(launch.lines or ["no stage is on a GPU"]), ""):
        print(line)
    for stage in launch.stages:
        print(
            shlex.join(
                [f"{stage.name}:", "python", "-m", f"services.{stage.kind}", "--model", stage.model, *stage.flags]
            )
        )
    if options.has_gateway:
        print(shlex.join([f"{GATEWAY}:", "python", "-m", GATEWAY, *options.gateway_flags]))
    if options.webrtc:
        print(shlex.join([f"{WEBRTC}:", "python", "-m", "gateway.webrtc", *options.webrtc_flags]))


async def serve(options: LaunchOptions) -> None:
    """Returns after SIGINT or SIGTERM, when all has stopped. Raises LaunchError."""
    supervisor = Supervisor(options, progress=say)
    for line in supervisor.gpu_shares:
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    console.print(f"starting {listed(supervisor.names)}; logs in {supervisor.run_directory}")
    serving = asyncio.create_task(_serve_for_ever(supervisor))
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, serving.cancel)
    try:
        with contextlib.suppress(asyncio.CancelledError):
            await serving
    finally:  # a second signal finds nothing to cancel: what is stopping stops
        console.print("stopping")
        await supervisor.stop()


async def _serve_for_ever(supervisor: Supervisor) -> None:
    started_s = time.monotonic()
    with console.status("loading the model"):
        await supervisor.start()
    console.print(f"ready after {time.monotonic() - started_s:.0f} s: {supervisor.url}/v1 (ctrl-C stops it)")
    await asyncio.Event().wait()


def listed(names: Sequence[str]) -> str:
    """Joins names: "a, b and c"."""
    return " and ".join(filter(None, (", ".join(names[:-1]), *names[-1:])))


def say(name: str, what: str) -> None:
    console.print(f"  [bold]{name:<9}[/bold] {what}")


@contextlib.contextmanager
def running(options: LaunchOptions, grace_s: float = STOP_GRACE_S) -> Iterator[Supervisor]:
    """For the main thread. Ignores ctrl-C while the system stops. Raises LaunchError."""
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
        handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            starting.cancel()  # ctrl-C may come while it starts
            asyncio.run_coroutine_threadsafe(supervisor.stop(grace_s), loop).result()
            loop.call_soon_threadsafe(loop.stop)
            thread.join()
        finally:
            signal.signal(signal.SIGINT, handler)
