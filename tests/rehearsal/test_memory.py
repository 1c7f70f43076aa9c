"""The memory of engines at published sizes is within the share that `quartet budget` and `quartet up` give them."""

from collections.abc import Callable

import pytest
import torch

from cli.budget import CONTEXT_BYTES, MIB, Demand, Layout, Share, other_shares
from services.common.engine.device import CapturedRun, CudaGraphs
from services.families.qwen2_5_omni.code2wav import DTYPES, Token2Wav
from services.talker.attention import SDPA, CacheAttention, PromptChunk
from services.talker.engine import GPU_PREFILL_CHUNK_POSITIONS
from services.talker.execution import cache_attention
from services.talker.moe import grouped_experts
from services.talker.runner import TalkerRunner
from tests.rehearsal.support.gpu import fake_gpu
from tests.rehearsal.support.models import CUDA, decoder, talker
from tests.support.weights.published_sizes import PUBLISHED

pytestmark = pytest.mark.long
DEMAND = Demand(streams=8, talker_positions=8192)
SIZES = {
    "qwen3-omni-30b": "30B",
    "qwen2.5-omni-7b": "7B",
    "qwen2.5-omni-3b": "3B",
    "qwen3-tts-1.7b": "TTS 1.7B",
    "qwen3-tts-0.6b": "TTS 0.6B",
}
SMALLEST_SHARE = 0.3  # of what is given: else the estimate is no use


def share(name: str, stage: str) -> Share:
    return next(each for each in other_shares(PUBLISHED[SIZES[name]], DEMAND, Layout()) if each.stage == stage)


class LargestAlone:
    """Captures each function's first run only, which is the largest."""

    def __init__(self) -> None:
        self._graphs, self._captured = CudaGraphs(CUDA), set[str]()

    def capture(self, run: Callable[[], torch.Tensor]) -> CapturedRun:
        if run.__qualname__ in self._captured:
            return CapturedRun(lambda: None, torch.empty(0))
        self._captured.add(run.__qualname__)
        return self._graphs.capture(run)


def assert_fits(peak_bytes: int, given: Share) -> None:
    """`peak_bytes` is without the CUDA context."""
    room = given.total - CONTEXT_BYTES
    assert peak_bytes <= room, f"{peak_bytes / MIB:.0f} MiB of {room / MIB:.0f}"
    assert peak_bytes >= SMALLEST_SHARE * room, f"{peak_bytes / MIB:.0f} MiB of {room / MIB:.0f}: too much is given"


@pytest.mark.parametrize(("name", "attention"), [*((name, SDPA) for name in SIZES), ("qwen3-omni-30b", None)])
def test_a_talker(name: str, attention: CacheAttention | None):
    """With its longest prompt's last piece, and the largest step."""
    with fake_gpu() as gpu, torch.inference_mode():
        model = talker(name, torch.bfloat16, grouped_experts)
        chosen = attention or cache_attention(None)
        runner = TalkerRunner(model, DEMAND.streams, DEMAND.talker_positions, LargestAlone(), attention=chosen)
        begin = DEMAND.talker_positions - GPU_PREFILL_CHUNK_POSITIONS
        rows = torch.zeros(GPU_PREFILL_CHUNK_POSITIONS, model.spec.talker.hidden, dtype=model.dtype, device=CUDA)
        places = torch.zeros(len(rows), 3, dtype=torch.long)
        runner.prefill([PromptChunk(0, begin, DEMAND.talker_positions, rows, places)])
    assert_fits(gpu.ledger.peak_bytes, share(name, "talker"))


@pytest.mark.parametrize("name", ["qwen3-omni-30b", "qwen3-tts-1.7b"])
def test_a_wave_decoder(name: str):
    with fake_gpu() as gpu, torch.inference_mode():
        made = decoder(name, torch.bfloat16)
        made.captured_step(LargestAlone(), made.new_states(DEMAND.decoded_streams), 16)
    assert_fits(gpu.ledger.peak_bytes, share(name, "code2wav"))


def test_token2wav():
    with fake_gpu() as gpu, torch.inference_mode():
        made = decoder("qwen2.5-omni-7b", DTYPES["cuda"])
        assert isinstance(made, Token2Wav)
        made.captured_step(LargestAlone(), made.new_states(DEMAND.decoded_streams), 0)
    assert_fits(gpu.ledger.peak_bytes, share("qwen2.5-omni-7b", "code2wav"))
