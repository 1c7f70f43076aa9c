"""A producer's arena: what it gives out, what is left of it when its process ends, however it does."""

import asyncio
import contextlib
import fcntl
import os
import random
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from services.common.errors import Unavailable
from services.common.stream.arena_files import ALIGNMENT_BYTES
from services.common.stream.shared_memory import SLICE_BYTES, Arena, FreeRanges, aligned
from tests.support.stage.shm import MIB, arena_directory


@given(st.integers(0, 2**32), st.lists(st.integers(1, 3000), min_size=1, max_size=60))
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_blocks_never_overlap_and_all_of_it_comes_back(seed: int, sizes: list[int]):
    order, ranges, total = random.Random(seed), FreeRanges(16 * 1024), 16 * 1024
    taken: list[tuple[int, int]] = []
    for size in sizes:
        if taken and order.random() < 0.4:
            ranges.free(*taken.pop(order.randrange(len(taken))))
        offset = ranges.allocate(size)
        if offset is None:
            assert ranges.free_bytes < total
            continue
        assert offset % ALIGNMENT_BYTES == 0
        assert 0 <= offset <= total - aligned(size)
        assert all(offset >= begin + aligned(other) or offset + aligned(size) <= begin for begin, other in taken)
        taken.append((offset, size))
        assert ranges.free_bytes == total - sum(aligned(size) for _, size in taken)
    order.shuffle(taken)
    for block in taken:
        ranges.free(*block)
    assert ranges.allocate(total) == 0  # one range again


@pytest.fixture
def directory():
    with arena_directory() as directory:
        yield directory


async def test_what_is_filled_in_is_in_the_file(directory: Path):
    arena = Arena(directory, 4 * MIB)
    path = directory / arena.name
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.stat().st_blocks * 512 >= 4 * MIB  # not sparse
    for size in (3, SLICE_BYTES, 3 * SLICE_BYTES - 1):
        tensor = torch.randint(0, 256, (size,), dtype=torch.uint8)
        block = arena.allocate(size)
        assert block
        await arena.fill(block, tensor)
        assert path.read_bytes()[block.offset_bytes :][:size] == tensor.numpy().tobytes()
        assert arena.used_bytes == aligned(size)
        arena.free(block)
    assert arena.allocate(4 * MIB + 1) is None
    arena.close()
    arena.close()
    assert arena.allocate(1) is None
    assert not path.exists()


@pytest.mark.parametrize("how", ["given up", "closed"])
async def test_a_copy_that_does_not_end_frees_its_block(directory: Path, how: str):
    arena = Arena(directory, 16 * SLICE_BYTES)
    block = arena.allocate(16 * SLICE_BYTES)
    assert block
    turns = 0

    async def beside() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0)
            turns += 1

    others = asyncio.create_task(beside())
    filling = asyncio.create_task(arena.fill(block, torch.ones(16 * SLICE_BYTES, dtype=torch.uint8)))
    while turns < 2:
        await asyncio.sleep(0)
    assert not filling.done()  # others have their turn between its slices
    if how == "given up":
        filling.cancel()
    else:
        arena.close()
    with pytest.raises(asyncio.CancelledError if how == "given up" else Unavailable):
        await filling
    others.cancel()
    assert arena.used_bytes == 0
    arena.close()


async def test_a_file_system_without_room_is_an_error_at_the_start(directory: Path):
    with pytest.raises(OSError, match=r"No space left|File too large|Cannot allocate"):
        Arena(directory, 2**50)
    with pytest.raises(FileNotFoundError):
        Arena(directory / "none", MIB)
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # other threads close files, too
            assert not os.readlink(link).startswith(str(directory))


def test_an_arena_has_its_lock_before_it_has_its_name(directory: Path, monkeypatch):
    """Else a sweep in between would remove it."""
    seen = []
    link = os.link

    def look(source: str, name: str, **options) -> None:
        link(source, name, **options)
        file = os.open(directory / name, os.O_RDONLY)
        with pytest.raises(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.close(file)
        seen.append(Path(name).name)

    monkeypatch.setattr(os, "link", look)
    arena = Arena(directory, MIB)
    assert seen == [arena.name]
    arena.close()
