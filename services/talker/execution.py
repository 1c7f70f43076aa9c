"""Which path the talker's steps take on this device, and why."""

from dataclasses import dataclass

from services.common.engine.device import Accelerator, Choice
from services.talker.config import TalkerSettings
from services.talker.moe import RunExperts, grouped_experts, static_experts

# Compute capabilities, by their major number, for which torch has a kernel for grouped products of bfloat16 matrices.
# For others, and other dtypes, it copies the groups' ends to the host, which no graph can hold (torch 2.13).
_GROUPED_KERNEL_MAJORS = (9, 10)


@dataclass(frozen=True)
class Execution:
    """What was decided, and `choices`, the same for people with reasons.

    Attributes:
        captured: steps are CUDA graphs.
        compiled_predictor: the code predictor is compiled, on a CPU.
    """

    captured: bool
    run_experts: RunExperts
    choices: tuple[Choice, ...]
    compiled_predictor: bool = False


def decide(compile: str, accelerator: Accelerator | None, dtype: str) -> Execution:
    """The paths on `accelerator` (None: a CPU) of a model in `dtype`, a name as "bfloat16".

    On a CPU `compile` "on" compiles the code predictor, which takes a minute and a C++ compiler.
    """
    if accelerator is None:
        compiled = compile == "on"
        step = Choice("step", "eager", "a CPU without --compile=on")
        if compiled:
            step = Choice("step", "compiled code predictor", "--compile=on")
        moe = Choice("moe", "grouped matrix products", "a CPU loops over them without waiting")
        attention = Choice("attention", "torch's for CPUs", "there is one")
        return Execution(
            captured=False, run_experts=grouped_experts, choices=(step, moe, attention), compiled_predictor=compiled
        )
    step = Choice("step", "CUDA graphs", "all shapes of a step are captured at start")
    if compile == "off":
        step = Choice("step", "eager", "--compile=off")
    where, experts = f"{accelerator.architecture} in {dtype}", static_experts
    moe = Choice("moe", "static matrix products", f"torch's grouped products wait for the host on {where}")
    if dtype == "bfloat16" and accelerator.capability[0] in _GROUPED_KERNEL_MAJORS:
        experts = grouped_experts
        moe = Choice("moe", "grouped matrix products", f"torch has a kernel for {where}")
    attention = Choice("attention", "flash, memory-efficient", "cuDNN would make a plan for every new prompt length")
    return Execution(captured=compile != "off", run_experts=experts, choices=(step, moe, attention))


def choices(settings: TalkerSettings, accelerator: Accelerator | None, dtype: str) -> tuple[Choice, ...]:
    """For `quartet doctor`."""
    return decide(settings.compile, accelerator, dtype).choices
