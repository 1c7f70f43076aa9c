"""Tensors between processes of one host, through memory that both map."""

import asyncio
import fcntl
import itertools
import mmap
import os
from bisect import bisect_left
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import structlog
import torch

from quartet.v1 import stream_pb2, tensor_pb2
from services.common.errors import InvalidInput, Unavailable
from services.common.rpc.settings import StageSettings
from services.common.stream.arena_files import ALIGNMENT_BYTES, new_name, sweep
from services.common.stream.tensors import Notify, as_bytes, describe
from services.common.telemetry import metrics

MIN_BYTES = 64 * 1024  # smaller tensors are as fast inline
# Copied in one go on the event loop, in 0.1 to 0.2 ms. A thread's wake-ups take as long as copying several MiB.
SLICE_BYTES = 1024 * 1024

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_lease_ids = itertools.count(1)

log = structlog.get_logger()


class Arena:
    """Memory in a new file of `directory`. For the event loop's thread only, save `used_bytes`.

    All of it is allocated at once: a sparse file would kill the process with SIGBUS when the file system is full. The
    file is locked before it has a name, so that `sweep` never takes it for a dead process's.

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
            # With a dir_fd Python calls linkat, which follows the link in /proc to the open file; link would not.
            os.link(f"/proc/self/fd/{self._file}", self._path, src_dir_fd=self._file, follow_symlinks=True)
        except BaseException:
            os.close(self._file)
            raise
        self._bytes = np.frombuffer(self._map, dtype=np.uint8)
        self._ranges = FreeRanges(size_bytes)
        self._open = True

    @property
    def used_bytes(self) -> int:
        return self.size_bytes - self._ranges.free_bytes

    def allocate(self, size_bytes: int) -> tensor_pb2.SharedMemory | None:
        """A block of `size_bytes` (>= 1), with no lease yet; None when there is no room."""
        offset = self._ranges.allocate(size_bytes) if self._open else None
        if offset is None:
            return None
        return tensor_pb2.SharedMemory(arena=self.name, offset_bytes=offset, size_bytes=size_bytes)

    def free(self, block: tensor_pb2.SharedMemory) -> None:
        """Gives a block back, once."""
        self._ranges.free(block.offset_bytes, block.size_bytes)

    async def fill(self, block: tensor_pb2.SharedMemory, tensor: torch.Tensor) -> None:
        """Copies `tensor`, of the block's size and on the CPU, a slice at a time. If cancelled or failing, frees the
        block.

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
        """Removes the file and gives out no more blocks; consumers that have mapped it read on."""
        if not self._open:
            return
        self._open = False
        self._path.unlink(missing_ok=True)
        del self._bytes
        self._map.close()
        os.close(self._file)


class FreeRanges:
    """First-fit allocation in `size_bytes` bytes: low offsets, whose pages are in caches, are used again first."""

    def __init__(self, size_bytes: int) -> None:
        self.free_bytes = size_bytes
        self._free = [(0, size_bytes)]  # (offset, size) in bytes, ascending, no two of them adjacent

    def allocate(self, size_bytes: int) -> int | None:
        """Offset, a multiple of ALIGNMENT_BYTES, of `size_bytes` (>= 1) bytes; None if no range has as many."""
        size_bytes = aligned(size_bytes)
        for i, (offset, room) in enumerate(self._free):
            if room >= size_bytes:
                self._free[i : i + 1] = [(offset + size_bytes, room - size_bytes)] if room > size_bytes else []
                self.free_bytes -= size_bytes
                return offset
        return None

    def free(self, offset: int, size_bytes: int) -> None:
        """Takes back what `allocate(size_bytes)` returned at `offset`."""
        size_bytes = aligned(size_bytes)
        self.free_bytes += size_bytes
        i = bisect_left(self._free, (offset, 0))
        first, last = i, i
        if i < len(self._free) and self._free[i][0] == offset + size_bytes:
            size_bytes += self._free[i][1]
            last += 1
        if i and sum(self._free[i - 1]) == offset:
            first -= 1
            offset, size_bytes = self._free[first][0], self._free[first][1] + size_bytes
        self._free[first:last] = [(offset, size_bytes)]


def aligned(size_bytes: int) -> int:
    return -(-size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


class SharedMemorySession:
    """The leases that one stream's consumer holds in `arena`: a TransportSession."""

    obstacle = "full"

    def __init__(self, arena: Arena, notify: Notify) -> None:
        self._arena, self._notify = arena, notify
        self._blocks: dict[int, tensor_pb2.SharedMemory] = {}

    @property
    def outstanding(self) -> int:
        return len(self._blocks)

    def reserve(self, size_bytes: int) -> tensor_pb2.SharedMemory | None:
        return self._arena.allocate(size_bytes)

    async def send(self, block: tensor_pb2.SharedMemory, tensor: torch.Tensor) -> tensor_pb2.Tensor:
        await self._arena.fill(block, tensor)
        block.lease_id = next(_lease_ids)
        self._blocks[block.lease_id] = block
        return describe(tensor, shared_memory=block)

    def release(self, lease_ids: Iterable[int]) -> None:
        for lease_id in lease_ids:
            block = self._blocks.pop(lease_id, None)
            if block is None:
                raise InvalidInput("credit.released", f"this stream holds no lease {lease_id}")
            self._arena.free(block)
        self._notify(None)

    def consumer_left(self) -> None:
        self.release(list(self._blocks))


class SharedMemoryTransport:
    """A Transport over a new arena. Raises OSError: none can be made."""

    name = "shared_memory"

    def __init__(self, directory: Path, size_bytes: int, min_bytes: int) -> None:
        self.arena = Arena(directory, size_bytes)
        self.min_bytes = min_bytes
        self._host = host_facts(directory)

    def negotiate(
        self, capabilities: stream_pb2.ConsumerCapabilities, notify: Notify
    ) -> tuple[SharedMemorySession | None, str]:
        reason = obstacle(capabilities, self._host)
        return (None, reason) if reason else (SharedMemorySession(self.arena, notify), "")

    def close(self) -> None:
        self.arena.close()


def open_shared_memory(settings: StageSettings, stage: str) -> SharedMemoryTransport | None:
    """Removes the arenas of killed processes, and makes the stage's own. None if the settings want none, or, after
    logging why, if there can be none."""
    directory = Path(settings.shared_memory_dir)
    if removed := sweep(directory):
        log.info("removed arenas of dead processes", directory=str(directory), arenas=removed)
    if not settings.shared_memory_mib or "shared_memory" not in settings.transports:
        return None
    try:
        min_bytes = settings.large_tensor_bytes or MIN_BYTES
        transport = SharedMemoryTransport(directory, settings.shared_memory_mib * 2**20, min_bytes)
    except OSError as error:
        log.warning("no shared memory: tensors go inline", directory=str(directory), reason=str(error))
        return None
    arena = transport.arena
    metrics.SHARED_MEMORY_SIZE.labels(stage).set(arena.size_bytes)
    metrics.SHARED_MEMORY_USED.labels(stage).set_function(lambda: arena.used_bytes)
    return transport


def host_facts(directory: Path) -> stream_pb2.SharedMemoryHost:
    """By which another process knows whether it sees the same shared memory in `directory`.

    Raises:
        OSError: there is no such directory.
    """
    status = directory.stat()
    return stream_pb2.SharedMemoryHost(
        boot_id=_BOOT_ID.read_text().strip(), device=status.st_dev, inode=status.st_ino, user_id=os.geteuid()
    )


def obstacle(capabilities: stream_pb2.ConsumerCapabilities, ours: stream_pb2.SharedMemoryHost) -> str:
    """Why a consumer of `capabilities` cannot read this producer's arena; "" if it can."""
    theirs = capabilities.shared_memory_host
    if stream_pb2.TRANSPORT_SHARED_MEMORY not in capabilities.transports:
        return "not_offered"
    if theirs.boot_id != ours.boot_id:
        return "other_host"
    if (theirs.device, theirs.inode) != (ours.device, ours.inode):
        return "other_directory"
    return "" if theirs.user_id == ours.user_id else "other_user"
