"""Chooses how code2wav's steps run on a device."""

from services.code2wav.config import Code2WavSettings
from services.common.engine.device import Accelerator, Choice, captures


def choices(settings: Code2WavSettings, accelerator: Accelerator | None, dtype: str) -> tuple[Choice, ...]:
    chosen = "the default of this decoder and device; another by --dtype" if settings.dtype == "auto" else "--dtype"
    layers = Choice("dtype", dtype.removeprefix("torch."), chosen)
    if accelerator is None:
        step = Choice("step", "eager", "a CPU has no CUDA graphs")
        return step, layers, Choice("attention", "torch's for CPUs", "there is one")
    step = Choice("step", "eager", "--compile=off")
    if captures(settings.compile, accelerator):
        step = Choice("step", "CUDA graphs", "steps of 1, 2, 4, ... streams and frames are captured at start")
    attention = Choice("attention", "memory-efficient", "cuDNN would make a plan for each new number of frames")
    return step, layers, attention
