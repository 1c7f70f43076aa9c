"""The chunk policy with a clock of its own: single decisions, and whole runs of an engine that it drives."""

import heapq
from dataclasses import dataclass, field

import pytest

from services.code2wav.policy import ChunkPolicy, PlaybackEstimate, StepPlan

FRAME_S = 0.08
TRANSPORT_S = 0.1
# Seconds of a step in the simulations: fixed, and for each frame; about those of the tiny checkpoint.
STEP_S, STEP_FRAME_S = 0.0024, 0.0007


@dataclass
class FakeStream:
    frames_ready: int = 0
    frames_decoded: int = 0
    complete: bool = False
    prompt_left: int = 0
    playback: PlaybackEstimate = field(default_factory=PlaybackEstimate)

    def put(self, frames: int, now: float) -> None:
        self.frames_ready += frames
        self.playback.arrived(frames, now)


def policy(max_frames: int = 16, max_batch_frames: int = 16, transport_s: float = TRANSPORT_S) -> ChunkPolicy:
    return ChunkPolicy(max_frames, max_batch_frames, transport_s)


def playing(ready: int, lead_s: float, now: float, interval_s: float = 0.01) -> FakeStream:
    """A stream whose first chunk was sent, with `ready` frames, the last of which came just now."""
    stream = FakeStream()
    stream.playback.sent(lead_s, 0, now)
    for i in range(ready):
        stream.put(1, now - (ready - 1 - i) * interval_s)
    return stream


def test_playback_stalls_when_dry_and_goes_on_with_the_next_samples():
    playback = PlaybackEstimate()
    assert playback.sent(0.08, 0, now=1.0) is None
    assert playback.sent(0.16, 0, now=1.02) == pytest.approx(0.06)
    assert playback.runs_dry_at == pytest.approx(1.24)
    assert playback.sent(0.08, 0, now=1.5) == pytest.approx(-0.26)
    assert playback.runs_dry_at == pytest.approx(1.58)


def test_a_step_without_samples_does_not_begin_playback():
    playback = PlaybackEstimate()
    assert playback.sent(0.0, 0, now=1.0) is None
    assert playback.sent(0.08, 0, now=2.0) is None
    assert playback.runs_dry_at == pytest.approx(2.08)


@pytest.mark.parametrize("ready", [1, 5, 100])
def test_the_first_chunk_is_one_frame_at_once(ready):
    stream = FakeStream()
    stream.put(ready, 7.0)
    assert policy().choose([stream], 7.0) == StepPlan(1, [0])


def test_a_prompt_is_decoded_at_once_in_steps_as_large_as_any_and_apart_from_what_is_heard():
    stream, chunks = FakeStream(prompt_left=21), policy()
    stream.put(30, 7.0)
    taken = []
    while stream.playback.runs_dry_at is None:
        plan = chunks.choose([stream], 7.0)
        assert isinstance(plan, StepPlan)
        taken.append(plan.frames)
        stream.frames_ready -= plan.frames
        heard = not stream.prompt_left
        stream.prompt_left = max(0, stream.prompt_left - plan.frames)
        stream.playback.sent(FRAME_S * plan.frames if heard else 0.0, stream.frames_ready, 7.0)
    assert taken == [16, 5, 1]


def test_nothing_to_do_without_frames():
    assert policy().choose([], 0.0) is None
    assert policy().choose([FakeStream(), FakeStream(complete=True)], 0.0) is None


def test_a_stream_with_a_lead_waits_until_its_margin_and_then_gets_what_there_is():
    chunks = policy()
    stream = playing(ready=5, lead_s=1.0, now=0.0)
    wait_s = chunks.choose([stream], 0.0)
    assert wait_s == pytest.approx(1.0 - TRANSPORT_S)
    assert chunks.choose([stream], 0.899) == pytest.approx(0.001)
    assert chunks.choose([stream], 0.9001) == StepPlan(5, [0])


def test_full_and_complete_streams_do_not_wait():
    full, complete = playing(16, 100.0, 0.0), playing(3, 100.0, 0.0)
    complete.complete = True
    assert policy().choose([full], 0.0) == StepPlan(16, [0])
    assert policy().choose([complete], 0.0) == StepPlan(3, [0])


def test_a_stream_does_not_wait_for_a_frame_that_would_come_too_late():
    slow = playing(ready=2, lead_s=0.3, now=0.0, interval_s=0.25)  # the third is due 50 ms after the margin
    assert policy().choose([slow], 0.0) == StepPlan(2, [0])


def test_the_margin_grows_with_measured_steps_and_with_what_is_queued():
    chunks = policy()
    assert chunks.margin_s(10) == TRANSPORT_S
    for _ in range(100):
        chunks.stepped(0.02, 10)
    assert chunks.margin_s(0) == pytest.approx(TRANSPORT_S + 0.02, abs=1e-4)
    assert chunks.margin_s(50) == pytest.approx(TRANSPORT_S + 0.02 + 0.1, abs=1e-4)
    chunks.stepped(0.2, 10)
    assert chunks.margin_s(0) > TRANSPORT_S + 0.2  # one slow step may be followed by another


def test_the_stream_nearest_to_running_dry_goes_first():
    streams = [playing(16, lead, 0.0) for lead in (0.9, 0.05, 0.5)]
    assert policy().choose(streams, 0.0) == StepPlan(16, [1])
    dry = playing(16, 0.001, -1.0)  # silent for a second
    assert policy().choose([*streams, dry], 0.0) == StepPlan(16, [3])


def test_a_new_stream_goes_before_those_with_a_lead_and_after_those_that_are_dry_for_longer():
    new, dry = FakeStream(), playing(4, 0.001, -1.0)
    new.put(1, -0.5)
    assert policy().choose([playing(16, 0.05, 0.0), new], 0.0) == StepPlan(1, [1])
    assert policy().choose([new, dry], 0.0) == StepPlan(4, [1])


def test_a_step_is_the_largest_rectangle_with_the_most_urgent_stream():
    streams = [playing(ready, 0.01 * (i + 1), 0.0) for i, ready in enumerate([5, 4, 4, 1])]
    assert policy().choose(streams, 0.0) == StepPlan(4, [0, 1, 2])
    assert policy(max_batch_frames=8).choose(streams, 0.0) == StepPlan(4, [0, 1])
    # The others wait rather than be cut into single frames.
    assert policy().choose([playing(1, 0.01, 0.0), playing(9, 0.02, 0.0)], 0.0) == StepPlan(1, [0])


def test_new_streams_begin_together():
    streams = [FakeStream() for _ in range(20)]
    for stream in streams:
        stream.put(3, 0.0)
    assert policy().choose(streams, 0.0) == StepPlan(1, list(range(16)))


@dataclass
class Run:
    """A simulated run, for each stream: its longest silence, the frames of its chunks, the time to its first one."""

    gaps_s: list[float]
    frames: list[list[int]]
    first_s: list[float]
    busy_s: float


def simulate(chunks: ChunkPolicy, arrivals: list[list[float]], complete: bool = True) -> Run:
    """Runs an engine with `chunks` over streams whose frames arrive at given times."""
    streams = [FakeStream() for _ in arrivals]
    run = Run([0.0] * len(arrivals), [[] for _ in arrivals], [0.0] * len(arrivals), 0.0)
    events = [(at, i, n == len(times) - 1) for i, times in enumerate(arrivals) for n, at in enumerate(times)]
    heapq.heapify(events)
    now = 0.0
    while True:
        while events and events[0][0] <= now:
            at, i, last = heapq.heappop(events)
            streams[i].put(1, at)
            streams[i].complete = complete and last
        choice = chunks.choose(streams, now)
        if isinstance(choice, StepPlan):
            took_s = STEP_S + STEP_FRAME_S * choice.frames * len(choice.streams)
            now += took_s
            run.busy_s += took_s
            chunks.stepped(took_s, choice.frames * len(choice.streams))
            for i in choice.streams:
                streams[i].frames_ready -= choice.frames
                lead_s = streams[i].playback.sent(choice.frames * FRAME_S, streams[i].frames_ready, now)
                if lead_s is None:
                    run.first_s[i] = now - arrivals[i][0]
                run.gaps_s[i] = max(run.gaps_s[i], -(lead_s or 0.0))
                run.frames[i].append(choice.frames)
        elif events:
            now = max(now, min(events[0][0], now + choice if choice is not None else events[0][0]))
        elif choice is not None:
            now += choice + 1e-9
        else:
            break
    assert [sum(frames) for frames in run.frames] == [len(times) for times in arrivals]
    assert all(frames[0] == 1 for frames in run.frames)
    return run


def steady(frames: int, interval_s: float, start_s: float = 0.0) -> list[float]:
    return [start_s + i * interval_s for i in range(frames)]


def test_a_fast_talker_gets_large_chunks_and_no_gap():
    run = simulate(policy(), [steady(200, 0.01)])
    assert run.gaps_s == [0.0]
    assert len(run.frames[0]) <= 1 + 5 + 200 / 16  # a few small ones until the lead is there
    assert run.first_s[0] == pytest.approx(STEP_S + STEP_FRAME_S)


def test_a_talker_slower_than_playback_has_each_frame_decoded_as_it_comes():
    run = simulate(policy(), [steady(50, 0.1)])
    assert run.frames == [[1] * 50]
    assert run.gaps_s[0] == pytest.approx(0.1 - FRAME_S, abs=0.005)  # what the talker itself leaves


def test_streams_that_stay_open_are_decoded_without_a_last_frame_to_push_them():
    run = simulate(policy(), [steady(37, 0.01)], complete=False)
    assert run.gaps_s == [0.0]


@pytest.mark.parametrize("streams", [8, 32])
def test_many_streams_stay_ahead_of_playback_at_80_percent_load(streams):
    """As many as one core can take; their frames arrive with pauses that no average foresees."""
    frame_interval_s = streams * (STEP_FRAME_S + STEP_S / 16) / 0.8
    assert frame_interval_s < FRAME_S
    arrivals = [steady(200, frame_interval_s, start_s=i * 0.037) for i in range(streams)]
    for i, times in enumerate(arrivals):
        for n in range(20 + i % 20, 200, 40):
            lead_s = n * FRAME_S - (times[n] - times[0])
            times[n:] = [at + 0.3 * lead_s for at in times[n:]]
    run = simulate(policy(), arrivals)
    assert max(run.gaps_s) == 0.0
    assert max(run.first_s) < 0.05


def test_overload_is_shared_and_nobody_starves():
    """Twice what the engine can decode: all fall behind alike, in small gaps rather than one stream in a long one."""
    streams = 250
    interval_s = FRAME_S * 0.9
    cost_s = streams * (STEP_FRAME_S + STEP_S / 16)
    assert cost_s > 2 * interval_s
    run = simulate(policy(), [steady(50, interval_s, i * 0.001) for i in range(streams)])
    totals = sorted(len(frames) for frames in run.frames)
    assert totals[-1] <= 3 * totals[0]
    assert max(run.gaps_s) < 3 * max(sorted(run.gaps_s)[: streams // 2])


def test_it_costs_less_than_decoding_what_is_there():
    class AtOnce(ChunkPolicy):
        def due_at(self, stream, margin_s):
            return 0.0 if stream.frames_ready else None

    arrivals = [steady(200, 0.01 * i, 0.005 * i) for i in range(1, 5)]
    waiting = simulate(policy(), arrivals)
    at_once = simulate(AtOnce(16, 16, TRANSPORT_S), arrivals)
    assert waiting.gaps_s == at_once.gaps_s == [0.0] * 4
    assert waiting.busy_s < 0.6 * at_once.busy_s
    chunks = [sum(map(len, run.frames)) for run in (waiting, at_once)]
    assert chunks[0] < 0.3 * chunks[1]
