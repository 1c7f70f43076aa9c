"""code2wav, fed with random splits of interleaved streams, is one whole decode by transformers: 16 of 1,000 frames.

What can be asked of float32: rounding is relative to the level of the sound, and over 1.9 million samples the reference
is itself up to 1.5e-5 from its own float64 result at the tiny checkpoint's level (RMS 0.15, loud). At -26 dB, the
nominal level of active speech (ITU-T P.56), both together stay below 1e-5. At the checkpoint's own level, float64 is
compared within 1e-5, and float32 must be as near to the float64 result as the reference is.
"""

import itertools
import queue
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from services.code2wav.engine import DecodeEngine
from services.code2wav.family import Decoder, load_decoder
from services.code2wav.stream import DecodeEnd, Event, Samples
from services.common.engine.process import keep_freed_memory
from tests.support.references.code2wav import load_reference, whole_decode

SIZES = [
    pytest.param((8, 160), id="small"),  # some windows of attention
    pytest.param((16, 1000), id="whole", marks=pytest.mark.weekly),
]
"""(streams, frames of each)"""
TOLERANCE = 1e-5
SPEECH_LEVEL = 10 ** (-26 / 20)  # RMS
GUARD_S = 60.0


class Case:
    """A decoder and the reference, both scaled to the level of speech, and what the reference says to random codes."""

    def __init__(self, checkpoint: Path, streams: int, frames: int) -> None:
        self.streams, self.frames = streams, frames
        self.decoder = load_decoder(str(checkpoint), "float32", "cpu")
        reference = load_reference(checkpoint)
        spec, generator = self.decoder.spec, torch.Generator().manual_seed(1)
        shape = (streams, frames, spec.num_code_groups)
        self.codes = torch.randint(spec.codebook_sizes[0], shape, generator=generator)
        level = whole_decode(reference, self.codes[0, :100]).square().mean().sqrt()
        decoders: list[Any] = [self.decoder, reference]
        for last in (decoder.decoder[-1].conv for decoder in decoders):
            last.weight.requires_grad_(False).mul_(SPEECH_LEVEL / level)
            last.bias.requires_grad_(False).mul_(SPEECH_LEVEL / level)
        self.expected = [whole_decode(reference, codes) for codes in self.codes]


@pytest.fixture(scope="module", params=SIZES)
def case(tiny_checkpoint: Path, request: pytest.FixtureRequest) -> Case:
    keep_freed_memory()  # the reference's whole decodes take half the time
    return Case(tiny_checkpoint, *request.param)


def random_count(left: int, rng: random.Random) -> int:
    return min(left, rng.choice([1, 2, 25, rng.randint(1, 40)]))


def test_the_engine_with_random_arrivals(case: Case):
    computed = case.decoder.frames_computed
    engine = DecodeEngine(case.decoder, case.streams, max_frames_per_step=25)
    rng = random.Random(2)
    queues: list[queue.Queue[Event]] = [queue.Queue() for _ in range(case.streams)]
    streams = [engine.open(events.put) for events in queues]
    done = [0] * case.streams
    try:
        while open_ := [i for i in range(case.streams) if done[i] < case.frames]:
            i = rng.choice(open_)
            count = random_count(case.frames - done[i], rng)
            engine.put(streams[i], case.codes[i, done[i] : done[i] + count])
            done[i] += count
            if done[i] == case.frames:
                engine.finish(streams[i])
        chunks = set()
        for expected, events in zip(case.expected, queues, strict=True):
            pieces, frames = [], [0]
            while isinstance(event := events.get(timeout=GUARD_S), Samples):
                pieces.append(event.samples)
                frames.append(event.frames)
            assert isinstance(event, DecodeEnd)
            assert frames[1] == 1  # the first chunk is one frame
            chunks.update(after - before for before, after in itertools.pairwise(frames))
            actual = torch.cat(pieces)
            assert actual.shape == expected.shape
            assert (actual - expected).abs().max() <= TOLERANCE
    finally:
        engine.stop()
    assert {1, 25} <= chunks
    assert (engine.decoder.frames_computed - computed) / (case.streams * case.frames) == 1.00


def test_batches_of_random_streams_with_random_splits(case: Case):
    """What the engine does not choose: any streams together, whatever their positions, in any number of frames."""
    decoder, rng = case.decoder, random.Random(3)
    computed = decoder.frames_computed
    states = decoder.new_states(case.streams)
    slots: list[Any] = [states.acquire() for _ in range(case.streams)][::-3]
    streams = len(slots)
    pieces: list[list[torch.Tensor]] = [[] for _ in slots]
    done = [0] * streams
    while open_ := [i for i in range(streams) if done[i] < case.frames]:
        together = rng.sample(open_, rng.randint(1, len(open_)))
        count = random_count(case.frames - max(done[i] for i in together), rng)
        codes = torch.stack([case.codes[i, done[i] : done[i] + count] for i in together])
        for i, piece in zip(together, decoder.step(codes, states.batch([slots[i] for i in together])), strict=True):
            pieces[i].append(piece)
            done[i] += count
    for actual, expected in zip(pieces, case.expected[:streams], strict=True):
        assert (torch.cat(actual) - expected).abs().max() <= TOLERANCE
    assert (decoder.frames_computed - computed) / (streams * case.frames) == 1.00


def decode(decoder: Decoder, codes: torch.Tensor) -> torch.Tensor:
    states, rng, done, pieces = decoder.new_states(1), random.Random(4), 0, []
    batch = [states.acquire() or 0]
    while done < len(codes):
        count = random_count(len(codes) - done, rng)
        pieces += decoder.step(codes[None, done : done + count], states.batch(batch))
        done += count
    return torch.cat(pieces)


def test_at_the_checkpoints_own_level(tiny_checkpoint: Path, case: Case):
    codes = case.codes[0]
    reference = load_reference(tiny_checkpoint)
    expected = whole_decode(reference, codes)
    truth = whole_decode(reference.double(), codes)
    assert truth.square().mean().sqrt() > 2 * SPEECH_LEVEL
    assert (decode(load_decoder(str(tiny_checkpoint), "float64", "cpu"), codes) - truth).abs().max() <= TOLERANCE
    ours, theirs = decode(load_decoder(str(tiny_checkpoint), "float32", "cpu"), codes) - truth, expected - truth
    assert ours.square().mean().sqrt() <= 1.25 * theirs.square().mean().sqrt()
    assert ours.abs().max() <= 2 * theirs.abs().max()
