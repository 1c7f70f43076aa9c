"""Qwen2.5-Omni's token2wav alone, at its published sizes with random weights: a step decodes a window of every stream.

Its limit is arithmetic, not memory: every mel frame goes through the transformer 72 times.
"""

import argparse
import contextlib
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from rich.table import Table
from torch.utils.flop_counter import FlopCounterMode

import services.families.qwen2_5_omni.token2wav.flow as flow
from benchmarks.stages.real_sizes import fill
from benchmarks.stages.timing import best_s, synchronize
from services.code2wav.windows import Windows
from services.common.engine.device import CudaGraphs, prepared_device
from services.families.qwen2_5_omni.code2wav import WINDOWS, Token2Wav, Token2WavStream, new_decoder
from services.families.qwen2_5_omni.token2wav.flow import MelWindow
from services.families.qwen2_5_omni.voices import VoicePreset

FRAMES_PER_S = 50  # of one stream in real time
WINDOW_EVALUATIONS = flow.STAGES * (flow.POINTS - 1)
_MATRIX, _PRODUCTS = 2048, 10


@dataclass(frozen=True)
class WindowTiming:
    """Of one batch size, a step with all its evaluations. `limit_ms`: its products at the speed of a large one."""

    batch: int
    step_ms: float
    evaluations_per_s: float
    frames_per_s: float
    step_flop: int
    limit_ms: float


class TimedFlow:
    """A decoder's flow: as long as this lives, how long it took and how many products it made are kept."""

    def __init__(self, decoder: Token2Wav, device: torch.device) -> None:
        self.took_s = 0.0
        self.flop = 0
        self.counting = False
        inner = decoder.flow.mel

        def mel(windows: Sequence[MelWindow]) -> list[torch.Tensor]:
            began_s = time.perf_counter()
            with FlopCounterMode(display=False) if self.counting else contextlib.nullcontext() as counted:
                made = inner(windows)
            synchronize(device)
            self.took_s = time.perf_counter() - began_s
            self.flop = counted.get_total_flops() if counted else 0
            return made

        decoder.flow.mel = mel  # pyright: ignore[reportAttributeAccessIssue]


def random_token2wav(device: torch.device, dtype: torch.dtype, window_frames: int) -> Token2Wav:
    """The published model, 0.4 billion parameters, with a voice; windows are of `window_frames`."""
    decoder = new_decoder({"token2wav_config": {}})
    windows = Windows((window_frames,), WINDOWS.past, WINDOWS.future)
    decoder.use({"any": VoicePreset(0, torch.randn(192), torch.randn(300, 80))}, windows)
    fill(decoder)
    decoder.cast(dtype)
    decoder.to(device=device).requires_grad_(False).eval()
    decoder.precompute()
    return decoder


def products_per_s(device: torch.device, dtype: torch.dtype) -> float:
    """Floating-point operations a second of a large matrix product, the best of some."""
    a = torch.randn(_MATRIX, _MATRIX, device=device, dtype=dtype)
    return 2 * _MATRIX**3 / best_s(device, _PRODUCTS, lambda: torch.mm(a, a))


@torch.inference_mode()
def measure_windows(options: argparse.Namespace) -> list[WindowTiming]:
    """A timing for each batch size of `options`, which are those of stage_alone.py."""
    device, dtype = prepared_device(options.device), getattr(torch, options.dtype)
    size, evaluations = options.frames, options.evaluations or WINDOW_EVALUATIONS
    # All cost the same: fewer points in time are fewer evaluations, and nothing else.
    flow.POINTS = evaluations // flow.STAGES + 1
    decoder = random_token2wav(device, dtype, size)
    states = decoder.new_states(max(options.batch))
    step = decoder.captured_step(CudaGraphs(device), states, size) if device.type == "cuda" else decoder.step
    flop_per_s = products_per_s(device, dtype)
    print(f"token2wav: a large product of {options.dtype} runs at {flop_per_s / 1e12:.3f} TFLOP/s")
    timed, share = TimedFlow(decoder, device), WINDOW_EVALUATIONS // evaluations
    timings: list[WindowTiming] = []
    stream_flop = 0
    for batch in options.batch:
        slots = [slot for slot in (states.acquire() for _ in range(batch)) if slot is not None]
        speeches: list[Token2WavStream] = states.batch(slots)
        # As far into an utterance as it takes for all context to be there; noise and codes cost what they do later.
        first = torch.randint(decoder.sizes.codes, (batch, WINDOWS.past + WINDOWS.future, 1), device=device)
        for speech, codes in zip(speeches, first, strict=True):
            speech.add(codes[:, 0], decoder.sizes.repeats)
            speech.start = WINDOWS.past
        codes = torch.randint(decoder.sizes.codes, (batch, size, 1), device=device)
        if not stream_flop:  # streams share no product: those of a batch are so many times one's
            timed.counting = True
            with FlopCounterMode(display=False) as counted:
                decoder.step(codes, speeches)
            timed.counting = False
            sound_flop = counted.get_total_flops() - timed.flop
            stream_flop = (timed.flop * share + sound_flop) // batch
        flows_s: list[float] = []
        sounds_s: list[float] = []
        began_s = time.perf_counter()
        while not flows_s or (len(flows_s) < options.steps and time.perf_counter() - began_s < options.seconds):
            before_s = time.perf_counter()
            step(codes, speeches)
            synchronize(device)
            flows_s.append(timed.took_s)
            sounds_s.append(time.perf_counter() - before_s - timed.took_s)
        taken_ms, sound_ms = (statistics.median(each) * 1e3 for each in (flows_s, sounds_s))
        flow_ms, flop = taken_ms * share, stream_flop * batch
        step_ms = flow_ms + sound_ms
        timings.append(
            WindowTiming(
                batch=batch,
                step_ms=step_ms,
                evaluations_per_s=WINDOW_EVALUATIONS / flow_ms * 1e3,
                frames_per_s=batch * size / step_ms * 1e3,
                step_flop=flop,
                limit_ms=flop / flop_per_s * 1e3,
            )
        )
        print(
            f"batch {batch}: {evaluations} evaluations {taken_ms:.1f} ms, sound {sound_ms:.1f} ms; with all "
            f"{WINDOW_EVALUATIONS} evaluations {step_ms:.1f} ms, {flop / 1e12:.2f} TFLOP"
        )
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
            f"{timing.evaluations_per_s:.2f}",
            f"{timing.frames_per_s:.2f}",
            f"{timing.frames_per_s / FRAMES_PER_S:.2f}",
        )
    return shown
