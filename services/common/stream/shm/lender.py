"""What a producer needs to send tensors through shared memory: an arena, and the rule for whom it is."""

from pathlib import Path

import structlog

from quartet.v1 import stream_pb2
from services.common.rpc.settings import StageSettings
from services.common.stream.carriers import Notify
from services.common.stream.shm.arena import Arena
from services.common.stream.shm.host import host, obstacle
from services.common.stream.shm.leases import Leases
from services.common.stream.shm.sweep import sweep
from services.common.telemetry import metrics

log = structlog.get_logger()


class Lender:
    """Lends memory of a new arena of `size_bytes` in `directory`, for tensors of `from_bytes` or more: its Carriers.

    Raises:
        OSError: no arena can be made there.
    """

    transport = "shared_memory"
    offered = stream_pb2.TRANSPORT_SHARED_MEMORY

    def __init__(self, directory: Path, size_bytes: int, from_bytes: int) -> None:
        self.arena = Arena(directory, size_bytes)
        self.from_bytes = from_bytes
        self._host = host(directory)

    def terms(self, capabilities: stream_pb2.ConsumerCapabilities, notify: Notify) -> tuple[Leases | None, str]:
        """(Leases for a new stream to a consumer of `capabilities`, ""), or None and why it gets none."""
        reason = obstacle(capabilities, self._host)
        return (None, reason) if reason else (Leases(self.arena, notify), "")

    def close(self) -> None:
        """Removes the arena."""
        self.arena.close()


def open_lender(settings: StageSettings, stage: str) -> Lender | None:
    """Removes what killed processes left, and makes the stage's arena. None, with a logged line, if there is to be none
    or none can be."""
    directory = Path(settings.shared_memory_dir)
    if removed := sweep(directory):
        log.info("removed arenas of dead processes", directory=str(directory), arenas=removed)
    if not settings.shared_memory_mib or "shared_memory" not in settings.transports:
        return None
    try:
        lender = Lender(directory, settings.shared_memory_mib * 2**20, settings.shared_memory_min_bytes)
    except OSError as error:
        log.warning("no shared memory: tensors go inline", directory=str(directory), reason=str(error))
        return None
    arena = lender.arena
    metrics.SHARED_MEMORY_SIZE.labels(stage).set(arena.size_bytes)
    metrics.SHARED_MEMORY_USED.labels(stage).set_function(lambda: arena.used_bytes)
    return lender
