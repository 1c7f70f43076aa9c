"""Ports of this machine."""

import contextlib
import os
import random
import socket
from collections import deque
from pathlib import Path

HOST = "127.0.0.1"  # of the stages
_LISTENING = "0A"  # of /proc/net/tcp
_claims: deque[socket.socket] = deque(maxlen=128)  # more are not waiting for what will bind them


def free_ports(count: int, but: int | None = None) -> list[int]:
    """Finds free ports other than `but`, below those of outgoing connections, and claims them: who is to listen there
    binds its port seconds later, and whoever asks meanwhile, in this process or another, gets others."""
    free = (port for port in range(random.randrange(10_000, 29_000), 32_768) if port != but and _claim(port))
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


def _claim(port: int) -> bool:
    """Returns whether `port` is free, and claimed by nobody.

    A claim is an abstract Unix socket of the port's number. It is in the same network namespace as the port, and ends
    with the process that holds it."""
    claim = socket.socket(socket.AF_UNIX)
    try:
        claim.bind(f"\0quartet-port-{port}")
        with socket.socket() as probing:
            probing.bind((HOST, port))
    except OSError:
        claim.close()
        return False
    _claims.append(claim)
    return True
