"""More gateways before the stages of a running system, each with settings of its own."""

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import yaml

from cli.plan import PIPELINE
from cli.scrape import Scrape
from cli.supervisor import free_ports

_READY_WITHIN_S = 300.0
_POLL_S = 0.1
_KEPT_S = 1.0  # gateway.app.METRICS_KEPT_S


@dataclass
class GatewayProcess:
    """One of them."""

    url: str
    process: subprocess.Popen[bytes]
    _read_s: float = float("-inf")

    @property
    def pid(self) -> int:
        """Its process."""
        return self.process.pid

    def scrape(self) -> Scrape:
        """Its metrics, as they are now: none that it has kept."""
        time.sleep(max(0.0, self._read_s + _KEPT_S - time.monotonic()))
        page = Scrape.parse(httpx.get(f"{self.url}/metrics", timeout=60, verify=False).text)  # certificates take 20 ms
        self._read_s = time.monotonic()
        return page


def stage_addresses(run_directory: Path) -> dict[str, str]:
    """Address of each stage of a `quartet up`, by name."""
    processes = json.loads((run_directory / "state.json").read_text())["processes"]
    return {name: process["address"] for name, process in processes.items() if name != "gateway"}


def pipeline(file: Path, thinker: Mapping[str, Any], talker: Mapping[str, Any], base: Path = PIPELINE) -> Path:
    """Writes the pipeline `base` with these defaults of requests, and returns `file`."""
    config = yaml.safe_load(base.read_text())
    config["stages"]["thinker"]["sampling"] = dict(thinker)
    config["stages"]["talker"]["sampling"] = dict(talker)
    file.write_text(yaml.safe_dump(config))
    return file


@contextlib.contextmanager
def gateway(
    addresses: Mapping[str, str],
    pipeline: Path,
    log: Path,
    *flags: str,
    model: str | None = None,
    sources: Path | None = None,
) -> Iterator[GatewayProcess]:
    """A gateway that is ready, around a block.

    Args:
        addresses: of the stages, by name.
        pipeline: the file.
        log: what it writes goes there.
        flags: settings.
        model: the name that clients ask for.
        sources: directory of the Quartet that it is of; None: this one.

    Raises:
        RuntimeError: it ended, or is not ready in five minutes.
    """
    port = free_ports(1)[0]
    stages = [f"--stage={name}={address}" for name, address in addresses.items()]
    names = [] if model is None else [f"--model-name={model}"]
    command = [sys.executable, "-m", "gateway", f"--pipeline={pipeline}", f"--port={port}", *stages, *names, *flags]
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, process_group=0, cwd=sources, env=_environment(sources)
        )
    started = GatewayProcess(f"http://127.0.0.1:{port}", process)
    try:
        _wait_until_ready(started, log)
        yield started
    finally:
        process.terminate()
        process.wait()


def _environment(sources: Path | None) -> dict[str, str] | None:
    return None if sources is None else os.environ | {"PYTHONPATH": str(sources)}


def _wait_until_ready(started: GatewayProcess, log: Path) -> None:
    end = time.monotonic() + _READY_WITHIN_S
    while started.process.poll() is None and time.monotonic() < end:
        with contextlib.suppress(httpx.HTTPError):
            if httpx.get(f"{started.url}/ready", timeout=_READY_WITHIN_S, verify=False).status_code == 200:
                return
        time.sleep(_POLL_S)
    raise RuntimeError(f"the gateway is not ready:\n{_tail(log)}")


def _tail(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-20:])
