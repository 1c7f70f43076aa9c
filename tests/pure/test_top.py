"""`quartet top`: what it makes of metrics pages, and of systems that are not there."""

import io
import json
import socket
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from rich.console import Console

from cli import top
from cli.scrape import MetricsDelta, Scrape
from cli.terminal import CommandError
from cli.top import Monitor, System
from tests.support.systems import gateway as gateway_stack


class Page:
    """A process's metrics."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self.requests = Counter("quartet_requests_total", "", ["stage", "outcome"], registry=self._registry)
        self.running = Gauge("quartet_requests_running", "", ["stage"], registry=self._registry)
        labels = ["stage", "consumer", "rows", "transport"]
        self.sent = Counter("quartet_stream_bytes_total", "", labels, registry=self._registry)
        bounds = (0.01, 0.1, 1.0)
        self.step = Histogram("quartet_step_seconds", "", ["stage", "call"], buckets=bounds, registry=self._registry)
        Gauge("python_info", "", registry=self._registry)

    def scrape(self, at: float) -> Scrape:
        return Scrape(at, Scrape.parse(generate_latest(self._registry).decode()).samples)


def test_rates_means_and_quantiles_are_of_the_time_between():
    page = Page()
    page.requests.labels("dit", "OK").inc(5)
    page.step.labels("dit", "transformer").observe(5)
    first = page.scrape(10)
    page.requests.labels("dit", "OK").inc(3)
    page.requests.labels("dit", "CANCELLED").inc()
    for seconds in (0.02, 0.04, 0.06, 0.5):
        page.step.labels("dit", "transformer").observe(seconds)
    page.step.labels("dit", "vae.decode").observe(0.9)
    window = MetricsDelta(first, page.scrape(12))
    assert "python_info" not in window.last.samples
    assert window.rate("quartet_requests_total") == 2
    assert window.rate("quartet_requests_total", outcome="OK") == 1.5
    assert window.busiest("quartet_step_seconds", "call") == "transformer"
    assert window.mean("quartet_step_seconds", call="transformer") == pytest.approx(0.155)
    assert window.quantile(0.5, "quartet_step_seconds", call="transformer") == pytest.approx(0.01 + 0.09 * 2 / 3)
    assert window.quantile(1.0, "quartet_step_seconds", call="transformer") == pytest.approx(1.0)


def test_an_idle_or_restarted_process_is_looked_at_since_its_start():
    page = Page()
    page.requests.labels("dit", "OK").inc(50)
    page.step.labels("dit", "transformer").observe(5)  # beyond the last bound
    idle = MetricsDelta(page.scrape(0), page.scrape(2))
    assert idle.rate("quartet_requests_total") == 0
    assert idle.mean("quartet_step_seconds") == 5
    assert idle.quantile(0.5, "quartet_step_seconds") == 1.0  # more than that is not known
    again = Page()
    again.requests.labels("dit", "OK").inc(4)
    restarted = MetricsDelta(page.scrape(0), again.scrape(2))
    assert restarted.rate("quartet_requests_total") == 2
    assert restarted.mean("quartet_step_seconds") is None
    assert MetricsDelta(Scrape(), Scrape()).quantile(0.5, "quartet_step_seconds") is None


def test_edges_say_what_they_go_by():
    page, watch = Page(), Monitor(System("http://a", {"thinker": "http://a/metrics"}))
    sent = page.sent.labels("thinker", "talker", "hidden_states.18", "shared_memory")
    page.sent.labels("thinker", "talker", "token_ids", "inline").inc(1)
    first = page.scrape(10)
    sent.inc(3 * 2**20)
    watch._scrapes["thinker"].extend([first, page.scrape(12)])
    assert "thinker to talker: inline 0.00 MiB/s, shared_memory 1.50 MiB/s" in text(watch)


def test_sessions_say_what_their_users_hear():
    registry, watch = CollectorRegistry(), Monitor(System("http://a", {"gateway": "http://a/metrics"}))
    sessions, speaking = (
        Gauge(f"quartet_gateway_{name}", "", labels, registry=registry)
        for name, labels in (("realtime_sessions", []), ("users_speaking", ["transport"]))
    )
    heard = Histogram("quartet_gateway_first_sound_seconds", "", ["transport"], registry=registry, buckets=(0.5, 1, 2))
    dry = Counter("quartet_gateway_underruns_total", "", ["transport"], registry=registry)
    silent = Counter("quartet_gateway_underrun_seconds_total", "", ["transport"], registry=registry)

    def shown() -> str:
        watch._scrapes["gateway"].append(Scrape.parse(generate_latest(registry).decode()))
        return text(watch)

    assert "sessions" not in shown()  # nobody talks to this system
    sessions.set(200)
    assert "sessions: 200 open, 0 users speak" in shown()
    speaking.labels("websocket").inc(29)
    speaking.labels("webrtc").inc()
    for transport, seconds in (("websocket", 0.75), ("websocket", 0.75), ("webrtc", 1.5)):
        heard.labels(transport).observe(seconds)
    dry.labels("websocket").inc(3)
    silent.labels("websocket").inc(0.42)
    told = shown()
    assert "sessions: 200 open, 30 users speak" in told
    assert "webrtc: first sound p50 1500 ms, p95 1950 ms; - underruns, - s" in told
    assert "websocket: first sound p50 750 ms, p95 975 ms; 3 underruns, 0.4 s" in told


@pytest.mark.parametrize("state", [None, "{", "[]", '{"url": "x"}', '{"url": null, "processes": {}}'])
def test_a_directory_that_is_not_of_a_run_is_named(tmp_path: Path, state: str | None):
    if state is not None:
        (tmp_path / "state.json").write_text(state)
    with pytest.raises(CommandError, match=r"--run-dir: .*state.json"):
        System.of_run(tmp_path)


def test_addresses_become_pages(tmp_path: Path):
    processes = {"dit": {"metrics_address": "127.0.0.1:9"}}
    (tmp_path / "state.json").write_text(json.dumps({"url": "http://a:8000", "processes": processes}))
    assert System.of_run(tmp_path) == System("http://a:8000", {"dit": "http://127.0.0.1:9/metrics"})
    given = System.at("http://a:8000/", ["x=b:1", "y=https://c/d/metrics", "z=http://e:2/"])
    assert given.metrics == {
        "gateway": "http://a:8000/metrics",
        "x": "http://b:1/metrics",
        "y": "https://c/d/metrics",
        "z": "http://e:2/metrics",
    }
    with pytest.raises(CommandError, match=r"--metrics: 'b:1' is not NAME=URL"):
        System.at("http://a", ["b:1"])


def text(watch: Monitor) -> str:
    console = Console(width=160, record=True, file=io.StringIO())
    console.print(watch.table())
    return console.export_text()


async def test_a_running_gateway_and_a_stage_that_goes(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(top, "TIMEOUT_S", 60)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))  # nobody else listens there
        await _look_at_a_running_gateway(f"127.0.0.1:{silent.getsockname()[1]}")


async def _look_at_a_running_gateway(nobody: str) -> None:
    async with gateway_stack.running() as gateway:
        watch = Monitor(System.at(gateway.url, [f"talker={nobody}"]))
        body = {"model": "scripted", "messages": [{"role": "user", "content": "x"}]}
        assert (await gateway.chat(body)).status_code == 200
        await watch.look()
        shown = text(watch)
        assert shown.count("SERVING") == 3
        assert ": ready" in shown
        assert "TTFT p50" in shown
        await gateway.stages.servers["talker"].stop(grace=None)
        await gateway.until(lambda: not gateway.app.state.gateway.pipeline.ready)
        await watch.look()
        assert text(watch).count("SERVING") == 2
        assert "partly ready" in text(watch)
    await watch.look()
    assert not watch.reached
    assert "not reached" in text(watch)
