"""Tensors between processes of one host, through memory that both map: no copy but the one into it."""

import itertools
import os
from collections.abc import Iterable
from pathlib import Path

import structlog
import torch

from quartet.v1 import stream_pb2, tensor_pb2
from services.common.rpc.errors import InvalidInput
from services.common.rpc.settings import StageSettings
from services.common.stream.arena import Arena, Block
from services.common.stream.arena_files import sweep
from services.common.stream.tensors import describe
from services.common.stream.transport import Notify
from services.common.telemetry import metrics

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_lease_ids = itertools.count(1)

log = structlog.get_logger()


class SharedMemorySession:
    """The leases that one stream's consumer holds in `arena`: a TransportSession."""

    obstacle = "full"

    def __init__(self, arena: Arena, notify: Notify) -> None:
        self._arena, self._notify = arena, notify
        self._blocks: dict[int, Block] = {}
        self._consumer_left = False

    @property
    def outstanding(self) -> int:
        """Number of tensors that the consumer may be reading."""
        return len(self._blocks)

    def reserve(self, size_bytes: int) -> Block | None:
        """See `TransportSession.reserve`."""
        return None if self._consumer_left else self._arena.allocate(size_bytes)

    async def send(self, block: Block, tensor: torch.Tensor) -> tensor_pb2.Tensor:
        """Copies `tensor` (on the CPU) into its reserved `block`; returns the message by which a consumer finds it."""
        await self._arena.fill(block, tensor)
        lease_id = next(_lease_ids)
        self._blocks[lease_id] = block
        message = describe(tensor)
        message.shared_memory.arena = self._arena.name
        message.shared_memory.offset_bytes = block.offset_bytes
        message.shared_memory.size_bytes = block.size_bytes
        message.shared_memory.lease_id = lease_id
        return message

    def release(self, lease_ids: Iterable[int]) -> None:
        """See `TransportSession.release`."""
        for lease_id in lease_ids:
            block = self._blocks.pop(lease_id, None)
            if block is None:
                raise InvalidInput("credit.released", f"this stream holds no lease {lease_id}")
            self._arena.free(block)
        self._notify(None)

    def consumer_left(self) -> None:
        """Frees all blocks: nobody reads them."""
        self._consumer_left = True
        self.release(list(self._blocks))


class SharedMemoryTransport:
    """A Transport over a new arena of `size_bytes` in `directory`, for tensors of `min_bytes` or more.

    Raises:
        OSError: no arena can be made there.
    """

    name = "shared_memory"
    kind = stream_pb2.TRANSPORT_SHARED_MEMORY

    def __init__(self, directory: Path, size_bytes: int, min_bytes: int) -> None:
        self.arena = Arena(directory, size_bytes)
        self.min_bytes = min_bytes
        self._host = host_facts(directory)

    def negotiate(
        self, capabilities: stream_pb2.ConsumerCapabilities, notify: Notify
    ) -> tuple[SharedMemorySession | None, str]:
        """See `Transport.negotiate`."""
        reason = obstacle(capabilities, self._host)
        return (None, reason) if reason else (SharedMemorySession(self.arena, notify), "")

    def close(self) -> None:
        """Removes the arena."""
        self.arena.close()


def open_shared_memory(settings: StageSettings, stage: str) -> SharedMemoryTransport | None:
    """Removes the arenas of killed processes, and makes the stage's own.

    Returns None if the settings want no arena, or, after logging why, if none can be made.
    """
    directory = Path(settings.shared_memory_dir)
    if removed := sweep(directory):
        log.info("removed arenas of dead processes", directory=str(directory), arenas=removed)
    if not settings.shared_memory_mib or "shared_memory" not in settings.transports:
        return None
    try:
        transport = SharedMemoryTransport(
            directory, settings.shared_memory_mib * 2**20, settings.shared_memory_min_bytes
        )
    except OSError as error:
        log.warning("no shared memory: tensors go inline", directory=str(directory), reason=str(error))
        return None
    arena = transport.arena
    metrics.SHARED_MEMORY_SIZE.labels(stage).set(arena.size_bytes)
    metrics.SHARED_MEMORY_USED.labels(stage).set_function(lambda: arena.used_bytes)
    return transport


def host_facts(directory: Path) -> stream_pb2.SharedMemoryHost:
    """What tells whether another process sees the same shared memory in `directory`.

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
