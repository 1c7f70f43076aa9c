"""The `quartet` command as users run it."""

import os
import pty
import select
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from typer.testing import CliRunner, Result

from cli.main import app
from tests.support.systems.stack import HANG_GUARD_S


def quartet(
    *arguments: str, cwd: Path, timeout_s: float = 300, stdin: str | None = None
) -> subprocess.CompletedProcess[str]:
    """Runs it to its end; its output goes to pipes."""
    return subprocess.run(
        _command(arguments), cwd=cwd, capture_output=True, text=True, timeout=timeout_s, check=False, input=stdin
    )


def in_this_process(*arguments: str) -> Result:
    """Runs it here, in the working directory: a process of its own takes most of a second to load what it imports. For
    commands that fail, so that many ways to fail can be shown. In a thread, as it sets an event loop.
    """
    with ThreadPoolExecutor(1) as thread:
        done = thread.submit(CliRunner().invoke, app, arguments).result()
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done


def start(*arguments: str, cwd: Path, stdout: int | None = None) -> subprocess.Popen[str]:
    """Starts it; what it says on stderr goes to a pipe."""
    return subprocess.Popen(_command(arguments), cwd=cwd, stdout=stdout, stderr=subprocess.PIPE, text=True)


def on_terminal(*arguments: str, cwd: Path, until: tuple[str, ...]) -> str:
    """Runs it with a terminal as its stderr, and interrupts it when that got all of `until`. What the terminal got."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        _command(arguments), cwd=cwd, stderr=theirs, stdout=subprocess.DEVNULL, env={**os.environ, "TERM": "xterm"}
    )
    os.close(theirs)
    told, end, waits = b"", time.monotonic() + HANG_GUARD_S, True
    try:
        while (left_s := end - time.monotonic()) > 0 and select.select([ours], [], [], left_s)[0]:
            told += os.read(ours, 65536)
            if waits and all(word.encode() in told for word in until):
                process.send_signal(signal.SIGINT)
                waits = False
    except OSError:  # the way Linux says that the other end is closed
        pass
    finally:
        os.close(ours)
        process.kill()
        process.wait()
    return told.decode(errors="replace")


def _command(arguments: tuple[str, ...]) -> list[str]:
    return [sys.executable, "-m", "cli.main", *arguments]
