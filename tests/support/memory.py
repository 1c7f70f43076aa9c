"""What of a process's memory is in use. Its resident size says less: allocators keep pages, or not, as they like."""

import json
import os
import signal
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.clock import until

_FOLDER = Path(__file__).parents[1] / "counted"


@dataclass(frozen=True)
class InUse:
    """Blocks of Python's allocator, nearly all of which are objects, and bytes that C took by malloc."""

    blocks: int
    malloc_bytes: int


@contextmanager
def counted() -> Iterator[None]:
    """Processes that are started within can be asked by `in_use`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(_FOLDER), prepend=os.pathsep)
        yield


async def in_use(pid: int) -> InUse:
    """What the process of `counted` has in use, after a full collection."""
    file = Path(tempfile.gettempdir(), f"quartet-test-in-use-{pid}.json")
    os.kill(pid, signal.SIGUSR1)
    await until(file.exists)
    counts = json.loads(file.read_text())
    file.unlink()
    return InUse(**counts)
