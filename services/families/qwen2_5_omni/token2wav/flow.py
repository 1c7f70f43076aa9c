"""From noise to a mel spectrogram along the transformer's flow, by guided Runge-Kutta steps."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from services.common.engine.device import CapturedRun, Capturer
from services.families.qwen2_5_omni.token2wav.blocks import Blocks, Neighbours
from services.families.qwen2_5_omni.token2wav.dit import Dit

POINTS = 10  # in time, with POINTS - 1 steps between them
GUIDANCE = 0.5
SWAY = -1.0
STAGES = 4  # of a Runge-Kutta step


def sway_times() -> torch.Tensor:
    """The points in time, 0 to 1, (POINTS,) float32, denser at the start. arXiv:2410.06885."""
    times = torch.linspace(0, 1, POINTS)
    return times + SWAY * (torch.cos(torch.pi / 2 * times) - 1 + times)


def evaluation_times() -> torch.Tensor:
    """The times of all evaluations, (steps x STAGES,) float32."""
    times = sway_times()
    start, length = times[:-1], times.diff()
    return torch.stack([start, start + length * (1 / 3), start + length * (2 / 3), times[1:]], dim=1).flatten()


@dataclass(frozen=True)
class MelWindow:
    """A stretch of a stream.

    Attributes:
        codes: (codes,) int64, on the model's device.
        noise: (codes x repeats, bins) float32, on the CPU.
        voice_rows: see `Dit.voice_rows`.
    """

    codes: torch.Tensor
    noise: torch.Tensor
    voice_rows: torch.Tensor


class _StaticMemory:
    def __init__(self, dit: Dit, rows: int, device: torch.device) -> None:
        sizes = dit.sizes
        self.x = torch.zeros(rows, sizes.block_size, sizes.mel_dim, device=device)
        self.condition = torch.zeros(2, rows, sizes.block_size, sizes.hidden_size, device=device)
        self.step = torch.zeros(1, dtype=torch.int64, device=device)
        self.blocks = Blocks.of([sizes.block_size] * rows, sizes.block_size).to(device)


class Flow:
    """Computes mel frames. All windows of a call share every evaluation, and `evaluations` counts them."""

    def __init__(self, dit: Dit) -> None:
        self._dit = dit
        self._captured: dict[int, tuple[CapturedRun, _StaticMemory]] = {}
        self.evaluations = 0

    def precompute(self, device: torch.device) -> None:
        self._lengths = sway_times().diff().to(device)

    @torch.inference_mode()
    def capture(self, capturer: Capturer, most_blocks: int) -> None:
        """Captures steps of some numbers of blocks; a batch is padded to the next."""
        sizes = {n for exponent in range(most_blocks.bit_length() + 1) for n in (2**exponent, 3 * 2**exponent // 2)}
        device = self._lengths.device
        for rows in sorted((n for n in sizes if n < 2 * most_blocks), reverse=True):
            static = _StaticMemory(self._dit, rows, device)

            def run(static: _StaticMemory = static) -> torch.Tensor:
                neighbours = Neighbours(static.blocks, self._dit.sizes, self._dit.dtype)
                static.x.copy_(self._step(static.x, static.condition, neighbours, static.step))
                static.step.add_(1).remainder_(POINTS - 1)
                return static.x

            self._captured[rows] = capturer.capture(run), static

    @torch.inference_mode()
    def mel(self, windows: Sequence[MelWindow]) -> list[torch.Tensor]:
        """Mel frames of each window, (frames, bins) float32, on the model's device."""
        if not windows:
            return []
        block, device = self._dit.sizes.block_size, self._lengths.device
        frames = [len(window.noise) for window in windows]
        least = sum(-(-n // block) for n in frames)
        rows = min((n for n in self._captured if n >= least), default=least)
        blocks = Blocks.of(frames, block, rows).to(device)
        x = torch.zeros(rows, block, self._dit.sizes.mel_dim)
        condition = torch.zeros(2, rows, block, self._dit.sizes.hidden_size, device=device)
        first = 0
        flat, flat_condition = x.flatten(0, 1), condition.flatten(1, 2)
        places: list[slice] = []
        for window, n in zip(windows, frames, strict=True):
            places.append(slice(first, first + n))
            flat[places[-1]] = window.noise
            flat_condition[:, places[-1]] = self._dit.condition(window.codes, window.voice_rows)
            first += -(-n // block) * block
        captured, x = self._captured.get(rows), x.to(device)
        x = self._replayed(*captured, x, condition, blocks) if captured else self._eager(x, condition, blocks)
        self.evaluations += STAGES * (POINTS - 1)
        flat = x.flatten(0, 1)
        return [flat[place].clone() for place in places]

    def _eager(self, x: torch.Tensor, condition: torch.Tensor, blocks: Blocks) -> torch.Tensor:
        neighbours = Neighbours(blocks, self._dit.sizes, self._dit.dtype)
        for step in range(POINTS - 1):
            x = self._step(x, condition, neighbours, torch.tensor([step], device=x.device))
        return x

    def _replayed(
        self, run: CapturedRun, static: _StaticMemory, x: torch.Tensor, condition: torch.Tensor, blocks: Blocks
    ) -> torch.Tensor:
        static.x.copy_(x)
        static.condition.copy_(condition)
        static.step.zero_()
        for kept, tensor in zip(static.blocks, blocks, strict=True):
            kept.copy_(tensor)
        for _ in range(POINTS - 1):
            run.replay()
        return static.x

    def _step(
        self, x: torch.Tensor, condition: torch.Tensor, neighbours: Neighbours, step: torch.Tensor
    ) -> torch.Tensor:
        """One step of `x`, (blocks, block, bins), by the 3/8 rule. `step`: its index, (1,) int64."""
        length = self._lengths[step]

        def flow(stage: int, at: torch.Tensor) -> torch.Tensor:
            guided, free = self._dit(at, condition, neighbours, STAGES * step + stage)
            return guided + (guided - free) * GUIDANCE

        k1 = flow(0, x)
        k2 = flow(1, x + length * k1 * (1 / 3))
        k3 = flow(2, x + length * (k2 - k1 * (1 / 3)))
        k4 = flow(3, x + length * (k1 - k2 + k3))
        return x + (k1 + 3 * (k2 + k3) + k4) * length / 8
