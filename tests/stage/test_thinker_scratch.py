"""The thinker's temporary files go, however it ended."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from services.thinker.environment import SCRATCH_PREFIX, scratch_dir

HOLDER = """
from services.thinker.environment import scratch_dir
with scratch_dir() as path:
    print(path, flush=True)
    input()
"""


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return tmp_path


def hold() -> tuple[subprocess.Popen, Path]:
    """Another process with a directory."""
    command = [sys.executable, "-c", HOLDER]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout
    return process, Path(process.stdout.readline().strip())


def test_it_takes_temporary_files_and_goes_with_its_context(temporary: Path) -> None:
    with scratch_dir() as path:
        assert path.parent == temporary
        assert Path(tempfile.mkdtemp()).parent == path == Path(os.environ["TMPDIR"])
    assert not list(temporary.iterdir())
    assert tempfile.gettempdir() == os.environ["TMPDIR"] == str(temporary)


def test_it_goes_with_a_start_that_fails(temporary: Path) -> None:
    def load() -> None:
        with scratch_dir():
            raise OSError("wrong model")

    with pytest.raises(OSError, match="wrong model"):
        load()
    assert not list(temporary.iterdir())


@pytest.mark.long  # two starts of an engine
def test_what_a_killed_thinker_left_goes_with_the_next_start(temporary: Path) -> None:
    killed, left = hold()
    alive, held = hold()
    killed.kill()
    killed.wait()
    assert left.exists()
    with scratch_dir() as path:
        assert sorted(temporary.glob(f"{SCRATCH_PREFIX}*")) == sorted([held, path])
    alive.communicate("\n")
    assert alive.returncode == 0
    assert not list(temporary.iterdir())
