"""In a process with this folder on PYTHONPATH: SIGUSR1 has it write down what of its memory is in use."""

import ctypes
import gc
import json
import os
import signal
import sys
import tempfile
from pathlib import Path


class _Mallinfo2(ctypes.Structure):
    """struct mallinfo2 of malloc.h: ten sizes, of all arenas together."""

    _fields_ = (("sizes", ctypes.c_size_t * 10),)


_MAPPED, _USED = 4, 7  # hblkhd and uordblks, by their place
_mallinfo2 = ctypes.CDLL(None).mallinfo2
_mallinfo2.restype = _Mallinfo2


def _write(*_: object) -> None:
    gc.collect()
    sizes = _mallinfo2().sizes
    counts = {"blocks": sys.getallocatedblocks(), "malloc_bytes": sizes[_MAPPED] + sizes[_USED]}
    file = Path(tempfile.gettempdir(), f"quartet-test-in-use-{os.getpid()}.json")
    file.with_suffix(".new").write_text(json.dumps(counts))
    file.with_suffix(".new").replace(file)


signal.signal(signal.SIGUSR1, _write)
