"""What vLLM's CPU build needs of a machine. vLLM itself would only warn, and fail later."""

import ctypes
import platform
import re
import sys
from pathlib import Path

from services.common import failures

CPUINFO = Path("/proc/cpuinfo")
LIBRARY = "libnuma.so.1"
X86 = ("x86_64", "AMD64")


def lacks() -> str | None:
    """What is missing here, and what to do; None: nothing."""
    if sys.platform != "linux":
        return None
    if platform.machine() in X86:
        try:
            found = re.search(r"^flags\s*:(.*)$", CPUINFO.read_text(), re.MULTILINE)
        except OSError:
            found = None
        if found and not {"avx2", "avx512f"} & set(found[1].split()):
            return "this CPU has neither AVX2 nor AVX-512, which vLLM needs: take another machine, or one with a GPU"
    try:
        ctypes.CDLL(LIBRARY)
    except OSError as error:
        return failures.sentence(error)
    return None
