"""Which path the talker's steps take on this device, and why."""

from dataclasses import dataclass

import torch

from services.common.engine.device import Accelerator, Capturer, Choice, CudaGraphs
from services.talker.config import TalkerSettings
from services.talker.moe import RunExperts, grouped_experts, static_experts

# Compute capabilities, by their major number, for which torch has a kernel for grouped products of bfloat16 matrices.
# For others, and other dtypes, it copies the groups' ends to the host, which no graph can hold (torch 2.13).
_GROUPED_KERNEL_MAJORS = (9, 10)


@dataclass(frozen=True)
class Execution:
    """What was decided.

    Attributes:
        captured: steps are CUDA graphs.
        compiled_predictor: the code predictor is compiled, on a CPU.
        run_experts: how layers with experts run them.
        choices: the same for people, with reasons.
    """

    captured: bool
    compiled_predictor: bool
    run_experts: RunExperts
    choices: tuple[Choice, ...]

    def capturer(self, device: torch.device) -> Capturer | None:
        """What captures the runner's steps on `device`."""
        return CudaGraphs(device) if self.captured else None


def decide(enforce_eager: bool | None, accelerator: Accelerator | None, dtype: str) -> Execution:
    """The paths on `accelerator` (None: a CPU) of a model in `dtype`, a name as "bfloat16".

    Args:
        enforce_eager: the setting; None is its default.
    """
    if accelerator is None:
        return _on_cpu(compiled=enforce_eager is False)
    grouped = dtype == "bfloat16" and accelerator.capability[0] in _GROUPED_KERNEL_MAJORS
    where = f"{accelerator.architecture} in {dtype}"
    return Execution(
        captured=not enforce_eager,
        compiled_predictor=False,
        run_experts=grouped_experts if grouped else static_experts,
        choices=(
            Choice("step", "eager", "--enforce-eager")
            if enforce_eager
            else Choice("step", "CUDA graphs", "all shapes of a step are captured at start"),
            Choice("moe", "grouped matrix products", f"torch has a kernel for {where}")
            if grouped
            else Choice("moe", "static matrix products", f"torch's grouped products wait for the host on {where}"),
            Choice("attention", "flash, memory-efficient", "cuDNN would make a plan for every new prompt length"),
        ),
    )


def _on_cpu(compiled: bool) -> Execution:
    step = (
        Choice("step", "compiled code predictor", "--enforce-eager=false")
        if compiled
        else Choice("step", "eager", "a CPU without --enforce-eager=false")
    )
    return Execution(
        captured=False,
        compiled_predictor=compiled,
        run_experts=grouped_experts,
        choices=(
            step,
            Choice("moe", "grouped matrix products", "a CPU loops over them without waiting"),
            Choice("attention", "torch's for CPUs", "there is one"),
        ),
    )


def choices(settings: TalkerSettings, accelerator: Accelerator | None, dtype: str) -> tuple[Choice, ...]:
    """What `decide` decides for these settings, for `quartet doctor`."""
    return decide(settings.enforce_eager, accelerator, dtype).choices
