"""An engine's process: memory, garbage collection, priority, its parent's end."""

import atexit
import contextlib
import ctypes
import gc
import logging
import multiprocessing
import multiprocessing.connection
import os
import shutil
import signal
import sys
import threading
from itertools import chain
from pathlib import Path
from typing import NoReturn

# of <malloc.h>
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_MMAP_MAX = -1, -3, -4
_LARGE_BYTES = 512 * 1024
_NICENESS = 5
# of <sys/prctl.h>
_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None


def keep_freed_memory() -> None:
    """Has glibc keep freed memory for later tensors, in the whole process. Other C libraries are left as they are.

    By default each step of an engine gets a large tensor's memory anew from the system, a page fault for every 4 KiB: a
    third of a denoising step with eight pictures, 10 to 50 % of code2wav's steps of 32 frames and more.
    """
    if mallopt := getattr(_LIBC, "mallopt", None):
        mallopt(_M_MMAP_MAX, 0)
        mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)


def free_large_memory() -> None:
    """Has glibc give freed memory of 512 KiB and more back to the system, in the whole process.

    By default it raises this bound to the size of what was freed, up to 32 MiB, and keeps all below: what a process
    holds then grows with each crowd of sessions, whose detectors had 3 MB each.
    """
    if mallopt := getattr(_LIBC, "mallopt", None):
        mallopt(_M_MMAP_THRESHOLD, _LARGE_BYTES)


def freeze_heap() -> None:
    """Takes what exists now out of all later collections. Imports and models leave hundreds of thousands of objects; a
    full collection would walk them and stop every thread for 0.1 s and more, which a listener hears."""
    gc.collect()
    gc.freeze()
    atexit.register(gc.unfreeze)  # extensions that look for leaks at exit would report all of it


def end_now(status: int = 0) -> NoReturn:
    """Ends this process after its exit handlers, without freeing its objects: with vLLM imported that takes 5 s."""
    atexit._run_exitfuncs()  # pyright: ignore[reportPrivateUsage]  there is no public name for it
    logging.shutdown()
    with contextlib.suppress(OSError):  # which Intel's OpenMP runtime removes at an ordinary end
        Path(f"/dev/shm/__KMP_REGISTERED_LIB_{os.getpid()}_{os.getuid()}").unlink()
    os._exit(status)


def resident_bytes(pid: int = 0) -> int:
    """Memory of the process `pid` (0: this one) and those below it, from /proc; 0 without it."""
    pid = pid or os.getpid()
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        children = [file.read_text().split() for file in Path(f"/proc/{pid}/task").glob("*/children")]
    except (OSError, IndexError):  # it is gone, or this is no Linux
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE") + sum(resident_bytes(int(child)) for child in chain(*children))


def lower_priority() -> None:
    """Lowers the calling thread's priority, for an engine that computes on the CPU, and for whatever takes a request's
    files or long texts: with more priority than the engines', one client's files would keep others' tokens waiting.

    With equal priority, each hop of a token or frame through an event loop waits for the time slice of a busy engine. A
    batch thread does not interrupt others when it wakes up.
    """
    with contextlib.suppress(AttributeError, OSError):  # Linux only; a sandbox may forbid it
        thread = threading.get_native_id()
        os.sched_setscheduler(thread, os.SCHED_BATCH, os.sched_param(0))
        os.setpriority(os.PRIO_PROCESS, thread, _NICENESS)


def die_with_parent(parent: int | None = None) -> None:
    """In a child before exec (`preexec_fn`): it is killed with its parent (Linux).

    Args:
        parent: its id, to notice that it was killed before.
    """
    if _LIBC is not None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if parent is not None and os.getppid() != parent:
            os._exit(1)


def end_with_parent(scratch_dir: Path | None = None) -> None:
    """Ends this process when the one that spawned it by `multiprocessing` is gone, and removes `scratch_dir`."""
    parent = multiprocessing.parent_process()
    if parent is None:
        return

    def watch() -> None:
        multiprocessing.connection.wait([parent.sentinel])
        if scratch_dir is not None:
            shutil.rmtree(scratch_dir, ignore_errors=True)
        os._exit(1)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()
