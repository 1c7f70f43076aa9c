"""Which path a stage's computations take on this machine's device, and why: told in its log and by `quartet doctor`.

Each stage has an `execution.py` whose `choices` decides; its engine does what was decided there, so that what is told
and what runs cannot differ.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import structlog
import torch

log = structlog.get_logger()


@dataclass(frozen=True)
class Accelerator:
    """A CUDA device, as far as stages choose their paths by it.

    Attributes:
        name: as the driver calls it, e.g. "NVIDIA H100 80GB HBM3".
        capability: compute capability, e.g. (9, 0) for sm_90.
        memory_bytes: all of its memory.
    """

    name: str
    capability: tuple[int, int]
    memory_bytes: int

    @classmethod
    def of(cls, device: torch.device) -> "Accelerator | None":
        """The accelerator that `device` is; None for a CPU."""
        if device.type != "cuda":
            return None
        properties = torch.cuda.get_device_properties(device)
        return cls(properties.name, (properties.major, properties.minor), properties.total_memory)

    @property
    def architecture(self) -> str:
        """NVIDIA's name of the compute capability, e.g. "sm_90"."""
        return f"sm_{self.capability[0]}{self.capability[1]}"


@dataclass(frozen=True)
class Choice:
    """One decision.

    Attributes:
        part: what is computed, one word: "step", "attention", "moe", "sampler", ...
        path: how, in few words: "CUDA graphs", "eager", ...
        reason: what decided it, for a person.
        fatal: whether the stage cannot start like this; `reason` says what to change then.
    """

    part: str
    path: str
    reason: str
    fatal: bool = False


def log_choices(choices: Iterable[Choice]) -> None:
    """One line: every part with its path, and the reasons."""
    told = list(choices)
    log.info(
        "execution paths",
        **{choice.part: choice.path for choice in told},
        reasons={choice.part: choice.reason for choice in told},
    )
