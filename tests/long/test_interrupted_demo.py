"""Ctrl-C on a `quartet demo`, at moments of its whole life: it ends soon, and nothing is left of it."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.support.systems.stack import START_TIMEOUT_S, until

pytestmark = pytest.mark.long

DEMO = [sys.executable, "-P", "-m", "cli.main", "demo"]
ENDS_WITHIN_S = 60.0  # on a busy machine; the aim of 10 s is for a quiet one, and is printed
SHARED_MEMORY = Path("/dev/shm")

# (what it has said by then, seconds after that, how often ctrl-C is pressed)
MOMENTS = [
    ("code2wav  ready", 3.0, 1),  # the thinker's engine begins
    *(
        pytest.param(*moment, marks=pytest.mark.weekly)
        for moment in (
            ("", 0.3, 1),  # it imports
            ("starting thinker", 0.0, 1),
            ("starting thinker", 4.0, 2),  # the thinker imports vLLM
            ("heard in", 0.2, 1),  # it answers
            ("paints", 0.0, 2),  # it paints, or stops, or has ended
        )
    ),
]
LAST_WORDS = "talk to it"


class Demo:
    """A demo in a session of its own, as on a terminal, with a folder for its temporary files."""

    def __init__(self, directory: Path) -> None:
        self.temporary = directory / "temporary"
        self.temporary.mkdir()
        self._said = directory / "said"
        with self._said.open("wb") as said:
            environment = {**os.environ, "TMPDIR": str(self.temporary), "PYTHONUNBUFFERED": "1"}
            self.process = subprocess.Popen(
                DEMO, cwd=directory, env=environment, stdout=said, stderr=said, start_new_session=True
            )

    @property
    def said(self) -> str:
        return self._said.read_text()

    def press_ctrl_c(self) -> None:
        """As a terminal does: for the group in the foreground."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGINT)

    def processes(self) -> list[psutil.Process]:
        """Those that it has started, and theirs: all that have its folder in their environment."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.environ().get("TMPDIR", "").startswith(str(self.temporary)):
                    found.append(process)
        return [process for process in found if process.status() != psutil.STATUS_ZOMBIE]

    def shared_memory(self) -> set[str]:
        """Files in /dev/shm that its processes have open or mapped."""
        found: set[str] = set()
        for process in self.processes():
            with contextlib.suppress(psutil.Error, OSError):
                found |= {part.path for part in process.memory_maps()}
                found |= {os.readlink(file) for file in Path(f"/proc/{process.pid}/fd").iterdir()}
                found |= {str(file) for file in SHARED_MEMORY.glob(f"__KMP_REGISTERED_LIB_{process.pid}_*")}
        return {file for file in found if file.startswith(f"{SHARED_MEMORY}/") and "(deleted)" not in file}


@pytest.fixture
def demo(tmp_path: Path) -> Iterator[Demo]:
    demo = Demo(tmp_path)
    try:
        yield demo
    finally:
        for process in demo.processes():
            with contextlib.suppress(psutil.Error):
                process.kill()
        demo.process.wait()


@pytest.mark.parametrize(("said", "later_s", "presses"), MOMENTS)
def test_ctrl_c_ends_a_demo_and_leaves_nothing(demo: Demo, said: str, later_s: float, presses: int) -> None:
    end = time.monotonic() + START_TIMEOUT_S
    while said not in demo.said and demo.process.poll() is None:
        assert time.monotonic() < end
        time.sleep(0.02)
    time.sleep(later_s)
    assert demo.process.poll() is None, demo.said
    shared = demo.shared_memory()
    before = time.monotonic()
    for press in range(presses):
        time.sleep(0.5 * press)
        demo.press_ctrl_c()
    demo.process.wait(ENDS_WITHIN_S)
    print(f"ended {time.monotonic() - before:.1f} s after ctrl-C: {demo.process.returncode}")
    assert demo.process.returncode != 0 or LAST_WORDS in demo.said
    until(lambda: not demo.processes(), "all of its processes have ended")
    until(lambda: not any(demo.temporary.iterdir()), "its temporary files are gone")
    assert not [file for file in shared if Path(file).exists()]
