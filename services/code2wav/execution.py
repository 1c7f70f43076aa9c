"""Chooses how code2wav's steps run on a device."""

from dataclasses import dataclass

from services.code2wav.config import Code2WavSettings
from services.common.engine.device import Accelerator, Choice


@dataclass(frozen=True)
class DecodeExecution:
    """How steps run. `choices`: the same in words, with reasons."""

    captured: bool
    choices: tuple[Choice, ...]


def decide(compile: str, accelerator: Accelerator | None) -> DecodeExecution:
    """Chooses for `accelerator`; None is a CPU. `compile` is the setting."""
    if accelerator is None:
        step = Choice("step", "eager", "a CPU has no CUDA graphs")
        return DecodeExecution(captured=False, choices=(step, Choice("attention", "torch's for CPUs", "there is one")))
    step = Choice("step", "CUDA graphs", "steps of 1, 2, 4, ... streams and frames are captured at start")
    if compile == "off":
        step = Choice("step", "eager", "--compile=off")
    attention = Choice("attention", "memory-efficient", "cuDNN would make a plan for each new number of frames")
    return DecodeExecution(captured=compile != "off", choices=(step, attention))


def choices(settings: Code2WavSettings, accelerator: Accelerator | None, dtype: str) -> tuple[Choice, ...]:
    return decide(settings.compile, accelerator).choices
