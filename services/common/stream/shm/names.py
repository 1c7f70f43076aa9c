"""What arenas are called, and whose they are."""

import os
import re
import stat
import uuid

_ARENA = re.compile(r"quartet-[0-9a-f]{32}")
# Never through a link, and never waiting for what is no file.
OPEN_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


def new_name() -> str:
    """Name of a new arena."""
    return f"quartet-{uuid.uuid4().hex}"


def is_arena_name(name: str) -> bool:
    """Whether `name` is one that `new_name` makes; then it is no path."""
    return _ARENA.fullmatch(name) is not None


def is_own_file(status: os.stat_result) -> bool:
    """Whether it is a regular file of this user."""
    return stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid()
