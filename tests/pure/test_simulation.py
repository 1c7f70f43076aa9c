"""The simulation of many sessions: its engines against closed forms, its turns, and whose routing it drives."""

import json
import math
import statistics
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest
import structlog
from prometheus_client import REGISTRY

from benchmarks.simulation.__main__ import main
from benchmarks.simulation.calibration import FRAMES, PROMPT_TOKENS, THIS_MACHINE, TOKENS, Measured, costs_of
from benchmarks.simulation.cell import Cell, Counts, seeded
from benchmarks.simulation.clock import Clock
from benchmarks.simulation.closed_loop import simulate
from benchmarks.simulation.contexts import Contexts
from benchmarks.simulation.costs import Costs
from benchmarks.simulation.decoder import pieces
from benchmarks.simulation.engine import Engine
from benchmarks.simulation.faults import WHATS, Fault, What, plan
from benchmarks.simulation.gateway import Core
from benchmarks.simulation.gpus import Gpu, Steps
from benchmarks.simulation.shared_cores import Cores
from benchmarks.simulation.whole import sessions_of_cells
from gateway.pipeline.replica import Replica
from gateway.pipeline.stage import Stage
from services.common.rpc.call import Admission

COUNTS = Counts(3, 2, 2, 2)


@pytest.fixture(autouse=True)
def logs() -> Iterator[None]:
    """As they were: the command silences them."""
    before = structlog.get_config()
    yield
    structlog.configure(**before)


class Job:
    """An engine's work of so many steps, without a prompt."""

    positions, tokens, is_live, is_started = 0.0, 0.0, True, False

    def __init__(self, engine: Engine, clock: Clock, steps: float) -> None:
        self.engine, self.clock, self.steps = engine, clock, steps
        self.came, self.waited, self.stayed = clock.now, 0.0, math.nan

    def take_room(self) -> bool:
        return True

    def prefilled(self) -> None:
        self.waited = self.clock.now - self.came
        self.engine.run(self)
        self.engine.when(self, self.steps, self.end)

    def end(self) -> None:
        self.is_live, self.stayed = False, self.clock.now - self.came
        self.engine.stop(self)
        self.engine.leave()


def _jobs(engine: Engine, clock: Clock, per_s: float, mean_steps: float, count: int) -> list[Job]:
    """Jobs that came as a Poisson process, with exponential lengths, and have all ended."""
    random, jobs = Random(3), list[Job]()

    def arrive() -> None:
        jobs.append(Job(engine, clock, max(1, round(random.expovariate(1 / mean_steps)))))
        engine.submit(jobs[-1])
        if len(jobs) < count:
            clock.after(random.expovariate(per_s), arrive)

    clock.after(0, arrive)
    clock.run(math.inf)
    return jobs


def test_an_engine_whose_steps_do_not_slow_down_is_a_queue_of_many_servers():
    """M/M/c: Erlang's C."""
    clock, servers, busy = Clock(), 4, 0.8
    engine = Engine(clock, lambda running, tokens: 0.01, lambda *_: 0.0, 1e9, servers, steps_on=False)
    jobs = _jobs(engine, clock, busy * servers, 100, 30_000)  # of 1 s each
    offered = busy * servers
    last = offered**servers / math.factorial(servers) / (1 - busy)
    waits = last / (sum(offered**k / math.factorial(k) for k in range(servers)) + last)
    assert statistics.mean(job.waited for job in jobs) == pytest.approx(waits / (servers * (1 - busy)), rel=0.1)


def test_an_engine_whose_steps_grow_with_the_batch_shares_one_processor():
    """M/G/1 with processor sharing: the mean stay is that of the work over what is left."""
    clock, busy = Clock(), 0.7
    engine = Engine(clock, lambda running, tokens: 0.001 * running, lambda *_: 0.0, 1e9, 10**6, steps_on=False)
    jobs = _jobs(engine, clock, busy, 1000, 20_000)
    assert statistics.mean(job.stayed for job in jobs) == pytest.approx(1 / (1 - busy), rel=0.1)


def test_a_gateways_core_is_a_queue_of_equal_works():
    """M/D/1: Pollaczek and Khinchine."""
    clock, random, busy = Clock(), Random(5), 0.8
    core, waits = Core(clock), list[float]()

    def arrive() -> None:
        waits.append(core.work(1000) - 1)
        if len(waits) < 50_000:
            clock.after(random.expovariate(busy), arrive)

    clock.after(0, arrive)
    clock.run(math.inf)
    assert statistics.mean(waits) == pytest.approx(busy / (2 * (1 - busy)), rel=0.1)
    beside_others = Core(Clock())
    beside_others.background = 0.5
    assert beside_others.work(1000) == pytest.approx(2)


def test_a_prompt_stops_frames_but_not_tokens():
    for steps_on, end_s in ((False, 0.1 + 1.0 + 0.5), (True, 0.1 + 0.9 + 0.5)):
        clock = Clock()
        engine = Engine(clock, lambda *_: 0.1, lambda *_: 0.5, 100, 8, steps_on=steps_on)
        first = Job(engine, clock, 11)
        engine._prefill_s = lambda *_: 0.0
        engine.submit(first)
        clock.run(0.05)
        engine._prefill_s = lambda *_: 0.5
        second = Job(engine, clock, 1)
        engine.submit(second)
        clock.run(10)
        assert second.waited == pytest.approx(0.05 + 0.5)
        assert first.stayed == pytest.approx(end_s)


def test_contexts_that_were_used_longest_ago_are_dropped():
    contexts = Contexts(100)
    for session in (1, 2, 3):
        assert contexts.start(session, 30)
        contexts.end(session, 30)
    assert contexts.start(1, 40)
    assert not contexts.start(4, 70)
    assert [contexts.cached(session) for session in (2, 3)] == [30, 30]
    contexts.end(1, 40)
    assert contexts.start(4, 50)
    assert [contexts.cached(session) for session in (1, 2, 3)] == [40, 0, 0]


def test_step_times_are_those_of_the_page_about_gpus():
    """docs/gpus.md#computed-speed has them for an H100 at its published bandwidth."""
    costs = Costs().with_values(bandwidth_share=1)
    steps = Steps(costs, Gpu.named("h100", costs))
    assert 1000 * steps.talker(1, 8192) == pytest.approx(5.6, rel=0.05)
    assert 1000 * steps.talker(8, 8 * 8192) == pytest.approx(6.6, rel=0.05)
    assert 1000 * steps.decoder(1) == pytest.approx(1.6, rel=0.1)
    assert 1000 * steps.decoder(16 * 8) == pytest.approx(4.1, rel=0.05)
    assert steps.gpu.thinker_tokens // 1000 == 130  # the table "What fits"
    assert Gpu.named("h200", costs).thinker_tokens // 1000 == 748


def test_pieces_are_all_frames():
    assert all(sum(pieces(frames)) == frames for frames in range(1, 200))


def _cell(random: Random, sessions: int = 200, counts: Counts = COUNTS, realtime: bool = False) -> Cell:
    costs = Costs().with_values(thinker_start_s=5, talker_start_s=5, thinker_launch_ms=20)  # some are always writing
    return Cell(costs, Gpu.named("h200", costs), counts, sessions, random, realtime=realtime)


def _chosen() -> float:
    name = "quartet_gateway_replica_requests_total"
    return sum(each.value for family in REGISTRY.collect() for each in family.samples if each.name == name)


def test_routing_and_admission_are_the_gateways_own():
    before = _chosen()
    with seeded(1) as random:
        cell = _cell(random)
        cell.clock.run(20)
    stages = [stage for gateway in cell.gateways for stage in gateway.stages.values()]
    assert {type(stage) for stage in stages} == {Stage}
    assert {type(replica) for stage in stages for replica in stage.replicas.values()} == {Replica}
    assert all(type(machine.process.admission) is Admission for machine in cell.machines.values())
    assert _chosen() - before >= 3 * (cell.results.started - cell.in_progress()) > 0


@pytest.mark.parametrize("what", [None, *WHATS])
def test_every_turn_ends_once_and_gives_all_back(what: What | None):
    with seeded(1) as random:
        cell = _cell(random, 500)
        if what is not None:
            plan(cell, Fault(what, 10, 5))
        cell.clock.run(30)
        whole = cell.results.between(0, math.inf)
        assert whole.turns + cell.in_progress() == cell.results.started > 300
        for gateway in cell.gateways:
            assert len(gateway.turns) == gateway.admission.in_flight
        assert sum(gateway.admission.in_flight for gateway in cell.gateways) == cell.in_progress()
        for machine in cell.machines.values():
            assert len(machine.calls) == machine.process.admission.in_flight
            assert machine.state == "up"
        leases = sum(replica.in_flight for gateway in cell.gateways for replica in gateway.replicas)
        assert leases >= sum(len(machine.calls) for machine in cell.machines.values())
    assert all(replica.serving for gateway in cell.gateways for replica in gateway.replicas)
    touched = sum(cell.results.where.values()) + cell.results.retried
    assert touched if what else not touched
    assert whole.answered > 0.8 * whole.turns


def test_a_seed_says_all():
    def run(seed: int) -> tuple[int, list[float]]:
        with seeded(seed) as random:
            cell = _cell(random)
            plan(cell, Fault("talker", 5))
            cell.clock.run(15)
        return cell.clock.events, cell.results.between(0, math.inf).first_s

    assert run(4) == run(4) != run(5)


def test_too_few_machines_refuse_and_answer_late():
    with seeded(1) as random:
        enough, few = _cell(random), _cell(random, 1500, Counts(1, 1, 1, 1))
        for cell in (enough, few):
            cell.clock.run(30)
    well, ill = (cell.results.between(0, 30) for cell in (enough, few))
    assert well.refused == 0
    assert ill.refused > 0
    assert statistics.median(ill.first_s) > 3 * statistics.median(well.first_s)


def test_open_microphones_take_a_gateways_core():
    with seeded(1) as random:
        cell = _cell(random, 60, realtime=True)
        cell.clock.run(10)
        open_now = sum(gateway.microphones for gateway in cell.gateways)
        background = sum(gateway.core.background for gateway in cell.gateways)
    assert open_now == cell.sessions.now
    assert background == pytest.approx(open_now * 0.0134 + 2 * 7 * 4 * 10 / 12 / 1000, rel=0.05)


def test_cells_have_all_sessions_between_them():
    sizes = sessions_of_cells(10_000, 10, 1)
    assert sum(sizes) == 10_000
    assert 900 < sizes[0] < 1000 < sizes[-1] < 1100


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    small = ["--sessions", "120", "--cell", "60", "--warm-up-s", "5", "--seconds", "5"]
    main([*small, "--loads", "0.5", "1", "--json", str(tmp_path / "figures.json")])
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert [load["sessions"] for load in figures["loads"]] == [30, 60]
    assert figures["cells"] == 2
    assert figures["all"] == {kind: 2 * count for kind, count in figures["a_cell"].items()}
    assert "saturates first" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (["--cost", "nothing=1"], "nothing is no constant"),
        (["--cost", "way_ms"], "write NAME=VALUE"),
        (["--cost", "way_ms=-1"], "way_ms is negative"),
        (["--counts", "1,2"], "write four numbers"),
        (["--sessions", "0"], "--sessions: must be above 0"),
    ],
)
def test_flags_that_are_refused(flags: list[str], reason: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        main(flags)
    assert reason in capsys.readouterr().err


def measured(streams: int, shared_by: dict[str, float], cpu_ms: dict[str, float], ttfa_ms: float) -> Measured:
    figures = {"TTFA ms": ttfa_ms, "total ms": 200.0, "frames/s": 300.0}
    return Measured(streams, [[(40, 60)] * 16], figures, shared_by, cpu_ms, talker_prefill_ms=3.0)


ONE = measured(
    1,
    {"thinker": 1, "talker": 1, "code2wav": 8},
    {"thinker": 120, "talker": 150, "code2wav": 56, "gateway": 10},
    40.0,
)
EIGHT = measured(
    8,
    {"thinker": 4, "talker": 7, "code2wav": 16},
    {"thinker": 60, "talker": 50, "code2wav": 50, "gateway": 10},
    90.0,
)


def test_a_machine_is_simulated_by_what_was_measured_on_it() -> None:
    """Steps are those of its runs, and with one stream nobody waits for another one."""
    costs, cores = costs_of(ONE, EIGHT, 8)
    steps, tokens, positions = Steps(costs, THIS_MACHINE), PROMPT_TOKENS + TOKENS, PROMPT_TOKENS + FRAMES / 2
    for run in (ONE, EIGHT):
        thinkers, talkers, frames = (run.shared_by[stage] for stage in ("thinker", "talker", "code2wav"))
        seconds = {
            "thinker": steps.thinker(round(thinkers), thinkers * tokens),
            "talker": steps.talker(round(talkers), talkers * positions),
            "code2wav": steps.decoder(round(frames)),
        }
        for stage, alone_s in seconds.items():
            assert 1000 * alone_s * cores.alone(stage) == pytest.approx(run.step_ms(stage))
    alone = ONE.simulated(costs, cores)
    assert alone == pytest.approx(ONE.figures, rel=0.05)
    assert 1.5 < EIGHT.simulated(costs, cores)["frames/s"] / alone["frames/s"] < 8


def test_processes_that_share_cores_make_no_more_than_the_cores_do() -> None:
    (costs, _), answers = costs_of(ONE, EIGHT, 1), EIGHT.answers
    apart, shared = (simulate(costs, THIS_MACHINE, 8, answers, Cores(count)) for count in (math.inf, 1))
    assert shared["frames/s"] < 0.7 * apart["frames/s"]
    assert shared["total ms"] > 1.4 * apart["total ms"]
    one_core_ms = sum(EIGHT.cpu_ms.values())
    assert shared["frames/s"] == pytest.approx(60 / (one_core_ms / 1000), rel=0.15)


@pytest.mark.parametrize("wanted", [[1.0], [0.7, 0.7], [1.2, 1.2, 2.0], [1.0, 1.0, 1.0, 0.5]])
def test_processes_are_slower_by_the_moments_at_which_others_want_the_same_cores(wanted: list[float]) -> None:
    random, count, moments, used = Random(1), 2, 20_000, 0
    for _ in range(moments):
        used += sum(any(random.random() < each / count for each in wanted) for _ in range(count))
    assert Cores(count).slowdown(wanted) == pytest.approx(sum(wanted) * moments / used, rel=0.03)


def test_an_answer_has_not_ended_before_its_text_has() -> None:
    costs, _ = costs_of(ONE, EIGHT, 8)
    short = simulate(costs, THIS_MACHINE, 1, [(40, 2)] * 4)
    assert short["total ms"] > 39 * ONE.step_ms("thinker")


def test_a_closed_loop_gives_each_answer_its_length() -> None:
    costs, gpu = Costs(), Gpu.named("h100", Costs())
    short, long = (simulate(costs, gpu, 1, [(10, frames)] * 4) for frames in (20, 200))
    assert short["TTFA ms"] == pytest.approx(long["TTFA ms"], rel=0.01)
    assert long["total ms"] > 5 * short["total ms"]
