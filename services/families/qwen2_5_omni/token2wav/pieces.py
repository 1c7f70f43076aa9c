"""BigVGAN by pieces of fixed lengths, of several streams at once, as captured passes.

A pass has the shapes of one within a signal. At a signal's edges, what a layer gets for places before the start or
after the end is replaced by the layer's padding. So it may be anything, and so may the memory of a slot when a stream
begins.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional as F

from services.common.engine.device import CapturedRun, Capturer, power_of_two
from services.families.qwen2_5_omni.token2wav.bigvgan import BigVgan, Part, VocoderState
from services.families.qwen2_5_omni.token2wav.filters import FilterCarry

MOST_PIECES = 8  # of all streams of a pass
_EDGE = 0  # pieces of a pass at edges: one for each stream, which may lie across an edge
_MOST_PLACE = 2**31 - 1  # in a signal: an int32, half a day of samples at twice their rate


@dataclass(frozen=True)
class _Layer:
    """A layer's inputs, within a signal.

    Attributes:
        tail: shape of the last ones, which it keeps: (channels, samples).
        rate: how many come with a mel frame.
        lag: how many are missing of those of the mel frames so far.
    """

    tail: tuple[int, int]
    rate: int
    lag: int


class _Counting(FilterCarry):
    """Counts each layer's inputs."""

    def __init__(self, tails: Sequence[torch.Tensor | None], taken: Sequence[int]) -> None:
        super().__init__(tails, last=False)
        self.taken = list(taken)

    def extend(
        self,
        layer: int,
        x: torch.Tensor,
        pads: tuple[int, int] = (0, 0),
        cuts: tuple[int, int] = (0, 0),
        mode: str = "",
    ) -> torch.Tensor:
        self.taken[layer] += x.shape[-1] - (0 if self.has_begun(layer) else cuts[0])
        return super().extend(layer, x, pads, cuts, mode)


class _Edges:
    """Places of all layers' inputs in their signals, in passes over `frames` mel frames."""

    def __init__(self, layers: Sequence[_Layer], frames: int, device: torch.device) -> None:
        self._lengths = [layer.tail[1] + frames * layer.rate for layer in layers]

        def of_inputs(of_layers: Sequence[int]) -> torch.Tensor:
            return torch.tensor(of_layers, dtype=torch.int32).repeat_interleave(torch.tensor(self._lengths)).to(device)

        self._rates = of_inputs([layer.rate for layer in layers])
        self._offsets = of_inputs([-layer.lag - layer.tail[1] for layer in layers])
        self._ends = of_inputs([length - 1 for length in self._lengths])
        self._index = torch.cat([torch.arange(length, dtype=torch.int32) for length in self._lengths]).to(device)

    def of(self, before: torch.Tensor, total: torch.Tensor) -> tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]:
        """For each layer's inputs, (streams, samples): the index of the nearest one within the signal, and whether it
        is another one.

        Args:
            before, total: (streams,) int32, mel frames before those of the pass, and of the signal.
        """
        first = before[:, None] * self._rates + self._offsets
        place = first + self._index
        within = place.clamp(min=0).minimum(total[:, None] * self._rates - 1)
        nearest = (within - first).clamp(min=0).minimum(self._ends).long()
        return _split(nearest, self._lengths), _split(within != place, self._lengths)


class _EdgeCarry(FilterCarry):
    """Of a pass anywhere in signals. `nearest`, `outside`: see `_Edges.of`."""

    def __init__(
        self, tails: Sequence[torch.Tensor], nearest: Sequence[torch.Tensor], outside: Sequence[torch.Tensor]
    ) -> None:
        super().__init__(tails, last=False)
        self._nearest, self._outside = nearest, outside

    def extend(
        self,
        layer: int,
        x: torch.Tensor,
        pads: tuple[int, int] = (0, 0),
        cuts: tuple[int, int] = (0, 0),
        mode: str = "",
    ) -> torch.Tensor:
        joined = super().extend(layer, x)
        if mode:
            return joined.gather(2, self._nearest[layer][:, None].expand_as(joined))
        return joined.masked_fill(self._outside[layer][:, None], 0) if any(pads) else joined


@dataclass(frozen=True)
class _Pass:
    """A captured pass.

    Attributes:
        run: its output is (streams, samples).
        where: (3, streams) int32: slots, mel frames before, and of the signal.
        mel: (streams, bins, frames).
    """

    run: CapturedRun
    where: torch.Tensor
    mel: torch.Tensor


@dataclass
class _Signal:
    """A stream's next mel frames (bins, frames), in whole pieces; all frames, once they are known; samples so far."""

    state: VocoderState
    mel: torch.Tensor
    total: int
    samples: list[torch.Tensor]


class PiecedVocoder:
    """`BigVgan.sound` by captured passes: over a power of two of pieces, or a piece at the edge of its signal, for a
    power of two of streams. For one thread.

    Args:
        slots: most streams at a time.
        piece: mel frames. All but the last frames of a stream come in multiples of it.
    """

    @torch.inference_mode()
    def __init__(self, vocoder: BigVgan, capturer: Capturer, slots: int, piece: int) -> None:
        self._vocoder, self._piece, self._padding_slot = vocoder, piece, slots
        self._rate = vocoder.sizes.samples_per_mel
        self._layers, self._lag = _measured(vocoder, piece)
        # From here on no layer has an input before the start.
        self._settled = max(-(-(layer.lag + layer.tail[1]) // layer.rate) for layer in self._layers)
        self._sizes = [layer.tail[0] * layer.tail[1] for layer in self._layers]
        self._memory = torch.zeros(slots + 1, sum(self._sizes), device=vocoder.device)
        self._edges = _Edges(self._layers, piece, vocoder.device)
        self._passes = {shape: self._capture(capturer, *shape) for shape in _shapes(slots)}

    @torch.inference_mode()
    def sound(self, parts: Sequence[Part]) -> list[torch.Tensor]:
        """As `BigVgan.sound`, for states with slots."""
        signals = [self._signal(*part) for part in parts]
        while left := [(self._pieces(signal), signal) for signal in signals if signal.mel.shape[1]]:
            taken, pieces = [signal for n, signal in left if n == _EDGE], _EDGE
            if not taken:
                pieces = power_of_two(max(n for n, _ in left) + 1) // 2
                taken = [signal for n, signal in left if n >= pieces]
            taken = taken[: max(rows for rows, n in self._passes if n == pieces)]
            self._run(self._passes[power_of_two(len(taken)), pieces], taken)
        return [torch.cat([signal.mel.flatten(), *signal.samples]) for signal in signals]

    def _signal(self, state: VocoderState, mel: torch.Tensor, last: bool) -> _Signal:
        frames, total = len(mel), _MOST_PLACE // max(layer.rate for layer in self._layers)
        if last and (total := state.frames + len(mel)):
            # After a signal come so many frames of any content as its samples wait for.
            frames += -(-self._lag // self._rate)
        frames = -(-frames // self._piece) * self._piece
        return _Signal(state, F.pad(mel.T, (0, frames - len(mel))), total, [])

    def _pieces(self, signal: _Signal) -> int:
        """How many of the next pieces are within the signal, for all layers."""
        if signal.state.frames < self._settled:
            return _EDGE
        frames = min(signal.mel.shape[1], signal.total - signal.state.frames)
        return max(_EDGE, min(MOST_PIECES, frames // self._piece))

    def _run(self, captured: _Pass, signals: Sequence[_Signal]) -> None:
        rows, _, frames = captured.mel.shape
        padding = [0] * (rows - len(signals))
        slots = [signal.state.slot for signal in signals] + [self._padding_slot] * len(padding)
        before, total = [signal.state.frames for signal in signals], [signal.total for signal in signals]
        captured.where.copy_(torch.tensor([slots, before + padding, total + padding]))
        for row, signal in enumerate(signals):
            captured.mel[row] = signal.mel[:, :frames]
        captured.run.replay()
        for row, signal in enumerate(signals):
            first = signal.state.frames * self._rate - self._lag
            samples = captured.run.output[row, max(0, -first) : max(0, signal.total * self._rate - first)]
            signal.samples.append(samples.clone())  # the next replay overwrites it
            signal.mel = signal.mel[:, frames:]
            signal.state.frames += frames

    def _capture(self, capturer: Capturer, rows: int, pieces: int) -> _Pass:
        device = self._memory.device
        where = torch.zeros(3, rows, dtype=torch.int32, device=device)
        where[0] = self._padding_slot
        mel = torch.zeros(rows, self._vocoder.sizes.mel_dim, max(1, pieces) * self._piece, device=device)

        def run() -> torch.Tensor:
            slots, before, total = where
            kept = _split(self._memory.index_select(0, slots), self._sizes)
            tails = [each.view(rows, *layer.tail) for each, layer in zip(kept, self._layers, strict=True)]
            carry = FilterCarry(tails, last=False) if pieces else _EdgeCarry(tails, *self._edges.of(before, total))
            samples = self._vocoder.step(mel, carry)
            self._memory.index_copy_(0, slots.long(), torch.cat([tail.flatten(1) for tail in carry.kept], dim=1))
            return samples

        return _Pass(capturer.capture(run), where, mel)


def _shapes(slots: int) -> list[tuple[int, int]]:
    """Streams and pieces of each pass, those with the most memory first."""
    powers = [1 << n for n in range(MOST_PIECES.bit_length())]
    shapes = [(rows, pieces) for rows in powers if rows < 2 * slots for pieces in (_EDGE, *powers)]
    sizes = {shape: shape[0] * max(1, shape[1]) for shape in shapes}
    return sorted((shape for shape in shapes if sizes[shape] <= MOST_PIECES), key=lambda shape: -sizes[shape])


def _split(x: torch.Tensor, sizes: Sequence[int]) -> tuple[torch.Tensor, ...]:
    """(rows, all sizes) -> (rows, size) for each."""
    return torch.split(x, list(sizes), dim=1)


def _measured(vocoder: BigVgan, piece: int) -> tuple[list[_Layer], int]:
    """Of all layers; and how many samples are missing of those of the mel frames so far."""
    frames, state = vocoder.sizes.delay_frames + piece, vocoder.new_state()
    begun = _Counting(state.tails, [0] * len(state.tails))
    samples = vocoder.step(torch.zeros(1, vocoder.sizes.mel_dim, frames, device=vocoder.device), begun)
    going = _Counting(begun.tails, begun.taken)
    vocoder.step(torch.zeros(1, vocoder.sizes.mel_dim, piece, device=vocoder.device), going)
    rates = [(after - before) // piece for before, after in zip(begun.taken, going.taken, strict=True)]
    layers = [
        _Layer((tail.shape[1], tail.shape[2]), rate, frames * rate - taken)
        for tail, rate, taken in zip(going.kept, rates, begun.taken, strict=True)
    ]
    return layers, frames * vocoder.sizes.samples_per_mel - samples.shape[1]
