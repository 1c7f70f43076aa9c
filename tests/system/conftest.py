"""Systems that several modules ask: a start takes longer than most of their tests."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.systems.stack import Stack, running
from tests.support.weights.checkpoints import diffusion_checkpoint


class DitSystems:
    """A `quartet up` for each family of diffusion models, started when it is first asked for. A test that kills a
    process of one leaves it ready."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._systems: dict[str, tuple[Stack, contextlib.ExitStack]] = {}

    def get(self, family: str) -> Stack:
        """A running system."""
        if family not in self._systems:
            directory = self._directory / family
            exits, jobs = contextlib.ExitStack(), f"--gateway-arg=--jobs-dir={directory / 'jobs'}"
            system = exits.enter_context(running(self.checkpoint(family), directory / "run", jobs))
            self._systems[family] = system, exits
        return self._systems[family][0]

    def checkpoint(self, family: str) -> Path:
        """What it serves."""
        return diffusion_checkpoint(family)

    def stop(self, family: str) -> None:
        """Stops it; whoever asks for it after that starts it again."""
        _, exits = self._systems.pop(family)
        exits.close()

    def stop_all(self) -> None:
        for family in list(self._systems):
            self.stop(family)


@pytest.fixture(scope="session")
def dit_systems(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DitSystems]:
    systems = DitSystems(tmp_path_factory.mktemp("dit"))
    yield systems
    systems.stop_all()
