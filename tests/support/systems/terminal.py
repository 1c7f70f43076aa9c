"""Types what a document says."""

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from tests.support.documents import ROOT, commands
from tests.support.systems.stack import HANG_GUARD_S, START_TIMEOUT_S, until


def lines(page: str) -> list[str]:
    """What a page says to type, in its order."""
    return list(dict.fromkeys(command.text for command in commands(page)))


class Terminal:
    """A shell in a folder that looks like a checkout after `make setup`.

    Args:
        folder: an empty one.
        said: what the documents say -> what is typed: ports that are free, for one.
        environment: of what is started, beside this process's.
    """

    def __init__(self, folder: Path, said: Mapping[str, str], environment: Mapping[str, str]) -> None:
        self._folder, self._said = folder, said
        self._environment = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
        for name in ("cli", "examples", "gateway", "tests"):
            (folder / name).symlink_to(ROOT / name)
        (folder / ".venv").symlink_to(sys.prefix)

    def type(self, line: str) -> str:
        """Runs a line to its end, which must be a good one; what it printed."""
        done = subprocess.run(
            ["bash", "-euc", self._typed(line)],
            cwd=self._folder,
            env=self._environment,
            capture_output=True,
            text=True,
            timeout=HANG_GUARD_S,
            check=False,
        )
        assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"
        return done.stdout

    @contextlib.contextmanager
    def served(self, line: str, sign: str) -> Iterator[None]:
        """In the block a line runs that has no end by itself, from when it has printed `sign` on."""
        log = self._folder / f"{abs(hash(line))}.log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                ["bash", "-euc", f"exec {self._typed(line)}"],
                cwd=self._folder,
                env=self._environment,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        try:
            until(
                lambda: sign in log.read_text() or process.poll() is not None,
                f"{line} says {sign!r}",
                START_TIMEOUT_S,
            )
            assert process.poll() is None, log.read_text()
            yield
        finally:
            process.terminate()
            process.wait(HANG_GUARD_S)

    def _typed(self, line: str) -> str:
        for word, ours in self._said.items():
            line = line.replace(word, ours)
        return line
