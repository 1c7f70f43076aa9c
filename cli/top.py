"""`quartet top`: the stages of a running system, live."""

import asyncio
import json
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.table import Table

from cli.scrape import MetricsDelta, Scrape
from cli.terminal import CommandError

GATEWAY = "gateway"
TIMEOUT_S = 2.0
WINDOW_S = 15.0  # rates, means and medians are of this time
ONCE_S = 1.0  # or this, where there is one table
_OWN_PATHS = {"/metrics", "/ready", "/health"}  # requests that are not a client's


@dataclass(frozen=True)
class System:
    """`url` is the gateway's; `metrics` has each process's page by name."""

    url: str
    metrics: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of_run(cls, run_directory: Path) -> "System":
        """Raises CommandError."""
        file = run_directory / "state.json"
        try:
            state = json.loads(file.read_text())
            pages = {name: _page(process["metrics_address"]) for name, process in state["processes"].items()}
            if state["url"] is None:
                raise CommandError(f"--run-dir: {file}: the stages of a program's Omni have no gateway to ask")
            return cls(state["url"], pages)
        except OSError as error:
            reason = f"{error.strerror}; name the directory that `quartet up` printed"
            raise CommandError(f"--run-dir: {file}: {reason}") from None
        except (ValueError, KeyError, TypeError):
            raise CommandError(f"--run-dir: {file} is not what `quartet up` writes") from None

    @classmethod
    def at(cls, url: str, metrics: Sequence[str]) -> "System":
        """`metrics` are NAME=URL or NAME=HOST:PORT. Raises CommandError."""
        url = url.rstrip("/")
        pages = {GATEWAY: f"{url}/metrics"}
        for given in metrics:
            name, equals, address = given.partition("=")
            if not (name and equals and address):
                raise CommandError(f"--metrics: '{given}' is not NAME=URL, e.g. talker=127.0.0.1:9464")
            pages[name] = _page(address)
        return cls(url, pages)


def _page(address: str) -> str:
    """Appends /metrics to an address that has no path."""
    url = httpx.URL(address if "://" in address else f"http://{address}")
    return str(url if url.path != "/" else url.join("/metrics"))


class Monitor:
    """`reached`: the gateway answered last."""

    def __init__(self, system: System) -> None:
        self.reached = False
        self._system = system
        self._ready: dict[str, Any] = {}
        self._scrapes: dict[str, deque[Scrape]] = {name: deque() for name in system.metrics}

    async def look(self) -> None:
        async with httpx.AsyncClient(timeout=TIMEOUT_S, trust_env=False) as client:
            pages = [self._scrape(client, name, url) for name, url in self._system.metrics.items()]
            await asyncio.gather(self._ask(client), *pages)

    async def _ask(self, client: httpx.AsyncClient) -> None:
        try:
            self._ready = (await client.get(f"{self._system.url}/ready")).json()
            self.reached = True
        except (httpx.HTTPError, ValueError) as error:
            self._ready, self.reached = {"status": f"not reached: {error or type(error).__name__}"}, False

    async def _scrape(self, client: httpx.AsyncClient, name: str, url: str) -> None:
        scrapes = self._scrapes[name]
        try:
            scrapes.append(Scrape.parse((await client.get(url)).raise_for_status().text))
        except (httpx.HTTPError, ValueError):
            scrapes.clear()  # it is gone: its numbers are no longer true
            return
        while len(scrapes) > 2 and scrapes[-1].at - scrapes[1].at >= WINDOW_S:
            scrapes.popleft()

    def table(self) -> Table:
        table = Table(title=f"{self._system.url}: {self._ready.get('status', '')}", title_justify="left")
        for heading in ("stage", "state"):
            table.add_column(heading, no_wrap=heading == "stage")
        for heading in ("running", "queued", "req/s", "step ms", "batch", "KV", "first p50 ms"):
            table.add_column(heading, justify="right", no_wrap=True)
        states: dict[str, str] = self._ready.get("stages", {})
        names = dict.fromkeys([GATEWAY, *states, *self._system.metrics])
        for name in names:
            state = self._ready.get("status", "") if name == GATEWAY else states.get(name, "-")
            table.add_row(name, _coloured(state), *self._numbers(name))
        lines = [self._first_outputs(), *self._sessions(), *self._edges()]
        table.caption, table.caption_justify = "\n".join(filter(None, lines)), "left"
        return table

    def _window(self, name: str) -> MetricsDelta | None:
        scrapes = self._scrapes.get(name)
        return MetricsDelta(scrapes[0], scrapes[-1]) if scrapes else None

    def _numbers(self, name: str) -> list[str]:
        """Cells of a process after its state."""
        window = self._window(name)
        if window is None:
            return [*self._gateway_load(name), *["-"] * 5]
        call = window.busiest("quartet_step_seconds", "call")
        only = {} if call is None else {"call": call}
        kv = window.last.total("quartet_kv_cache_used_ratio")
        first = "quartet_gateway_ttfa_seconds" if name == GATEWAY else "quartet_first_output_seconds"
        return [
            _number(window.last.total("quartet_requests_running")),
            _number(window.last.total("quartet_requests_queued")),
            _number(_requests_a_second(window, name), 1),
            _milliseconds(window.mean("quartet_step_seconds", **only)),
            _number(window.mean("quartet_step_batch_size", **only), 1),
            "-" if kv is None else f"{kv:.0%}",
            _milliseconds(window.quantile(0.5, first)),
        ]

    def _gateway_load(self, name: str) -> list[str]:
        """Cells of running and queued requests, as the gateway knows them."""
        replicas = self._ready.get("replicas", {}).get(name)
        if not replicas:
            return ["-", "-"]
        return [str(sum(replica.get(key, 0) for replica in replicas)) for key in ("running", "queued")]

    def _first_outputs(self) -> str:
        window = self._window(GATEWAY)
        if window is None:
            return ""
        ttft = _milliseconds(window.quantile(0.5, "quartet_gateway_ttft_seconds"))
        ttfa = _milliseconds(window.quantile(0.5, "quartet_gateway_ttfa_seconds"))
        return f"TTFT p50 {ttft} ms, TTFA p50 {ttfa} ms; the last {WINDOW_S:g} s, or since the start if idle"

    def _sessions(self) -> list[str]:
        """Lines of realtime sessions: how many there are, and what their users hear, by transport."""
        window, first_sound = self._window(GATEWAY), "quartet_gateway_first_sound_seconds"
        if window is None:
            return []
        lines = []
        for transport in sorted(window.last.values_of(f"{first_sound}_count", "transport")):
            median, late = (_milliseconds(window.quantile(q, first_sound, transport=transport), 0) for q in (0.5, 0.95))
            underruns = window.last.total("quartet_gateway_underruns_total", transport=transport)
            silence_s = window.last.total("quartet_gateway_underrun_seconds_total", transport=transport)
            lines.append(
                f"{transport}: first sound p50 {median} ms, p95 {late} ms; "
                f"{_number(underruns)} underruns, {_number(silence_s, 1)} s"
            )
        is_open = window.last.total("quartet_gateway_realtime_sessions")
        if is_open or lines:
            speak = window.last.total("quartet_gateway_users_speaking") or 0.0
            lines.insert(0, f"sessions: {_number(is_open)} open, {_number(speak)} users speak")
        return lines

    def _edges(self) -> list[str]:
        """Lines of traffic between stages, by transport."""
        lines = []
        for name in self._system.metrics:
            window, sent = self._window(name), "quartet_stream_bytes_total"
            if window is None:
                continue
            for consumer in sorted(window.last.values_of(sent, "consumer")):
                rates = []
                for transport in sorted(window.last.values_of(sent, "transport")):
                    labels = {"consumer": consumer, "transport": transport}
                    if window.last.total(sent, **labels):
                        rates.append(f"{transport} {(window.rate(sent, **labels) or 0.0) / 2**20:.2f} MiB/s")
                lines.append(f"{name} to {consumer}: {', '.join(rates)}")
        return lines


def _requests_a_second(window: MetricsDelta, name: str) -> float | None:
    if name != GATEWAY:
        return window.rate("quartet_requests_total")
    paths = window.last.values_of("quartet_gateway_requests_total", "path") - _OWN_PATHS
    return sum(window.rate("quartet_gateway_requests_total", path=path) or 0.0 for path in paths)


def _number(value: float | None, digits: int = 0) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _milliseconds(seconds: float | None, digits: int = 1) -> str:
    return "-" if seconds is None else f"{seconds * 1000:.{digits}f}"


def _coloured(state: str) -> str:
    colour = "green" if state in ("SERVING", "ready") else "red"
    return f"[{colour}]{escape(state)}[/{colour}]"


async def top(system: System, interval_s: float, once: bool) -> None:
    """Runs for ever unless `once`. Raises CommandError: the gateway does not answer."""
    monitor, console = Monitor(system), Console()
    await monitor.look()
    if once:
        await asyncio.sleep(ONCE_S)
        await monitor.look()
        console.print(monitor.table())
        if not monitor.reached:
            raise CommandError(f"{system.url} does not answer")
        return
    with Live(monitor.table(), console=console, auto_refresh=False) as live:
        while True:
            await asyncio.sleep(interval_s)
            await monitor.look()
            live.update(monitor.table(), refresh=True)
