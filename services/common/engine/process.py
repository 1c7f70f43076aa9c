"""How an engine's process behaves on its machine: memory, garbage collection, priority, its parent's end."""

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
_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4
_ENGINE_NICENESS = 5
# of <sys/prctl.h>
_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None


def keep_freed_memory() -> None:
    """Has glibc keep freed memory for the next tensor of that size, in the whole process.

    By default glibc returns the memory of a large tensor to the system, and each step of an engine gets it anew, a page
    fault for every 4 KiB. That was a third of a denoising step with eight pictures, and 10 to 50 % of code2wav's steps
    of 32 frames and more. The process stays as large as it once was. Other C libraries are left as they are.
    """
    with contextlib.suppress(AttributeError, OSError, TypeError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_M_MMAP_MAX, 0)
        mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)


def freeze_heap() -> None:
    """Takes what exists now out of all later collections.

    Imports and models leave hundreds of thousands of objects that live as long as the process. A full collection walks
    all of them and stops every thread for 0.1 s and more, which a listener hears.
    """
    gc.collect()
    gc.freeze()
    atexit.register(gc.unfreeze)  # extensions that look for leaks at exit would report all of it


def end_now(status: int = 0) -> NoReturn:
    """Ends this process after what is registered for its end, without taking its objects apart: with vLLM imported that
    keeps a core busy for 5 s, which someone waits for."""
    atexit._run_exitfuncs()  # pyright: ignore[reportPrivateUsage]  there is no public name for it
    logging.shutdown()
    with contextlib.suppress(OSError):  # Intel's OpenMP runtime would remove it at an ordinary end
        Path(f"/dev/shm/__KMP_REGISTERED_LIB_{os.getpid()}_{os.getuid()}").unlink()
    os._exit(status)


def resident_bytes() -> int:
    """Memory that this process and those below it have; 0 where the system does not say. Looks at /proc."""
    return _resident_bytes(os.getpid())


def _resident_bytes(pid: int) -> int:
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        children = [file.read_text().split() for file in Path(f"/proc/{pid}/task").glob("*/children")]
    except (OSError, IndexError):  # it is gone, or this is no Linux
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE") + sum(_resident_bytes(int(child)) for child in chain(*children))


def lower_engine_priority() -> None:
    """Lowers the calling thread's priority, for an engine that computes on the CPU.

    An engine is always busy; an event loop runs for a fraction of a millisecond and then sleeps. With equal priority
    each hop of a token or frame through a loop, of this stage or another on the machine, waits for an engine's slice.
    As a batch thread the engine itself never interrupts another one when it wakes up.
    """
    with contextlib.suppress(AttributeError, OSError):  # Linux only; a sandbox may forbid it
        thread = threading.get_native_id()
        os.sched_setscheduler(thread, os.SCHED_BATCH, os.sched_param(0))
        os.setpriority(os.PRIO_PROCESS, thread, _ENGINE_NICENESS)


def die_with_parent(parent: int | None = None) -> None:
    """To be called in a child before exec (`preexec_fn`): a parent that is killed takes it along (Linux).

    Args:
        parent: its id; one that was killed before this took effect is noticed by it.
    """
    if _LIBC is not None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if parent is not None and os.getppid() != parent:
            os._exit(1)


def end_with_parent(scratch_dir: Path | None = None) -> None:
    """Ends this process when the one that spawned it is gone, however that ended and whatever this one waits for.

    Else an engine that nobody listens to would keep its memory for ever. Does nothing in a process that
    `multiprocessing` did not spawn.

    Args:
        scratch_dir: removed then: the parent, killed, cannot do so itself.
    """
    parent = multiprocessing.parent_process()
    if parent is None:
        return

    def watch() -> None:
        multiprocessing.connection.wait([parent.sentinel])
        if scratch_dir is not None:
            shutil.rmtree(scratch_dir, ignore_errors=True)
        os._exit(1)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()
