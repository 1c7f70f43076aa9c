"""The `quartet` command as users run it."""

import os
import pty
import subprocess
import sys
from pathlib import Path


def quartet(*arguments: str, cwd: Path, timeout_s: float = 300) -> subprocess.CompletedProcess[str]:
    """Runs it to its end; its output goes to pipes."""
    return subprocess.run(_command(arguments), cwd=cwd, capture_output=True, text=True, timeout=timeout_s, check=False)


def start(*arguments: str, cwd: Path) -> subprocess.Popen[str]:
    """Starts it; what it says on stderr goes to a pipe."""
    return subprocess.Popen(_command(arguments), cwd=cwd, stderr=subprocess.PIPE, text=True)


def on_terminal(*arguments: str, cwd: Path) -> tuple[int, str]:
    """Runs it with a terminal as its stderr. (exit status, what the terminal got)."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        _command(arguments), cwd=cwd, stderr=theirs, stdout=subprocess.DEVNULL, env={**os.environ, "TERM": "xterm"}
    )
    os.close(theirs)
    told = b""
    try:
        while block := os.read(ours, 65536):
            told += block
    except OSError:  # the way Linux says that the other end is closed
        pass
    finally:
        os.close(ours)
    return process.wait(), told.decode()


def _command(arguments: tuple[str, ...]) -> list[str]:
    return [sys.executable, "-m", "cli.main", *arguments]
