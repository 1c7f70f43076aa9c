"""The images' health command, on this machine."""

import subprocess
from pathlib import Path

COMMAND = Path(__file__).parents[2] / "deploy/docker/healthy"


def healthy(port: int, path: str) -> tuple[int, str]:
    """Exit status and output of `healthy PORT PATH`; with nothing in its environment, as it needs nothing."""
    done = subprocess.run(["/bin/bash", COMMAND, str(port), path], capture_output=True, text=True, env={}, check=False)
    return done.returncode, done.stdout.strip()
