"""Records the operations of all threads of this process by torch's profiler."""

import asyncio
import gzip
import shutil
from collections.abc import Sequence
from pathlib import Path

import torch
from torch._C._profiler import _ExperimentalConfig  # torch has no public name for it

_FILE = "torch.json.gz"
_COMPRESSION = 5


class TorchRecorder:
    """Records names and times of operators, and of kernels with CUDA; no shapes, stacks or values."""

    def __init__(self) -> None:
        self._has_cuda = torch.cuda.is_available()
        self._profile: torch.autograd.profiler.profile | None = None

    async def start(self) -> None:
        self._profile = torch.autograd.profiler.profile(
            use_kineto=True,
            use_device="cuda" if self._has_cuda else None,
            experimental_config=_ExperimentalConfig(profile_all_threads=True, trace_only=True),
        )
        if self._has_cuda:  # CUPTI is slow to begin
            await asyncio.to_thread(self._profile.__enter__)
        else:
            self._profile.__enter__()

    async def stop(self, directory: Path) -> Sequence[tuple[str, Path]]:
        """Ends recording; returns [("", file in `directory`)]."""
        assert self._profile is not None
        profile, self._profile = self._profile, None
        file = directory / _FILE
        await asyncio.to_thread(_write, profile, file)
        return [("", file)]


def _write(profile: torch.autograd.profiler.profile, file: Path) -> None:
    profile.__exit__(None, None, None)
    plain = file.with_suffix("")
    profile.export_chrome_trace(str(plain))
    with plain.open("rb") as source, gzip.open(file, "wb", compresslevel=_COMPRESSION) as target:
        shutil.copyfileobj(source, target, 1024 * 1024)
    plain.unlink()
