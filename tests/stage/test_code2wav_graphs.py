"""Half precision on any device, and captured steps on a CUDA device."""

import queue
import random

import pytest
import torch

from services.code2wav import __main__ as code2wav_main
from services.code2wav.causal import CausalDecoder, DecodeGraphs
from services.code2wav.config import Code2WavSettings
from services.code2wav.engine import DecodeEngine
from services.code2wav.family import Decoder, DecoderStates, load_decoder
from services.common.engine.device import Capturer, CudaGraphs
from services.talker import __main__ as talker_main
from services.talker.config import TalkerSettings
from tests.support.stage.replay import ReplayedOps

# RMS of the difference over RMS of the sound. transformers' own code2wav is 0.113 and 0.030 from its float32 result on
# this checkpoint.
NOISE = {"bfloat16": 0.15, "float16": 0.04}


def random_codes(decoder: Decoder, streams: int, frames: int) -> torch.Tensor:
    shape = (streams, frames, decoder.spec.num_code_groups)
    return torch.randint(decoder.spec.codebook_sizes[0], shape, generator=torch.Generator().manual_seed(1))


def decode(decoder: Decoder, codes: torch.Tensor, split: list[int], step=None, states: DecoderStates | None = None):
    """All samples of each stream, in steps of `split` frames."""
    states = states or decoder.new_states(len(codes))
    slots = [slot for _ in codes if (slot := states.acquire()) is not None]
    device = decoder.device
    pieces = [(step or decoder.step)(part.to(device), states.batch(slots)) for part in codes.split(split, dim=1)]
    for slot in slots:
        states.release(slot)
    return torch.stack([torch.cat(piece) for piece in zip(*pieces, strict=True)]).double()


def noise(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual - expected).square().mean().sqrt() / expected.square().mean().sqrt())


@pytest.mark.long
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_differs_by_its_rounding_however_frames_are_split(tiny_checkpoint, dtype, device):
    wide = load_decoder(str(tiny_checkpoint), "float32", "cpu")
    half = load_decoder(str(tiny_checkpoint), dtype, device)
    codes = random_codes(wide, 2, 100)
    expected = decode(wide, codes, [100])
    whole, split = decode(half, codes, [100]), decode(half, codes, [1, 2, 25, 1, 7, 16, 3, 45])
    assert 0 < noise(whole, expected) < NOISE[dtype]
    assert noise(split, expected) < NOISE[dtype]
    assert noise(split, whole) < NOISE[dtype]


CAPTURED = [
    ("cpu", "float32", 1e-4),  # 1.1e-5 on one CPU, below 1e-5 on others: a padded batch is summed in another order
    *(pytest.param("cuda", *case, marks=pytest.mark.gpu) for case in [("float32", 1e-4), *NOISE.items()]),
]


@pytest.mark.parametrize(("device", "dtype", "tolerance"), CAPTURED)
def test_captured_steps_give_what_eager_ones_give(tiny_checkpoint, device, dtype, tolerance):
    decoder = load_decoder(str(tiny_checkpoint), dtype, device)
    codes = random_codes(decoder, 5, 80)  # three rows of padding; more frames than the attention window holds
    split = [1, 2, 4, 8, 3, 1, *[8] * 7, 4, 1]  # 3 is not captured
    assert isinstance(decoder, CausalDecoder)
    states = decoder.new_states(6)
    graphs = DecodeGraphs(capturer_of(decoder), decoder, states, max_frames=8)
    expected = decode(decoder, codes, split)
    for _ in range(2):  # the second time in used slots
        assert noise(decode(decoder, codes, split, graphs.step, states), expected) < tolerance


def capturer_of(decoder: Decoder) -> Capturer:
    """CUDA graphs, or on a CPU what stands in for them."""
    return CudaGraphs(decoder.device) if decoder.device.type == "cuda" else ReplayedOps()


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_an_engine_with_captured_steps_serves(tiny_checkpoint, device):
    decoder = load_decoder(str(tiny_checkpoint), "float32", device)
    codes, rng = random_codes(decoder, 3, 60), random.Random(2)
    expected = decode(decoder, codes, [60])
    engine = DecodeEngine(decoder, 4, max_frames_per_step=4, capturer=capturer_of(decoder))
    queues: list[queue.Queue] = [queue.Queue() for _ in codes]
    streams = [engine.open(events.put) for events in queues]
    for stream, frames in zip(streams, codes, strict=True):
        for part in frames.split(rng.choice([1, 7, 60])):
            engine.put(stream, part)
        engine.finish(stream)
    for events, wanted in zip(queues, expected, strict=True):
        pieces = []
        while hasattr(event := events.get(timeout=60), "samples") and not isinstance(event.samples, int):
            pieces.append(event.samples)
        assert noise(torch.cat(pieces).double(), wanted) < 1e-4
    engine.stop()


@pytest.mark.parametrize("load", [talker_main.load, code2wav_main.start_engine])
def test_loading_keeps_attention_from_cudnn(tiny_checkpoint, load):
    """It would make a plan for each new length of a prompt, 25 to 440 ms, while all else waits."""
    torch.backends.cuda.enable_cudnn_sdp(True)
    settings = TalkerSettings if load is talker_main.load else Code2WavSettings
    loaded = load(settings(model=str(tiny_checkpoint), max_running_requests=1))
    assert not torch.backends.cuda.cudnn_sdp_enabled()
    if isinstance(loaded, DecodeEngine):
        loaded.stop()
