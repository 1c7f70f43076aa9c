"""Anthropic's SDK, in an environment of its own."""

import json
import subprocess
from typing import Any

from tests.support.clients.environments import CLIENTS, python_with

TIMEOUT_S = 200  # a guard


def anthropic_report(server: str, *words: str) -> dict[str, Any]:
    """What tests/clients/anthropic_answers.py prints."""
    command = [str(python_with("anthropic")), str(CLIENTS / "anthropic_answers.py"), server, *words]
    done = subprocess.run(command, env={}, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])
