"""Ports of this machine."""

import contextlib
import os
import random
import socket
from pathlib import Path

HOST = "127.0.0.1"  # of the stages
_LISTENING = "0A"  # of /proc/net/tcp


def free_ports(count: int) -> list[int]:
    """Finds free ports below those of outgoing connections: a stage binds its port seconds later."""
    free = filter(_is_free, range(random.randrange(10_000, 29_000), 32_768))
    return [next(free) for _ in range(count)]


def holder(port: int) -> str | None:
    """Returns "NAME (process PID)" of who listens at `port`, or None."""
    links = {f"socket:[{inode}]" for inode in _inodes(port)}
    for folder in Path("/proc").glob("[0-9]*/fd") if links else ():
        with contextlib.suppress(OSError):  # another user's, or gone
            if any(os.readlink(descriptor) in links for descriptor in folder.iterdir()):
                return f"{(folder.parent / 'comm').read_text().strip()} (process {folder.parent.name})"
    return None


def _inodes(port: int) -> set[str]:
    found: set[str] = set()
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            for line in Path("/proc/net", table).read_text().splitlines()[1:]:
                _, local, _, state, *_, inode = line.split()[:10]
                if state == _LISTENING and int(local.rpartition(":")[2], 16) == port:
                    found.add(inode)
    return found


def _is_free(port: int) -> bool:
    with contextlib.suppress(OSError), socket.socket() as probing:
        return probing.bind((HOST, port)) is None
    return False
