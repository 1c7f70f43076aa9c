"""How the C library's allocator treats memory that an engine on a CPU frees."""

import contextlib
import ctypes

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
