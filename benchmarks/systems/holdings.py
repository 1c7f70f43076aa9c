"""What the processes of a running system hold: open files, memory, requests, shared memory."""

import json
import os
from dataclasses import dataclass
from pathlib import Path

import httpx

from benchmarks.systems.processes import Groups, system_pids
from cli.scrape import Scrape

# Metrics that are 0 in a stage with nothing to do.
HELD = (
    "quartet_requests_in_flight",
    "quartet_shared_memory_used_bytes",
    "quartet_stream_positions_pending",
    "quartet_stream_credits_outstanding",
    "quartet_kv_cache_used_ratio",
)


@dataclass(frozen=True)
class Holding:
    """Of one process, its children counted with it in all but `files`.

    Attributes:
        pid: of it.
        files: open files and sockets.
        memory_bytes: resident; pages that several share are counted once, in parts.
        held: what its metrics say of requests that are not done with, by metric; empty for the gateway.
    """

    pid: int
    files: int
    memory_bytes: int
    held: dict[str, float]


def holdings(run_directory: Path) -> dict[str, Holding]:
    """Of every process of the `quartet up` of `run_directory`, by name.

    Raises:
        OSError, httpx.HTTPError: one of them has ended, or is starting.
    """
    pids = system_pids(run_directory)
    memory_bytes = Groups(pids).memory_bytes()
    return {
        name: Holding(pid, len(os.listdir(f"/proc/{pid}/fd")), memory_bytes[name], _held(run_directory, name))
        for name, pid in pids.items()
    }


def _held(run_directory: Path, name: str) -> dict[str, float]:
    if name == "gateway":
        return {}
    scrape = scrape_of(run_directory, name)
    return {metric: scrape.total(metric) or 0.0 for metric in HELD}


def sent_bytes(run_directory: Path, name: str) -> dict[str, float]:
    """Payload that a stage has sent since it was started, by transport."""
    scrape = scrape_of(run_directory, name)
    metric = "quartet_stream_bytes_total"
    return {by: scrape.total(metric, transport=by) or 0.0 for by in sorted(scrape.values_of(metric, "transport"))}


def scrape_of(run_directory: Path, name: str) -> Scrape:
    """The metrics of a process of a `quartet up`. Raises httpx.HTTPError, OSError: it is not there."""
    address = json.loads((run_directory / "state.json").read_text())["processes"][name]["metrics_address"]
    return Scrape.parse(httpx.get(f"http://{address}/metrics", timeout=5).text)
