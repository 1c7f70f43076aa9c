"""Decoders that look back and never ahead: any number of frames is a step, and every step gives all its samples."""

from abc import abstractmethod
from dataclasses import dataclass

import torch

from services.code2wav.family import Decoder, DecoderSpec, States, Step
from services.code2wav.state import CausalBatch, CausalStates, StateLayout
from services.common.engine.device import CapturedRun, Capturer, power_of_two


class CausalDecoder(Decoder):
    """A decoder whose layers carry what they look back on, so that nothing is computed twice.

    For any split of a stream's frames into steps, whichever streams share its batches, the samples of the steps put
    together are those of one pass over all frames, up to rounding.

    Args:
        spec: of the codec. It has no look-ahead.
        window_frames: frames that a frame attends to, itself included.

    Attributes:
        layout: where in a slot each layer's state lies; the layers fill it when they are made.
    """

    def __init__(self, spec: DecoderSpec, window_frames: int) -> None:
        super().__init__(spec)
        self.window_frames = window_frames
        self.layout = StateLayout()

    @abstractmethod
    def forward(
        self, codes: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor, at_start: bool, settled: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """One step, without any knowledge of slots and without side effects.

        Args:
            codes: (streams, frames, groups), an integer dtype.
            positions: (streams,) int64, frames of each stream before this step.
            rows: (streams, values a slot), their states.
            at_start: whether positions x samples_per_frame may be below the trimmed samples for some stream.
            settled: whether all positions are at least the attention window less one. It saves work, no more.

        Returns:
            Samples, (streams, frames x samples_per_frame), the trimmed ones included; and the states after the step.
        """

    def new_states(self, slots: int) -> CausalStates:
        """States of `slots` streams, on this module's device."""
        return CausalStates(self.layout, slots, self.dtype, self.device)

    @torch.inference_mode()
    def step(self, codes: torch.Tensor, batch: CausalBatch) -> list[torch.Tensor]:
        """As `Decoder.step`: frames x samples_per_frame samples, less what is trimmed at the start of a stream."""
        positions = torch.tensor(batch.frames, device=codes.device)
        settled = min(batch.frames) >= self.window_frames - 1
        self.frames_computed += codes.shape[0] * codes.shape[1]
        at_start = min(batch.frames) * self.spec.samples_per_frame < self.spec.trimmed_samples
        wav, rows = self(codes, positions, batch.load(), at_start, settled)
        batch.store(rows)
        return self.cut(wav, batch)

    def cut(self, wav: torch.Tensor, batch: CausalBatch) -> list[torch.Tensor]:
        """What a step gives each stream of `wav`, (streams, samples), which `forward` made; advances the batch."""
        size, trim = self.spec.samples_per_frame, self.spec.trimmed_samples
        samples = [row[max(0, trim - done * size) :] for row, done in zip(wav.cpu(), batch.frames, strict=True)]
        batch.advance(wav.shape[1] // size)
        return samples

    def captured_step(self, capturer: Capturer, states: States, max_frames: int) -> Step:
        """As `Decoder.captured_step`, for powers of two of streams and of frames."""
        assert isinstance(states, CausalStates)
        return StepGraphs(capturer, self, states, max_frames).step


@dataclass(frozen=True)
class _Captured:
    run: CapturedRun  # its output: (rows, samples), overwritten by every replay
    where: torch.Tensor  # (2, rows) int64: slots, and frames before the step
    codes: torch.Tensor  # (rows, frames, groups) int64


class StepGraphs:
    """Steps of `decoder` on `states`, captured, state handling included: one launch for some hundred kernels.

    They are captured for powers of two of streams and of frames. A batch is filled up to the next power of two with
    rows that belong to no stream. Frames cannot be filled up, as they would advance the state: other numbers of them
    run uncaptured. For one thread.

    Args:
        capturer: captures the steps, largest first. No stream may be open meanwhile.
        max_frames: most frames of a stream in a captured step.
    """

    @torch.inference_mode()
    def __init__(self, capturer: Capturer, decoder: CausalDecoder, states: CausalStates, max_frames: int) -> None:
        self._decoder = decoder
        self._states = states
        self._captured: dict[tuple[int, int], _Captured] = {}
        max_rows = power_of_two(states.slots)
        for frames in reversed([1 << n for n in range(max_frames.bit_length())]):
            for rows in reversed([1 << n for n in range(max_rows.bit_length())]):
                self._captured[rows, frames] = self._capture(capturer, rows, frames)

    @torch.inference_mode()
    def step(self, codes: torch.Tensor, batch: CausalBatch) -> list[torch.Tensor]:
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
