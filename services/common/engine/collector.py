"""Keeps Python's garbage collector from stopping a process that serves."""

import atexit
import gc


def freeze_heap() -> None:
    """Takes what exists now out of all later collections.

    Imports and models leave hundreds of thousands of objects that live as long as the process. A full collection walks
    all of them and stops every thread for 0.1 s and more, which a listener hears.
    """
    gc.collect()
    gc.freeze()
    atexit.register(gc.unfreeze)  # extensions that look for leaks at exit would report all of it
