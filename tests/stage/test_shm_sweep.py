"""What dead processes left in shared memory is removed, and nothing else."""

import signal
from pathlib import Path

import pytest

from cli import reaper
from services.common.stream.arena_files import new_name, sweep
from services.common.stream.shared_memory import Arena
from tests.support.stage.shm import MIB, arena_directory, peer


@pytest.fixture
def directory():
    with arena_directory() as directory:
        yield directory


def test_a_sweep_takes_what_dead_processes_left_and_nothing_else(directory: Path):
    with peer("produce", str(directory)) as (_, told), peer("produce", str(directory)) as (dying, other):
        mine = Arena(directory, MIB)
        foreign = {directory / "quartet-state", directory / "quartet-0123", directory / "psm_1234"}
        for file in foreign:
            file.touch()
        link = directory / new_name()
        link.symlink_to(directory / "quartet-state")
        assert sweep(directory) == 0
        dying.send_signal(signal.SIGKILL)
        dying.wait()
        assert (directory / other["arena"]).exists()  # nobody removed it
        assert sweep(directory) == 1
        assert sweep(directory) == 0
        assert set(directory.iterdir()) == {directory / told["arena"], directory / mine.name, link, *foreign}
        for file in (link, *foreign):
            file.unlink()
        mine.close()
    assert sweep(directory) == 1  # of the first one, which was killed at the end of the block
    assert sweep(directory / "none") == 0


def test_the_end_of_quartet_up_sweeps_too(directory: Path, monkeypatch):
    with peer("produce", str(directory)):
        pass  # killed
    monkeypatch.setattr(reaper, "SHARED_MEMORY", directory)
    reaper.sweep_shared_memory()
    assert not list(directory.iterdir())
