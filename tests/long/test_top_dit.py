"""`quartet top` on a diffusion model that `quartet up` serves."""

import os
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from tests.support.systems.stack import running, until
from tests.support.weights.checkpoints import diffusion_checkpoint

pytestmark = [pytest.mark.e2e, pytest.mark.weekly]


def top(*flags: str) -> list[list[str]]:
    """Cells of the table's rows."""
    command = [sys.executable, "-m", "cli.main", "top", "--once", *flags]
    environment = {**os.environ, "COLUMNS": "160"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    rows = [line.strip("│").split("│") for line in done.stdout.splitlines() if line.startswith("│")]
    return [[cell.strip() for cell in row] for row in rows]


def answered(*flags: str, known: int) -> list[list[str]]:
    """A table for which everyone has answered in the 2 s that the command waits: the gateway's first four cells and
    the dit's first `known` have something."""
    rows: list[list[str]] = []

    def reached() -> bool:
        nonlocal rows
        rows = top(*flags)
        return len(rows) == 2 and "-" not in (*rows[0][:4], *rows[1][:known])

    until(reached, "a table with every process")
    return rows


def test_top_shows_the_dit_and_the_gateway(tmp_path: Path):
    with running(
        diffusion_checkpoint("sd3"), tmp_path / "run", f"--gateway-arg=--jobs-dir={tmp_path / 'jobs'}"
    ) as system:
        gateway, dit = answered("--run-dir", str(system.run_directory), known=4)
        assert gateway[:4] == ["gateway", "ready", "0", "0"]
        assert dit[:4] == ["dit", "SERVING", "0", "0"]
        asked = {"prompt": "a red fox", "size": "64x64", "num_inference_steps": 3}
        httpx.post(f"{system.url}/v1/images/generations", json=asked, timeout=60).raise_for_status()
        until(lambda: not system.in_flight()["dit"], "a stage counts a request out just after its last word")
        metrics = system.state["processes"]["dit"]["metrics_address"]
        for where in (["--run-dir", str(system.run_directory)], ["--url", system.url, "--metrics", f"dit={metrics}"]):
            _, (name, state, *_, step_ms, batch, kv, first_ms) = answered(*where, known=6)
            assert (name, state, batch, kv) == ("dit", "SERVING", "1.0", "-")
            assert 0 < float(step_ms) < float(first_ms)
        until(lambda: top("--url", system.url)[1][:4] == ["dit", "SERVING", "0", "0"], "as the dit told the gateway")
