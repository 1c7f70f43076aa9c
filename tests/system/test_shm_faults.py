"""kill -9 of either side of an edge in shared memory."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from services.common.errors import Unavailable
from services.common.stream.arena_files import sweep
from services.common.stream.rows import Chunk, Rows
from services.common.stream.shared_memory import SharedMemoryTransport
from tests.support.stage.shm import MIB, arena_directory, peer, producing, source
from tests.support.stage.streaming import reading, subscribe
from tests.support.systems.stack import HANG_GUARD_S


async def test_a_killed_consumers_memory_is_free_again():
    with arena_directory() as directory:
        transport = SharedMemoryTransport(directory, 8 * MIB, MIB)
        async with producing(transport) as (hub, address):
            with hub.open("s", ["states"]) as stream:
                stream.start(0)
                stream.put([Rows("states", i, torch.full((1, MIB), i, dtype=torch.uint8)) for i in range(4)])
                starting = peer("consume", str(directory), address, "s")
                process, told = await asyncio.to_thread(starting.__enter__)
                try:
                    assert told == {"held": 4}
                    assert transport.arena.used_bytes == 4 * MIB
                    process.kill()
                    async with asyncio.timeout(HANG_GUARD_S):
                        while transport.arena.used_bytes:
                            await asyncio.sleep(0.01)
                    assert stream.consumer_gone
                    await asyncio.wait_for(hub.drain(), HANG_GUARD_S)
                finally:
                    starting.__exit__(None, None, None)


async def _hold(address: str, held: list[Rows], after_each: Callable[[], object]) -> None:
    """Reads a stream into `held`."""
    async with asyncio.timeout(HANG_GUARD_S), subscribe(source(address), "r", []) as messages:
        async for message in messages:
            held += message.rows if isinstance(message, Chunk) else []
            after_each()


async def test_a_killed_producer_is_an_error_and_its_arena_goes_with_the_next_start():
    with arena_directory() as directory, peer("produce", str(directory)) as (process, told):
        held = []
        with reading(directory, "inline", "shared_memory"):
            with pytest.raises(Unavailable):
                await _hold(told["address"], held, lambda: len(held) == 8 and process.kill())
            await asyncio.to_thread(process.wait)  # its connection may be gone before its lock
            # The memory outlives the process and its file for as long as it is read.
            assert (directory / told["arena"]).exists()
            next_start = SharedMemoryTransport(directory, MIB, MIB)
            assert sweep(directory) == 1
            assert [file.name for file in directory.iterdir()] == [next_start.arena.name]
            for i, rows in enumerate(held):
                assert torch.equal(rows.tensor, torch.full((1, MIB), i, dtype=torch.uint8))
            assert told["arena"] in Path("/proc/self/maps").read_text()
            held.clear()
            rows = None
            assert told["arena"] not in Path("/proc/self/maps").read_text()
            next_start.arena.close()


@pytest.mark.long
async def test_a_crash_loop_leaves_nothing():
    with arena_directory() as directory:
        for _ in range(4):
            with peer("produce", str(directory)):
                assert len(list(directory.iterdir())) <= 2
            sweep(directory)
        assert not list(directory.iterdir())
