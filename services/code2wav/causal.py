"""Decoders that look back and never ahead: a step takes any number of frames and gives all their samples.

Each layer keeps its last inputs, keys or values, at first zeros like the padding of a whole decode. A stream's state is
a row of one tensor, its slot.
"""

import math
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from services.code2wav.family import Decoder, DecoderSpec, DecoderStates, StepFunction
from services.common.engine.device import CapturedRun, Capturer, power_of_two


class StateLayout:
    """Position of each layer's state in a slot, filled by the layers' constructors."""

    def __init__(self) -> None:
        self.shapes: list[tuple[int, ...]] = []
        self.sizes: list[int] = []

    def add(self, shape: tuple[int, ...]) -> int:
        """Reserves a piece of `shape` (without streams); returns its index."""
        self.shapes.append(shape)
        self.sizes.append(math.prod(shape))
        return len(self.shapes) - 1

    def of(self, rows: torch.Tensor) -> "Carry":
        """Splits `rows`, (streams, values a slot)."""
        pieces = rows.split(self.sizes, dim=1)
        return Carry([piece.unflatten(1, shape) for piece, shape in zip(pieces, self.shapes, strict=True)])


class Carry:
    """The layers' states before and after one step."""

    def __init__(self, pieces: list[torch.Tensor]) -> None:
        self._taken, self._kept = pieces, list(pieces)

    def take(self, piece: int) -> torch.Tensor:
        """Before the step, (streams, ...)."""
        return self._taken[piece]

    def keep(self, piece: int, state: torch.Tensor) -> None:
        """After the step, (streams, ...)."""
        self._kept[piece] = state

    def rows(self) -> torch.Tensor:
        """After the step, (streams, values a slot)."""
        return torch.cat([state.flatten(1) for state in self._kept], dim=1)


class CausalStates(DecoderStates):
    """One more row than slots is for the padding of a batch."""

    def __init__(self, layout: StateLayout, slots: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(slots)
        self.memory = torch.zeros(slots + 1, sum(layout.sizes), dtype=dtype, device=device)
        self.padding_slot = slots
        self.frames = [0] * slots

    @property
    def slot_bytes(self) -> int:
        return self.memory[0].nbytes

    def open(self, slot: int, voice: str, seed: int) -> None:
        self.frames[slot] = 0
        self.memory[slot].zero_()

    def batch(self, slots: Sequence[int]) -> "CausalBatch":
        return CausalBatch(self, slots)


class CausalBatch:
    """States of the streams of a step. `frames`: how many each stream has decoded."""

    def __init__(self, states: CausalStates, slots: Sequence[int]) -> None:
        self.states = states
        self.slots = list(slots)
        self.frames = [states.frames[slot] for slot in self.slots]

    def load(self) -> torch.Tensor:
        """The states, (streams, values a slot); a view if the slots are neighbours."""
        first, count = self.slots[0], len(self.slots)
        if self.slots == list(range(first, first + count)):
            return self.states.memory[first : first + count]
        return self.states.memory.index_select(0, torch.tensor(self.slots, device=self.states.memory.device))

    def store(self, rows: torch.Tensor) -> None:
        self.states.memory.index_copy_(0, torch.tensor(self.slots, device=rows.device), rows)

    def advance(self, frames: int) -> None:
        """Counts the frames of a finished step."""
        for slot in self.slots:
            self.states.frames[slot] += frames


class CausalDecoder(Decoder):
    """A decoder whose layers keep their past. Up to rounding, samples depend neither on a stream's steps nor on the
    batch.

    Args:
        spec: without look-ahead.
        window_frames: frames that a frame attends to, itself included.
    """

    def __init__(self, spec: DecoderSpec, window_frames: int) -> None:
        super().__init__(spec)
        self.window_frames = window_frames
        self.layout = StateLayout()

    @abstractmethod
    def forward(
        self, codes: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor, at_start: bool, settled: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """One step without side effects.

        Args:
            codes: (streams, frames, groups), an integer dtype.
            positions: (streams,) int64, frames of each stream before.
            rows: (streams, values a slot), the states before.
            at_start: whether a stream may be within its trimmed samples.
            settled: every stream has a full window behind it, which saves work.

        Returns:
            Samples, (streams, frames x samples_per_frame), with trimmed ones; and the states after.
        """

    def new_states(self, slots: int) -> CausalStates:
        return CausalStates(self.layout, slots, self.dtype, self.device)

    @torch.inference_mode()
    def step(self, codes: torch.Tensor, batch: CausalBatch) -> list[torch.Tensor]:
        positions = torch.tensor(batch.frames, device=codes.device)
        settled = min(batch.frames) >= self.window_frames - 1
        self.frames_computed += codes.shape[0] * codes.shape[1]
        at_start = min(batch.frames) * self.spec.samples_per_frame < self.spec.trimmed_samples
        wav, rows = self(codes, positions, batch.load(), at_start, settled)
        batch.store(rows)
        return self.cut(wav, batch)

    def cut(self, wav: torch.Tensor, batch: CausalBatch) -> list[torch.Tensor]:
        """Each stream's samples, from `forward`'s, without trimmed ones. Advances the batch."""
        size, trim = self.spec.samples_per_frame, self.spec.trimmed_samples
        samples = [row[max(0, trim - done * size) :] for row, done in zip(wav.cpu(), batch.frames, strict=True)]
        batch.advance(wav.shape[1] // size)
        return samples

    def captured_step(self, capturer: Capturer, states: DecoderStates, max_frames: int) -> StepFunction:
        assert isinstance(states, CausalStates)
        return DecodeGraphs(capturer, self, states, max_frames).step


@dataclass(frozen=True)
class _CapturedStep:
    run: CapturedRun  # its output: (rows, samples), overwritten by every replay
    where: torch.Tensor  # (2, rows) int64: slots, and frames before the step
    codes: torch.Tensor  # (rows, frames, groups) int64


class DecodeGraphs:
    """Captured steps with their state handling, for each power of two of streams and of frames. For one thread.

    Rows without a stream pad a batch. Frames are not padded, as they would advance the state.

    Args:
        capturer: captures the largest steps first. No stream may be open.
        max_frames: most frames of a stream in a captured step.
    """

    @torch.inference_mode()
    def __init__(self, capturer: Capturer, decoder: CausalDecoder, states: CausalStates, max_frames: int) -> None:
        self._decoder, self._states = decoder, states
        self._captured: dict[tuple[int, int], _CapturedStep] = {}
        max_rows = power_of_two(states.slots)
        for frames in reversed([1 << n for n in range(max_frames.bit_length())]):
            for rows in reversed([1 << n for n in range(max_rows.bit_length())]):
                self._captured[rows, frames] = self._capture(capturer, rows, frames)

    @torch.inference_mode()
    def step(self, codes: torch.Tensor, batch: CausalBatch) -> list[torch.Tensor]:
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

    def _capture(self, capturer: Capturer, rows: int, frames: int) -> _CapturedStep:
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

        return _CapturedStep(capturer.capture(run), where, codes)
