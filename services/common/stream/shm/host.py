"""Whether a producer and a consumer see the same shared memory: compared, never guessed."""

import os
from pathlib import Path

from quartet.v1 import stream_pb2

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def host(directory: Path) -> stream_pb2.SharedMemoryHost:
    """The facts of `directory` in this process.

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
