"""What Quartet needs of the system under it, and the commands that install it.

`make setup` runs this file before there is an environment, so it imports the standard library only.
"""

from __future__ import annotations  # an older Python is to say that it is too old

import ctypes
import os
import platform
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

GIB = 2**30
PYTHONS = ((3, 11), (3, 12), (3, 13))
DISK_BYTES = {"thinker-cpu": 6 * GIB, "thinker-cuda": 16 * GIB}  # of an environment, with what pip unpacks meanwhile
MEMORY_BYTES = 4 * GIB  # six processes on the models that come with Quartet take 3 GiB
SHARED_MEMORY = Path("/dev/shm")
SHARED_MEMORY_BYTES = 64 * 2**20


# A package's name in each package manager that has it apart.
NUMA = {"apt": "libnuma1", "dnf": "numactl-libs", "apk": "numactl"}
VENV = {"apt": "python3-venv"}
COMPILER = {"apt": "g++", "dnf": "gcc-c++", "apk": "g++"}
PORTAUDIO = {"apt": "libportaudio2", "dnf": "portaudio", "apk": "portaudio"}
INSTALL = {"apt": "apt-get install -y --no-install-recommends", "dnf": "dnf install -y", "apk": "apk add"}


@dataclass(frozen=True)
class Lack:
    """Something missing; `package` brings it. If `fatal`, Quartet does not run."""

    text: str
    package: dict[str, str] | None = None
    fatal: bool = True


def lacks(thinker: str = "thinker-cpu", folder: Path | None = None) -> Iterator[Lack]:
    """Yields what is missing here.

    Args:
        thinker: the extra: "thinker-cpu" or "thinker-cuda".
        folder: where the environment will be; None: it exists.
    """
    if platform.system() != "Linux":
        yield Lack(f"{platform.system()} is not supported: Quartet runs on Linux; elsewhere in a container or in WSL 2")
        return
    if platform.libc_ver()[0] != "glibc":
        yield Lack("the C library is not glibc: PyTorch and vLLM have no builds for it (Alpine); take Debian or Fedora")
    if sys.version_info[:2] not in PYTHONS:
        there = ", ".join(f"{major}.{minor}" for major, minor in PYTHONS)
        yield Lack(f"Python {platform.python_version()}: Quartet needs one of {there}; name it: make PYTHON=python3.11")
    if folder is not None and find_spec("ensurepip") is None:
        yield Lack("Python's venv with pip (module ensurepip)", VENV)
    if thinker == "thinker-cpu" and not _loads("libnuma.so.1"):
        yield Lack("libnuma.so.1: vLLM's CPU kernels are linked against it", NUMA)
    yield from _room(thinker, folder)
    if not shutil.which("g++"):
        yield Lack("a C++ compiler (g++): stages compile with it where --compile=on is set", COMPILER, fatal=False)
    if not _loads("libportaudio.so.2"):
        use = "PortAudio (libportaudio.so.2): `quartet talk` reaches microphone and speakers by it"
        yield Lack(use, PORTAUDIO, fatal=False)


def _room(thinker: str, folder: Path | None) -> Iterator[Lack]:
    if folder is not None:
        free, needed = shutil.disk_usage(folder).free, DISK_BYTES[thinker]
        if free < needed:
            yield Lack(f"room on the disk: {folder} has {free / GIB:.1f} GiB free, {needed / GIB:.0f} are needed")
    memory = memory_bytes()
    if memory < MEMORY_BYTES:
        needed = f"the six processes of `make demo` take {MEMORY_BYTES / GIB:.0f}"
        yield Lack(f"memory: there are {memory / GIB:.1f} GiB, and {needed}", fatal=False)
    if not SHARED_MEMORY.is_dir() or not os.access(SHARED_MEMORY, os.W_OK):
        mount = f"mount -t tmpfs tmpfs {SHARED_MEMORY}"
        yield Lack(f"{SHARED_MEMORY}, writable: processes hand each other tensors there: {mount}")
    elif (size := shutil.disk_usage(SHARED_MEMORY).total) < SHARED_MEMORY_BYTES:
        have = f"{SHARED_MEMORY} has {size / 2**20:.0f} MiB"
        yield Lack(f"{have}, {SHARED_MEMORY_BYTES / 2**20:.0f} are needed: mount -o remount,size=1g {SHARED_MEMORY}")


def _loads(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


def usable_cores() -> int:
    """CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def memory_bytes() -> int:
    """Memory of this machine, or of this container."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
    except OSError:
        return total
    return min(total, int(limit)) if limit.isdecimal() else total


def manager() -> str | None:
    return next((name for name in INSTALL if shutil.which("apt-get" if name == "apt" else name)), None)


def command(packages: Sequence[dict[str, str]], by: str) -> str:
    """Returns the command of `by`; empty: nothing to install."""
    names = [package[by] for package in packages if by in package]
    return " ".join([INSTALL[by], *dict.fromkeys(names)]) if names else ""


def commands(packages: Sequence[dict[str, str]]) -> str:
    """Returns how to install `packages` here, or by each manager."""
    found = manager()
    lines = [command(packages, by) for by in ([found] if found else INSTALL)]
    return " | ".join(f"{'' if os.geteuid() == 0 else 'sudo '}{line}" for line in lines if line)
