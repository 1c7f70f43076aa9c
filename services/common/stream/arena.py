"""A producer's arena: one file of fixed size, mapped by this process and by its consumers."""

import asyncio
import fcntl
import mmap
import os
import threading
from bisect import bisect_left
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from services.common.rpc.errors import Unavailable
from services.common.stream.arena_files import ALIGNMENT_BYTES, new_name
from services.common.stream.tensors import as_bytes

# Copied before others get their turn on the event loop: in a tenth of a millisecond or two. Waking a thread for it, and
# being woken by it, takes as long as copying several MiB.
SLICE_BYTES = 1024 * 1024


@dataclass(frozen=True)
class Block:
    """A part of an arena."""

    offset_bytes: int
    size_bytes: int


class Arena:
    """Memory of `size_bytes` in a new file in `directory`. Blocks may be allocated and freed in any thread.

    All of it is allocated at once: a sparse file would kill the process with SIGBUS when the file system is full. The
    file is locked before it has a name, so that no sweep ever takes it for a dead process's.

    Attributes:
        name: of the file in `directory`.
        size_bytes: size of the file.

    Raises:
        OSError: the file system lacks the room, or cannot make files without a name (O_TMPFILE).
    """

    def __init__(self, directory: Path, size_bytes: int) -> None:
        self.name = new_name()
        self.size_bytes = size_bytes
        self._path = directory / self.name
        self._file = os.open(directory, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(self._file, 0, size_bytes)
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Its pages are mapped now, so that no copy waits for page faults.
            self._map = mmap.mmap(self._file, size_bytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
            _give_name(self._file, self._path)
        except BaseException:
            os.close(self._file)
            raise
        self._bytes = np.frombuffer(self._map, dtype=np.uint8)
        self._lock = threading.Lock()
        self._ranges = FreeRanges(size_bytes)
        self._open = True

    @property
    def used_bytes(self) -> int:
        """What allocated blocks take."""
        with self._lock:
            return self.size_bytes - self._ranges.free_bytes

    def allocate(self, size_bytes: int) -> Block | None:
        """A block of `size_bytes` (>= 1) bytes; None when there is no room. Never waits."""
        with self._lock:
            offset = self._ranges.allocate(size_bytes) if self._open else None
        return None if offset is None else Block(offset, size_bytes)

    def free(self, block: Block) -> None:
        """Gives a block back, once."""
        with self._lock:
            self._ranges.free(block.offset_bytes, block.size_bytes)

    async def fill(self, block: Block, tensor: torch.Tensor) -> None:
        """Copies `tensor`, of the block's size and on the CPU, into `block`, a slice at a time. Cancelled, or failing,
        it frees the block itself.

        Raises:
            Unavailable: the arena was closed meanwhile.
        """
        data = as_bytes(tensor)
        try:
            for first in range(0, block.size_bytes, SLICE_BYTES):
                if first:
                    await asyncio.sleep(0)
                if not self._open:
                    raise Unavailable("the stage is stopping")
                end = min(first + SLICE_BYTES, block.size_bytes)
                np.copyto(self._bytes[block.offset_bytes + first : block.offset_bytes + end], data[first:end])
        except BaseException:
            self.free(block)
            raise

    def close(self) -> None:
        """Removes the file. Consumers that have mapped it read on; no block is given out any more."""
        with self._lock:
            if not self._open:
                return
            self._open = False
        self._path.unlink(missing_ok=True)
        del self._bytes
        self._map.close()
        os.close(self._file)


def _give_name(file: int, path: Path) -> None:
    """Links a file that has no name yet."""
    directory = os.open(path.parent, os.O_PATH | os.O_DIRECTORY)
    try:
        # With a dir_fd Python calls linkat, which follows the link in /proc to the open file; link would not.
        os.link(f"/proc/self/fd/{file}", path.name, dst_dir_fd=directory, follow_symlinks=True)
    finally:
        os.close(directory)


class FreeRanges:
    """First-fit allocation in `size_bytes` bytes. Low offsets are used again first: their pages are in caches."""

    def __init__(self, size_bytes: int) -> None:
        self._free = [(0, size_bytes)]  # (offset, size) in bytes, ascending, no two of them adjacent

    def allocate(self, size_bytes: int) -> int | None:
        """Offset, a multiple of ALIGNMENT_BYTES, of `size_bytes` (>= 1) bytes; None if no range has as many."""
        size_bytes = aligned(size_bytes)
        for i, (offset, room) in enumerate(self._free):
            if room >= size_bytes:
                rest = [(offset + size_bytes, room - size_bytes)] if room > size_bytes else []
                self._free[i : i + 1] = rest
                return offset
        return None

    def free(self, offset: int, size_bytes: int) -> None:
        """Takes back what `allocate(size_bytes)` returned at `offset`."""
        size_bytes = aligned(size_bytes)
        i = bisect_left(self._free, (offset, 0))
        first, last = i, i
        if i < len(self._free) and self._free[i][0] == offset + size_bytes:
            size_bytes += self._free[i][1]
            last += 1
        if i and sum(self._free[i - 1]) == offset:
            first -= 1
            offset, size_bytes = self._free[first][0], self._free[first][1] + size_bytes
        self._free[first:last] = [(offset, size_bytes)]

    @property
    def free_bytes(self) -> int:
        """All that is free, in one range or many."""
        return sum(size for _, size in self._free)


def aligned(size_bytes: int) -> int:
    """`size_bytes` rounded up to what it takes of an arena."""
    return -(-size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
