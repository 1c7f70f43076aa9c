"""The consumer's side: arenas of other processes, mapped read-only."""

import mmap
import os
from pathlib import Path
from weakref import WeakValueDictionary

from quartet.v1 import tensor_pb2
from services.common.rpc.errors import InvalidInput
from services.common.stream.shm.names import OPEN_FLAGS, is_arena_name, is_own_file
from services.common.stream.shm.ranges import ALIGNMENT_BYTES

# By path. An arena stays mapped while a reader or memory read from it lives.
_mappings: WeakValueDictionary[Path, mmap.mmap] = WeakValueDictionary()


class ArenaReader:
    """Reads what one producer put into its arena in `directory`. For the event loop's thread only."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._mapping: mmap.mmap | None = None
        self._name = ""

    def read(self, handle: tensor_pb2.SharedMemory, field: str) -> memoryview:
        """The bytes of `handle`: the producer's memory itself, read-only. They stay mapped while the view lives.

        Raises:
            InvalidInput: names the part of `field` at fault: no arena of this user, or not within it.
        """
        if self._mapping is None or handle.arena != self._name:
            self._mapping, self._name = _map(self._directory, handle.arena, f"{field}.arena"), handle.arena
        if handle.offset_bytes % ALIGNMENT_BYTES:
            raise InvalidInput(f"{field}.offset_bytes", f"must be a multiple of {ALIGNMENT_BYTES}")
        end = handle.offset_bytes + handle.size_bytes
        if not handle.size_bytes or end > len(self._mapping):
            raise InvalidInput(
                f"{field}.size_bytes",
                f"{handle.size_bytes} bytes at {handle.offset_bytes} are not within the arena's {len(self._mapping)}",
            )
        return memoryview(self._mapping)[handle.offset_bytes : end]


def _map(directory: Path, name: str, field: str) -> mmap.mmap:
    if not is_arena_name(name):
        raise InvalidInput(field, "must be 'quartet-' and 32 hexadecimal digits")
    path = directory / name
    if (mapping := _mappings.get(path)) is not None:
        return mapping
    try:
        file = os.open(path, OPEN_FLAGS)
    except OSError as error:
        raise InvalidInput(field, f"'{name}' cannot be opened: {error.strerror}") from None
    try:
        status = os.fstat(file)
        if not is_own_file(status) or status.st_dev != directory.stat().st_dev:
            raise InvalidInput(field, f"'{name}' is not a file of this user on the arenas' file system")
        mapping = _mappings[path] = mmap.mmap(file, status.st_size, mmap.MAP_SHARED, mmap.PROT_READ)
    except ValueError:  # an empty file
        raise InvalidInput(field, f"'{name}' is empty") from None
    finally:
        os.close(file)
    return mapping
