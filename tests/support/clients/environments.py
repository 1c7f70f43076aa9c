"""Environments of other people's libraries, for the programs of tests/clients. Made once on a machine: see `kept`."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.kept import kept_folder

CLIENTS = Path(__file__).parents[2] / "clients"
TIMEOUT_S = 540  # a guard: the largest takes a minute of a free core
# What pip and npm say where no registry can be reached.
_UNREACHED = re.compile(
    "NewConnectionError|ConnectTimeoutError|NameResolutionError|ProxyError|ENOTFOUND|EAI_AGAIN|ECONNREFUSED|ETIMEDOUT"
)


def python_with(name: str) -> Path:
    """The Python of an environment that has what `NAME.txt` asks for. Skips the test where it cannot be had."""
    requirements = CLIENTS / f"{name}.txt"

    def make(out: Path) -> None:
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(out)], check=True, timeout=TIMEOUT_S)
        python = str(out / "bin" / "python")
        _install([sys.executable, "-m", "pip", "--python", python, "install", "--no-compile", "-r", str(requirements)])

    return kept_folder(make, "python", sys.version, requirements) / "bin" / "python"


def node_with_packages(directory: Path, package: Path = CLIENTS / "package.json") -> str:
    """The command `node`, for the programs of tests/clients, which are copied to `directory` with what `package` asks
    for. Skips the test where that cannot be had."""
    node, npm = shutil.which("node"), shutil.which("npm")
    if node is None or npm is None:
        pytest.skip("node or npm is not installed")

    def make(out: Path) -> None:
        shutil.copy(package, out)
        retries = ("--fetch-retries=1", "--fetch-retry-mintimeout=1000")
        _install([npm, "install", "--no-audit", "--no-fund", "--ignore-scripts", *retries], out)

    (directory / "node_modules").symlink_to(kept_folder(make, "node", package) / "node_modules")
    for program in CLIENTS.glob("*.mjs"):
        shutil.copy(program, directory)
    return node


def report_of(*command: str | Path, **environment: str) -> Any:
    """The last line that a program of tests/clients prints, read as JSON."""
    outside = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | environment
    done = subprocess.run(command, env=outside, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def _install(command: list[str], directory: Path | None = None) -> None:
    done = subprocess.run(command, cwd=directory, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    said = done.stdout + done.stderr
    if done.returncode and (unreached := _UNREACHED.search(said)):
        pytest.skip(f"no registry of packages can be reached by {Path(command[0]).name}: {unreached[0]}")
    assert done.returncode == 0, said
