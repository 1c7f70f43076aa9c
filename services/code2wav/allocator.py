"""Keeps glibc from giving freed memory back to the kernel after every step, only to fault it in again in the next."""

import ctypes
import logging

log = logging.getLogger(__name__)

# malloc.h: M_TRIM_THRESHOLD, M_MMAP_MAX. The same as MALLOC_TRIM_THRESHOLD_ and MALLOC_MMAP_MAX_ in the environment.
_TRIM_THRESHOLD, _MMAP_MAX = -1, -4
_KEPT_BYTES = 2**30


def keep_freed_memory() -> bool:
    """Lets this process keep up to 1 GiB of freed memory for reuse. Intermediate results of a step are megabytes large,
    which malloc otherwise maps and unmaps: that took 10 to 50 % of steps of 32 frames and more.

    Returns:
        Whether the C library has such a setting; others are left as they are.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError, TypeError):
        return False
    kept = bool(mallopt(_MMAP_MAX, 0) and mallopt(_TRIM_THRESHOLD, _KEPT_BYTES))
    log.debug("freed memory is kept" if kept else "mallopt refused")
    return kept
