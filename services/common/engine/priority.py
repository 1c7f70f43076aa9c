"""Which threads go first where engines and event loops share the cores."""

import contextlib
import os
import threading

ENGINE_NICENESS = 5


def yield_to_event_loops() -> None:
    """Lowers the calling thread's priority, for an engine that computes on the CPU.

    An engine is always busy; an event loop runs for a fraction of a millisecond and then sleeps. With equal priority
    each hop of a token or frame through a loop, of this stage or another on the machine, waits for an engine's slice.
    As a batch thread the engine itself never interrupts another one when it wakes up.
    """
    with contextlib.suppress(AttributeError, OSError):  # Linux only; a sandbox may forbid it
        thread = threading.get_native_id()
        os.sched_setscheduler(thread, os.SCHED_BATCH, os.sched_param(0))
        os.setpriority(os.PRIO_PROCESS, thread, ENGINE_NICENESS)
