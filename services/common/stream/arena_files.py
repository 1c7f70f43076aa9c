"""Files of arenas: names, reading, removal of dead processes' files. Free of torch: the command line uses it too."""

import contextlib
import fcntl
import mmap
import os
import re
import stat
import uuid
from pathlib import Path
from weakref import WeakValueDictionary

from quartet.v1 import tensor_pb2
from services.common.errors import InvalidInput, require

ALIGNMENT_BYTES = 64  # of a block's offset: a cache line's, and enough for every element type

_ARENA = re.compile(r"quartet-[0-9a-f]{32}")
# Follows no link, and does not wait where the path is no regular file.
_OPEN_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC

# By path. An arena stays mapped while a reader or a view lives.
_mappings: WeakValueDictionary[Path, mmap.mmap] = WeakValueDictionary()


def new_name() -> str:
    return f"quartet-{uuid.uuid4().hex}"


def is_arena_name(name: str) -> bool:
    """Whether `new_name` could have made it; such a name is never a path."""
    return _ARENA.fullmatch(name) is not None


def is_own_file(status: os.stat_result) -> bool:
    return stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid()


class ArenaReader:
    """Reads one producer's arena in `directory`. For the event loop's thread only."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._mapping: mmap.mmap | None = None
        self._name = ""

    def read(self, handle: tensor_pb2.SharedMemory, field: str) -> memoryview:
        """The producer's memory itself, read-only; mapped while the view lives.

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
    require(is_arena_name(name), field, "must be 'quartet-' and 32 hexadecimal digits")
    path = directory / name
    if (mapping := _mappings.get(path)) is not None:
        return mapping
    try:
        file = os.open(path, _OPEN_FLAGS)
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


def sweep(directory: Path) -> int:
    """Removes every arena of this user in `directory` whose process is gone; returns how many there were.

    A producer locks its arena before the file has a name, and its process holds the lock until it ends. So an arena
    that can be locked has no owner, in any pid namespace.
    """
    removed = 0
    with contextlib.suppress(OSError), os.scandir(directory) as entries:
        for entry in entries:
            if is_arena_name(entry.name):
                with contextlib.suppress(OSError):  # its producer lives, or another sweep was first
                    removed += _remove_if_orphaned(entry.path)
    return removed


def _remove_if_orphaned(path: str) -> bool:
    file = os.open(path, _OPEN_FLAGS)
    try:
        if not is_own_file(os.fstat(file)):
            return False
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.unlink(path)
        return True
    finally:
        os.close(file)
