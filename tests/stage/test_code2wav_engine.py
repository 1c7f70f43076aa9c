"""The decode engine without a server: batching, slots, cancellation, failure."""

import queue
import random
import threading
import time
from collections.abc import Callable, Iterator

import pytest
import torch
from prometheus_client import REGISTRY

from services.code2wav.engine import DecodeEngine
from services.code2wav.family import Decoder, load_decoder
from services.code2wav.servicer import check_codes
from services.code2wav.stream import DecodeEnd, Event, Samples
from services.common.errors import InternalError, InvalidInput, Unavailable
from tests.support.stage.decode_engine import feed_in_pieces

GUARD_S = 120.0
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def decoder(tiny_checkpoint) -> Decoder:
    return load_decoder(str(tiny_checkpoint), device="cpu")


@pytest.fixture
def engine(decoder) -> Iterator[DecodeEngine]:
    engine = DecodeEngine(decoder, max_streams=2, max_frames_per_step=4)
    yield engine
    engine.stop()


def random_codes(engine: DecodeEngine, frames: int, seed: int) -> torch.Tensor:
    shape = (frames, engine.spec.num_code_groups)
    return torch.randint(engine.spec.codebook_sizes[0], shape, generator=torch.Generator().manual_seed(seed))


def whole(decoder: Decoder, codes: torch.Tensor) -> torch.Tensor:
    states = decoder.new_states(1)
    return decoder.step(codes[None], states.batch([states.acquire() or 0]))[0]


def collect(events: "queue.Queue[Event]") -> tuple[list[Samples], Event]:
    """The samples up to the last event, and that."""
    pieces = []
    while isinstance(event := events.get(timeout=GUARD_S), Samples):
        pieces.append(event)
    return pieces, event


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + GUARD_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def test_more_streams_than_slots_in_random_pieces_give_their_own_samples(decoder, engine):
    rng = random.Random(1)
    codes = [random_codes(engine, rng.choice([0, 1, 5, 30, 80]), seed) for seed in range(8)]
    queues: list[queue.Queue[Event]] = [queue.Queue() for _ in codes]
    streams = [engine.open(events.put) for events in queues]
    feed_in_pieces(engine, streams, codes, rng, 9)
    for part, events in zip(codes, queues, strict=True):
        pieces, end = collect(events)
        assert isinstance(end, DecodeEnd)
        assert end.frames == len(part)
        if not len(part):
            assert (pieces, end.samples) == ([], 0)
            continue
        expected = whole(decoder, part)
        starts = [0, *torch.tensor([len(p.samples) for p in pieces]).cumsum(0).tolist()]
        assert [p.first_sample for p in pieces] == starts[:-1]
        assert end.samples == starts[-1] == len(expected)
        assert pieces[-1].frames == len(part)
        assert (torch.cat([p.samples for p in pieces]) - expected).abs().max() <= TOLERANCE
    assert engine._states.free_slots == 2


def test_the_first_frame_is_decoded_at_once_and_waiting_is_measured(engine):
    events: queue.Queue[Event] = queue.Queue()
    started = threading.Event()
    stream = engine.open(events.put, started.set)
    assert started.wait(GUARD_S)
    with engine.changed:  # the engine has it until it measures
        pass
    time.sleep(0.05)
    engine.put(stream, random_codes(engine, 1, 1))
    first = events.get(timeout=GUARD_S)  # while the stream is open
    assert isinstance(first, Samples)
    assert len(first.samples) == engine.spec.samples_per_frame - engine.spec.trimmed_samples
    engine.finish(stream)
    _, end = collect(events)
    assert isinstance(end, DecodeEnd)
    assert end.waited_ms >= 45


def test_a_long_stream_does_not_hold_up_a_short_one(engine):
    order: queue.Queue[tuple[str, Event]] = queue.Queue()
    long, short = (engine.open(lambda event, name=name: order.put((name, event))) for name in ("long", "short"))
    with engine.changed:  # the engine hears of both at once
        engine.put(long, random_codes(engine, 400, 1))
        engine.put(short, random_codes(engine, 3, 2))
        engine.finish(long)
        engine.finish(short)
    finished = []
    while len(finished) < 2:
        name, event = order.get(timeout=GUARD_S)
        if isinstance(event, DecodeEnd):
            finished.append(name)
    assert finished == ["short", "long"]


def test_pcm16_is_rounded_and_clipped(decoder, engine):
    codes, events = random_codes(engine, 6, 3), queue.Queue()
    stream = engine.open(events.put, pcm16=True)
    engine.put(stream, codes)
    engine.finish(stream)
    pieces, _ = collect(events)
    actual = torch.cat([p.samples for p in pieces])
    assert actual.dtype is torch.int16
    expected = (whole(decoder, codes) * 32768).round().clamp(-32768, 32767)
    assert (actual - expected).abs().max() <= 1  # rounding to the other side of a half


def test_cancel_frees_the_slot_in_every_state_and_the_next_stream_starts_clean(decoder, engine):
    codes = random_codes(engine, 40, 4)
    idle, busy, waiting = queue.Queue(), queue.Queue(), queue.Queue()
    streams = [engine.open(events.put) for events in (idle, busy, waiting)]
    engine.put(streams[1], random_codes(engine, 400, 5))
    busy.get(timeout=GUARD_S)
    assert engine._states.free_slots == 0
    for stream in streams:
        engine.cancel(stream)
        engine.cancel(stream)  # harmless
        engine.put(stream, codes)
        engine.finish(stream)
    busy_events = busy.qsize()
    until(lambda: engine._states.free_slots == 2)
    for _ in range(2):  # both slots
        events: queue.Queue[Event] = queue.Queue()
        stream = engine.open(events.put)
        engine.put(stream, codes)
        engine.finish(stream)
        pieces, _ = collect(events)
        assert (torch.cat([p.samples for p in pieces]) - whole(decoder, codes)).abs().max() <= TOLERANCE
    assert (idle.qsize(), busy.qsize(), waiting.qsize()) == (0, busy_events, 0)


def test_a_thousand_cancelled_streams_leak_no_slot(engine):
    rng = random.Random(6)
    codes = random_codes(engine, 2, 6)
    for _ in range(1000):
        stream = engine.open(lambda event: None)
        if rng.random() < 0.5:
            engine.put(stream, codes)
        if rng.random() < 0.1:
            time.sleep(0.001)
        engine.cancel(stream)
    until(lambda: engine._states.free_slots == 2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c.float(), "codes.dtype: must be an integer"),
        (lambda c: c[:, :-1], r"codes.shape: must be \(frames, \d+\), not \(5, \d+\)"),
        (lambda c: c[0], r"codes.shape: must be \(frames, \d+\), not \(\d+,\)"),
        (lambda c: c.index_fill(1, torch.tensor([3]), 10**6), r"code 1000000 of frame 0, group 3, must be 0 to \d+"),
        (lambda c: c.index_fill(0, torch.tensor([2]), -1), r"code -1 of frame 2, group 0, must be 0 to \d+"),
    ],
)
def test_codes_that_are_not_frames_are_refused(engine, change, message):
    with pytest.raises(InvalidInput, match=message):
        check_codes(engine.spec, change(random_codes(engine, 5, 7)), "codes")


def test_what_was_checked_is_the_engines_own(engine):
    """A talker's memory may be written to anew while a step that was cancelled still runs."""
    codes = torch.zeros(2, engine.spec.num_code_groups, dtype=torch.int64)
    checked = check_codes(engine.spec, codes, "codes")
    codes.fill_(10**6)
    assert not checked.any()


@pytest.mark.parametrize("dtype", [torch.int16, torch.int32, torch.int64])
def test_any_integer_dtype_is_taken(engine, dtype):
    codes = random_codes(engine, 5, 8)
    assert torch.equal(check_codes(engine.spec, codes.to(dtype), "codes"), codes)


def test_a_failed_step_fails_every_stream_and_the_engine_says_so(tiny_checkpoint):
    decoder = load_decoder(str(tiny_checkpoint), device="cpu")
    fatal: queue.Queue[BaseException] = queue.Queue()
    engine = DecodeEngine(decoder, max_streams=1, max_frames_per_step=4, on_fatal=fatal.put)
    running, waiting = queue.Queue(), queue.Queue()
    stream = engine.open(running.put)
    engine.open(waiting.put)
    # Unchecked codes: the embedding fails as a broken device would.
    engine.put(stream, torch.full((1, engine.spec.num_code_groups), 10**6))
    for events in (running, waiting):
        _, end = collect(events)
        assert isinstance(end, InternalError)
    assert isinstance(fatal.get(timeout=GUARD_S), IndexError)
    with pytest.raises(Unavailable):
        engine.open(running.put)
    engine.stop()


def test_stop_fails_what_is_open(decoder):
    engine = DecodeEngine(decoder, max_streams=1, max_frames_per_step=4)
    events: queue.Queue[Event] = queue.Queue()
    engine.open(events.put)
    engine.stop()
    _, end = collect(events)
    assert isinstance(end, Unavailable)


def test_metrics_count_frames_lead_and_underruns(engine):
    def value(name: str, **labels: str) -> float:
        return REGISTRY.get_sample_value(f"quartet_code2wav_{name}", labels) or 0.0

    names = ("frames_decoded_total", "frames_computed_total", "lead_seconds_count", "underruns_total")
    before = [value(name) for name in names]
    silent_s = value("underrun_seconds_total")
    events: queue.Queue[Event] = queue.Queue()
    stream = engine.open(events.put)
    engine.put(stream, random_codes(engine, 1, 9))
    assert isinstance(events.get(timeout=GUARD_S), Samples)
    assert value("streams_running") == 1
    time.sleep(0.3)  # longer than the one frame plays
    engine.put(stream, random_codes(engine, 4, 9))
    engine.finish(stream)
    collect(events)
    until(lambda: value("streams_running") == 0)
    after = [value(name) for name in names]
    assert [b - a for a, b in zip(before, after, strict=True)] == [5, 5, 1, 1]
    assert 0.2 < value("underrun_seconds_total") - silent_s < GUARD_S
    assert value("frames_queued") == value("streams_waiting") == 0
