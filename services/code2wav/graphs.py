"""Captured decoder steps, state handling included: one launch for some hundred kernels."""

from dataclasses import dataclass

import torch

from services.code2wav.decoder import Decoder
from services.code2wav.state import Batch, StreamStates
from services.common.engine.device import CapturedRun, Capturer, power_of_two


@dataclass(frozen=True)
class _Captured:
    run: CapturedRun  # its output: (rows, samples), overwritten by every replay
    where: torch.Tensor  # (2, rows) int64: slots, and frames before the step
    codes: torch.Tensor  # (rows, frames, groups) int64


class StepGraphs:
    """Steps of `decoder` on `states`, captured for powers of two of streams and of frames.

    A batch is filled up to the next power of two with rows that belong to no stream. Frames cannot be filled up, as
    they would advance the state: other numbers of them run uncaptured. For one thread.

    Args:
        capturer: captures the steps, largest first. No stream may be open meanwhile.
        max_frames: most frames of a stream in a captured step.
    """

    @torch.inference_mode()
    def __init__(self, capturer: Capturer, decoder: Decoder, states: StreamStates, max_frames: int) -> None:
        self._decoder = decoder
        self._states = states
        self._captured: dict[tuple[int, int], _Captured] = {}
        max_rows = power_of_two(len(states.frames))
        for frames in reversed([1 << n for n in range(max_frames.bit_length())]):
            for rows in reversed([1 << n for n in range(max_rows.bit_length())]):
                self._captured[rows, frames] = self._capture(capturer, rows, frames)

    @torch.inference_mode()
    def step(self, codes: torch.Tensor, batch: Batch) -> list[torch.Tensor]:
        """As `Decoder.step`."""
        streams, frames, _ = codes.shape
        rows = power_of_two(streams)
        captured = self._captured.get((rows, frames))
        if captured is None:
            return self._decoder.step(codes.to(self._states.memory.device), batch)
        padding = rows - streams
        slots = batch.slots + [self._states.padding_slot] * padding
        captured.where.copy_(torch.tensor([slots, batch.frames + [0] * padding]))
        captured.codes[:streams].copy_(codes)
        captured.run.replay()
        self._decoder.frames_computed += rows * frames
        return self._decoder.cut(captured.run.output[:streams].clone(), batch)  # the next replay overwrites it

    def _capture(self, capturer: Capturer, rows: int, frames: int) -> _Captured:
        device, groups = self._states.memory.device, self._decoder.spec.num_code_groups
        where = torch.zeros(2, rows, dtype=torch.int64, device=device)
        where[0] = self._states.padding_slot
        codes = torch.zeros(rows, frames, groups, dtype=torch.int64, device=device)

        def run() -> torch.Tensor:
            slots, positions = where
            before = self._states.memory.index_select(0, slots)
            wav, after = self._decoder(codes, positions, before, at_start=True, settled=False)
            self._states.memory.index_copy_(0, slots, after)
            return wav

        return _Captured(capturer.capture(run), where, codes)
