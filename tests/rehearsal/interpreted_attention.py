"""Attention over the cache in place beside SDPA: interpreted on the CPU, or on a GPU, as `interpreted_kernels.py`."""

import pytest
import torch

from services.common.engine.device import CudaGraphs
from services.talker.attention import SDPA, KeyValueCache, Steps
from services.talker.kernels.attention import InPlaceDecode
from tests.rehearsal.interpreted_kernels import DEVICE, random, rounding_as_a_gpu_s
from tests.support.stage.replay import ReplayedOps

__all__ = ["rounding_as_a_gpu_s"]
TOLERANCES = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


class Slots:
    """A cache full of random numbers, and one step's new rows; the last slot sits out."""

    def __init__(self, steps: Steps, heads: int, kv_heads: int, size: int, positions: int, dtype: torch.dtype) -> None:
        self._steps, self._positions = steps, positions
        shape = (1, 4, kv_heads, positions, size)
        self._cache = KeyValueCache.zeros(shape, dtype, DEVICE, heads_inside=steps is InPlaceDecode)
        self._cache.keys.copy_(random(*shape, dtype=dtype, seed=1))
        self._cache.values.copy_(random(*shape, dtype=dtype, seed=2))
        self.places = torch.full((4,), positions - 1, device=DEVICE)
        self.advances = torch.tensor([1, 1, 1, 0], device=DEVICE)
        # Large queries prefer few keys: whatever the length, what they see is about 1.
        self._query = random(4, heads, size, dtype=dtype, seed=3, scale=4.0)
        self._new = [random(4, kv_heads, size, dtype=dtype, seed=seed) for seed in (4, 5)]

    @torch.inference_mode()
    def step(self) -> torch.Tensor:
        return self._steps(self._cache, self.places, self.advances, self._positions)(0, self._query, *self._new)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "size", "dtype"),
    [(16, 2, 128, torch.bfloat16), (6, 2, 24, torch.float16), (6, 2, 24, torch.float32), (2, 2, 8, torch.bfloat16)],
)
def test_a_captured_step_sees_what_its_places_say(heads: int, kv_heads: int, size: int, dtype: torch.dtype) -> None:
    """Replays look where their inputs say, not where the capture's did."""
    in_place, masked = (Slots(each, heads, kv_heads, size, 300, dtype) for each in (InPlaceDecode, SDPA.steps))
    captured = (ReplayedOps() if DEVICE.type == "cpu" else CudaGraphs(DEVICE)).capture(in_place.step)
    for places in ([0, 63, 298, 299], [64, 127, 65, 299]):
        for slots in (in_place, masked):
            slots.places.copy_(torch.tensor(places))
        captured.replay()
        given, expected = captured.output[:3], masked.step()[:3]
        torch.testing.assert_close(given, expected, rtol=TOLERANCES[dtype], atol=TOLERANCES[dtype])
        assert captured.output[3].isfinite().all()
