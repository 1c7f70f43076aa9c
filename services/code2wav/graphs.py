"""CUDA graphs of whole decoder steps, state handling included: one launch for some hundred kernels."""

from dataclasses import dataclass

import torch

from services.code2wav.decoder import Decoder
from services.code2wav.state import Batch, StreamStates
from services.common import cuda_graph


@dataclass(frozen=True)
class _Captured:
    graph: torch.cuda.CUDAGraph
    where: torch.Tensor  # (2, rows) int64: slots, and frames before the step
    codes: torch.Tensor  # (rows, frames, groups) int64
    wav: torch.Tensor  # (rows, samples), overwritten by every replay


class StepGraphs:
    """Steps of `decoder` on `states`, captured for powers of two of streams and of frames.

    A batch is filled up to the next power of two with rows that belong to no stream. Frames cannot be filled up, as
    they would advance the state: other numbers of them run uncaptured. For one thread.
    """

    def __init__(self, decoder: Decoder, states: StreamStates) -> None:
        self._decoder = decoder
        self._states = states
        self._captured: dict[tuple[int, int], _Captured] = {}
        self._pool = torch.cuda.graph_pool_handle()

    @torch.inference_mode()
    def capture(self, max_streams: int, max_frames: int) -> None:
        """Captures every size up to these. No stream may be open."""
        for frames in (1 << n for n in range(max_frames.bit_length())):
            for rows in (1 << n for n in range(_bucket(max_streams).bit_length())):
                self._captured[rows, frames] = self._capture(rows, frames)

    @torch.inference_mode()
    def step(self, codes: torch.Tensor, batch: Batch) -> list[torch.Tensor]:
        """As `Decoder.step`."""
        streams, frames, _ = codes.shape
        rows = _bucket(streams)
        captured = self._captured.get((rows, frames))
        if captured is None:
            return self._decoder.step(codes.to(self._states.memory.device), batch)
        padding = rows - streams
        slots = batch.slots + [self._states.padding_slot] * padding
        captured.where.copy_(torch.tensor([slots, batch.frames + [0] * padding]))
        captured.codes[:streams].copy_(codes)
        captured.graph.replay()
        self._decoder.frames_computed += rows * frames
        return self._decoder.cut(captured.wav[:streams], batch)

    def _capture(self, rows: int, frames: int) -> _Captured:
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

        graph, wav = cuda_graph.capture(run, self._pool, device)
        return _Captured(graph, where, codes, wav)


def _bucket(streams: int) -> int:
    return 1 << (streams - 1).bit_length()
