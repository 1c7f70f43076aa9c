"""The decode engine with a decoder that looks ahead, takes frames in fours, has voices and draws noise."""

import queue
import random
from collections.abc import Sequence

import pytest
import torch

from services.code2wav.engine import DecodeEngine
from services.code2wav.family import Decoder, DecoderSpec, DecoderStates
from services.code2wav.policy import ChunkPolicy, StepPlan
from services.code2wav.stream import DecodeEnd, Event, Samples
from tests.pure.test_code2wav_policy import FakeStream, playing

GUARD_S = 60.0
LOOKAHEAD, GRANULARITY, SAMPLES = 5, 4, 3
SPEC = DecoderSpec(
    sample_rate_hz=75,
    samples_per_frame=SAMPLES,
    codebook_sizes=(7, 5),
    lookahead_frames=LOOKAHEAD,
    granularity_frames=GRANULARITY,
    voices=("low", "high"),
)


class ToyStates(DecoderStates):
    """Of each slot the frames so far, how many of them have been given out, its voice and its seed."""

    def __init__(self, slots: int) -> None:
        super().__init__(slots)
        self.codes = [torch.zeros(0, 2)] * slots
        self.given = [0] * slots
        self.voices, self.seeds = [""] * slots, [0] * slots

    @property
    def slot_bytes(self) -> int:
        return 0

    def open(self, slot: int, voice: str, seed: int) -> None:
        self.codes[slot], self.given[slot] = torch.zeros(0, 2), 0
        self.voices[slot], self.seeds[slot] = voice, seed

    def batch(self, slots: Sequence[int]) -> tuple["ToyStates", Sequence[int]]:
        return self, slots


class ToyDecoder(Decoder):
    """A frame's samples are its codes and the mean of the LOOKAHEAD frames after it, by voice and seed."""

    def __init__(self) -> None:
        super().__init__(SPEC)
        self.scale = torch.nn.Parameter(torch.full((1,), 0.01), requires_grad=False)
        self.steps: list[tuple[int, int]] = []

    def new_states(self, slots: int) -> ToyStates:
        return ToyStates(slots)

    def step(self, codes: torch.Tensor, batch: tuple[ToyStates, Sequence[int]]) -> list[torch.Tensor]:
        states, slots = batch
        self.steps.append((codes.shape[0], codes.shape[1]))
        self.frames_computed += codes.shape[0] * codes.shape[1]
        for slot, new in zip(slots, codes, strict=True):
            states.codes[slot] = torch.cat([states.codes[slot], new.float()])
        return [self._give(states, slot, len(states.codes[slot]) - LOOKAHEAD) for slot in slots]

    def flush(self, batch: tuple[ToyStates, Sequence[int]]) -> list[torch.Tensor]:
        states, slots = batch
        return [self._give(states, slot, len(states.codes[slot])) for slot in slots]

    def _give(self, states: ToyStates, slot: int, end: int) -> torch.Tensor:
        first, states.given[slot] = states.given[slot], max(end, states.given[slot])
        sound = whole(states.codes[slot], states.voices[slot], states.seeds[slot])
        return sound[first * SAMPLES : states.given[slot] * SAMPLES]


def whole(codes: torch.Tensor, voice: str, seed: int) -> torch.Tensor:
    """The samples of all frames, of which the last ones have nothing after them."""
    value = codes.float().sum(1)
    after = torch.nn.functional.pad(value, (1, LOOKAHEAD)).unfold(0, LOOKAHEAD + 1, 1)[: len(codes) + 1, 1:].mean(1)
    frames = value + after[: len(codes)] + SPEC.voices.index(voice) + seed
    return (frames * 0.01).repeat_interleave(SAMPLES)


@pytest.mark.parametrize("seed", range(5))
def test_a_complete_stream_gives_all_samples_whatever_the_arrival(seed):
    rng, decoder = random.Random(seed), ToyDecoder()
    engine = DecodeEngine(decoder, max_streams=2, max_frames_per_step=8)
    streams, left = [], {}
    for i, frames in enumerate([0, 1, 3, 4, 6, 23, 40]):
        codes = torch.stack([torch.randint(size, (frames,)) for size in SPEC.codebook_sizes], dim=1)
        events: queue.Queue[Event] = queue.Queue()
        voice = rng.choice(SPEC.voices)
        streams.append((codes, voice, i, events))
        left[engine.open(events.put, voice=voice, seed=i)] = codes
    while left:
        stream = rng.choice(list(left))
        count = rng.randint(1, 9)
        engine.put(stream, left[stream][:count])
        left[stream] = left[stream][count:]
        if not len(left[stream]):
            engine.finish(stream)
            del left[stream]
    for codes, voice, noise_seed, events in streams:
        pieces = []
        while isinstance(event := events.get(timeout=GUARD_S), Samples):
            pieces.append(event.samples)
        assert isinstance(event, DecodeEnd)
        assert (event.frames, event.samples) == (len(codes), len(codes) * SAMPLES)
        assert torch.equal(torch.cat([torch.zeros(0), *pieces]), whole(codes, voice, noise_seed))
    assert engine._states.free_slots == 2
    engine.stop()


def policy() -> ChunkPolicy:
    return ChunkPolicy(max_frames=8, max_batch_frames=16, transport_s=0.1, decodable=SPEC.decodable)


@pytest.mark.parametrize(("ready", "frames"), [(3, None), (4, 4), (7, 4), (9, 4)])
def test_a_stream_begins_with_what_the_decoder_takes_at_a_time(ready, frames):
    stream = FakeStream()
    stream.put(ready, 1.0)
    assert policy().choose([stream], 1.0) == (frames and StepPlan(frames, [0]))


def test_the_rest_of_a_complete_stream_is_no_measure_for_others():
    rest, other = playing(3, 0.01, 0.0), playing(7, 0.01, 0.0)
    rest.complete = True
    assert policy().choose([rest, other], 0.0) == StepPlan(3, [0])
    assert policy().choose([other, rest], 0.0) == StepPlan(4, [0])
    assert policy().choose([other, playing(5, 0.01, 0.0)], 0.0) == StepPlan(4, [0, 1])
