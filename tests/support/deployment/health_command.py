"""The images' health command, on this machine."""

import subprocess
from pathlib import Path

COMMAND = Path(__file__).parents[3] / "deploy/docker/healthy"


def healthy(port: int, path: str) -> tuple[int, str]:
    """Exit status and output of `healthy PORT PATH`; with nothing in its environment, as it needs nothing.

    Its 5 s may pass on a machine that stands still: then it is asked again, for a minute.
    """
    command = ["/bin/bash", COMMAND, str(port), path]
    for _ in range(12):
        done = subprocess.run(command, capture_output=True, text=True, env={}, check=False)
        if "no answer within" not in done.stdout:
            break
    return done.returncode, done.stdout.strip()
