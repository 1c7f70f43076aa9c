"""Profiles of vLLM's engine by its own profiler: a trace of operators, kernels and steps for each worker."""

import tempfile
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.config import ProfilerConfig
    from vllm.v1.engine.async_llm import AsyncLLM

_ENDING = ".pt.trace.json.gz"


def profiler_config() -> "ProfilerConfig":
    """What vLLM needs at its start to be profiled later. Traces go to the present temporary directory."""
    from vllm.config import ProfilerConfig

    return ProfilerConfig(
        profiler="torch",
        torch_profiler_dir=str(_directory()),
        torch_profiler_with_stack=False,  # as of the other stages
        torch_profiler_dump_cuda_time_total=False,  # a table, for which the engine would stand still for seconds
        ignore_frontend=True,  # that is this process, which computes nothing
    )


def _directory() -> Path:
    return Path(tempfile.gettempdir()) / "traces"


class VllmRecorder:
    """Records `llm`, which was made with `profiler_config`. Use `start` and `stop` in turns."""

    def __init__(self, llm: "AsyncLLM") -> None:
        self._llm, self._directory, self._prefix = llm, _directory(), ""

    async def start(self) -> None:
        self._prefix = uuid.uuid4().hex
        await self._llm.start_profile(self._prefix)

    async def stop(self, directory: Path) -> Sequence[tuple[str, Path]]:
        """Ends recording; returns the process of each trace, "vLLM RANK", and the file, moved to `directory`.

        Raises:
            FileNotFoundError: vLLM wrote none; its log says why.
        """
        await self._llm.stop_profile()
        traces = list[tuple[str, Path]]()
        for file in sorted(self._directory.glob(f"{self._prefix}_*")):
            if file.name.endswith(_ENDING):
                rank = file.name.partition(".")[0].rpartition("_")[2]  # "rank0" of "dp0_pp0_tp0_..._rank0"
                traces.append((f"vLLM {rank}", file.rename(directory / f"{rank}.json.gz")))
            else:
                file.unlink()  # a table of the same
        if not traces:
            raise FileNotFoundError(f"vLLM wrote no trace to {self._directory}")
        return traces
