"""`quartet top` on a diffusion model that `quartet up` serves."""

import os
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from tests.support.checkpoints import diffusion_checkpoint
from tests.support.stack import running

pytestmark = [pytest.mark.e2e, pytest.mark.long]


def top(*flags: str) -> list[list[str]]:
    """Cells of the table's rows."""
    command = [sys.executable, "-m", "cli.main", "top", "--once", *flags]
    environment = {**os.environ, "COLUMNS": "160"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    rows = [line.strip("│").split("│") for line in done.stdout.splitlines() if line.startswith("│")]
    return [[cell.strip() for cell in row] for row in rows]


def test_top_shows_the_dit_and_the_gateway(tmp_path: Path):
    with running(
        diffusion_checkpoint("sd3"), tmp_path / "run", f"--gateway-arg=--jobs-dir={tmp_path / 'jobs'}"
    ) as system:
        gateway, dit = top("--run-dir", str(system.run_directory))
        assert gateway[:4] == ["gateway", "ready", "0", "0"]
        assert dit[:4] == ["dit", "SERVING", "0", "0"]
        asked = {"prompt": "a red fox", "size": "64x64", "num_inference_steps": 3}
        httpx.post(f"{system.url}/v1/images/generations", json=asked, timeout=60).raise_for_status()
        metrics = system.state["processes"]["dit"]["metrics_address"]
        for where in (["--run-dir", str(system.run_directory)], ["--url", system.url, "--metrics", f"dit={metrics}"]):
            _, (name, state, *_, step_ms, batch, kv, first_ms) = top(*where)
            assert (name, state, batch, kv) == ("dit", "SERVING", "1.0", "-")
            assert 0 < float(step_ms) < float(first_ms)
        assert top("--url", system.url)[1][:4] == ["dit", "SERVING", "0", "0"]  # as the dit told the gateway
