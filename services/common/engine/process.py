"""How an engine shares its process and machine with event loops: memory, garbage collection, priority."""

import atexit
import contextlib
import ctypes
import gc
import os
import threading

# of <malloc.h>
_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4


def keep_freed_memory() -> None:
    """Has freed memory kept for the next tensor of that size, for the whole process.

    By default glibc returns it to the system with every large tensor, and each step of an engine gets it anew, a page
    fault for every 4 KiB: with eight pictures in a step that was a third of its time. So the process stays as large as
    it once was. Other C libraries are left as they are.
    """
    with contextlib.suppress(AttributeError, OSError):
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


ENGINE_NICENESS = 5


def lower_engine_priority() -> None:
    """Lowers the calling thread's priority, for an engine that computes on the CPU.

    An engine is always busy; an event loop runs for a fraction of a millisecond and then sleeps. With equal priority
    each hop of a token or frame through a loop, of this stage or another on the machine, waits for an engine's slice.
    As a batch thread the engine itself never interrupts another one when it wakes up.
    """
    with contextlib.suppress(AttributeError, OSError):  # Linux only; a sandbox may forbid it
        thread = threading.get_native_id()
        os.sched_setscheduler(thread, os.SCHED_BATCH, os.sched_param(0))
        os.setpriority(os.PRIO_PROCESS, thread, ENGINE_NICENESS)
