"""Qwen2.5-Omni's token2wav alone, at its published sizes with random weights: a step decodes a window of every stream.

Its limit is arithmetic, not memory: every mel frame goes through the transformer 72 times.
"""

import argparse
import time
from dataclasses import dataclass

import torch
from alone import synchronize
from real_sizes import fill
from rich.table import Table
from torch.utils.flop_counter import FlopCounterMode

from services.code2wav.windows import Windows
from services.common.engine.device import CudaGraphs, prepared_device
from services.families.qwen2_5_omni.code2wav import WINDOWS, Speech, Token2Wav, new_decoder
from services.families.qwen2_5_omni.voices import Voice

FRAMES_PER_S = 50  # of one stream in real time
_MATRIX = 2048


@dataclass(frozen=True)
class WindowTiming:
    """Of one batch size. `limit_ms`: the step's products at the speed of a large one."""

    batch: int
    step_ms: float
    evaluations_per_s: float
    frames_per_s: float
    step_flop: int
    limit_ms: float


def random_token2wav(device: torch.device, dtype: torch.dtype, window_frames: int) -> Token2Wav:
    """The published model, 0.4 billion parameters, with a voice; windows are of `window_frames`."""
    decoder = new_decoder({"token2wav_config": {}})
    windows = Windows((window_frames,), WINDOWS.past, WINDOWS.future)
    decoder.use({"any": Voice(0, torch.randn(192), torch.randn(300, 80))}, windows)
    fill(decoder)
    decoder.cast(dtype)
    decoder.to(device=device).requires_grad_(False).eval()
    decoder.precompute()
    return decoder


def products_per_s(device: torch.device, dtype: torch.dtype) -> float:
    """Floating-point operations a second of a large matrix product, the best of some."""
    a = torch.randn(_MATRIX, _MATRIX, device=device, dtype=dtype)
    times_s: list[float] = []
    for _ in range(10):
        synchronize(device)
        began_s = time.perf_counter()
        torch.mm(a, a)
        synchronize(device)
        times_s.append(time.perf_counter() - began_s)
    return 2 * _MATRIX**3 / min(times_s)


@torch.inference_mode()
def measure_windows(options: argparse.Namespace) -> list[WindowTiming]:
    """A timing for each batch size of `options`, which are those of stage_alone.py."""
    device, dtype = prepared_device(options.device), getattr(torch, options.dtype)
    size = options.frames
    decoder = random_token2wav(device, dtype, size)
    states = decoder.new_states(max(options.batch))
    step = decoder.captured_step(CudaGraphs(device), states, size) if device.type == "cuda" else decoder.step
    flop_per_s = products_per_s(device, dtype)
    print(f"token2wav: a large product of {options.dtype} runs at {flop_per_s / 1e12:.3f} TFLOP/s")
    timings: list[WindowTiming] = []
    for batch in options.batch:
        slots = [slot for slot in (states.acquire() for _ in range(batch)) if slot is not None]
        speeches: list[Speech] = states.batch(slots)
        # As far into an utterance as it takes for all context to be there; noise and codes cost what they do later.
        first = torch.randint(decoder.sizes.codes, (batch, WINDOWS.past + WINDOWS.future, 1), device=device)
        for speech, codes in zip(speeches, first, strict=True):
            speech.add(codes[:, 0], decoder.sizes.repeats)
            speech.start = WINDOWS.past
        codes = torch.randint(decoder.sizes.codes, (batch, size, 1), device=device)
        with FlopCounterMode(display=False) as counted:
            decoder.step(codes, speeches)
        times_s: list[float] = []
        evaluations, began_s = decoder.flow.evaluations, time.perf_counter()
        while not times_s or (len(times_s) < options.steps and time.perf_counter() - began_s < options.seconds):
            before_s = time.perf_counter()
            step(codes, speeches)
            times_s.append(time.perf_counter() - before_s)
        step_s = sorted(times_s)[len(times_s) // 2]
        flop = counted.get_total_flops()
        a_step = (decoder.flow.evaluations - evaluations) // len(times_s)
        timings.append(
            WindowTiming(batch, step_s * 1e3, a_step / step_s, batch * size / step_s, flop, flop / flop_per_s * 1e3)
        )
        print(f"batch {batch}: {timings[-1].step_ms:.1f} ms a step of {a_step} evaluations, {flop / 1e12:.2f} TFLOP")
        for slot in slots:
            states.release(slot)
    return timings


def windows_table(timings: list[WindowTiming]) -> Table:
    """A row for each batch size."""
    shown = Table()
    rates = ("evaluations/s", "frames/s", "streams in\nreal time")
    for title in ("batch", "step ms", "limit ms", "times limit", *rates):
        shown.add_column(title, justify="right")
    for timing in timings:
        shown.add_row(
            str(timing.batch),
            f"{timing.step_ms:.1f}",
            f"{timing.limit_ms:.1f}",
            f"{timing.step_ms / timing.limit_ms:.1f}",
            f"{timing.evaluations_per_s:.1f}",
            f"{timing.frames_per_s:.1f}",
            f"{timing.frames_per_s / FRAMES_PER_S:.2f}",
        )
    return shown
