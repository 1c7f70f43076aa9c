"""Makes .venv from requirements.lock: `make setup`. Run by the environment's own Python.

It checks the system first (cli/doctor/system.py) and only then downloads. pip installs, as it is configured on this
machine: mirrors, folders of wheels, certificates. If pip does not find torch's CPU build, which the public index lacks,
it comes from TORCH_INDEX. An interrupted set-up goes on: pip keeps its downloads and installed packages.
"""

from __future__ import annotations  # an older Python is to say that it is too old

import argparse
import contextlib
import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "scripts"), str(ROOT / "cli" / "doctor")]  # by itself: the package's others need libraries

import system  # noqa: E402  # pyright: ignore[reportMissingImports]
import torch_cpu  # noqa: E402
from locked import LOCK, LockedPackage, read, select  # noqa: E402

VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
LOG = VENV / "set-up.log"
STAMP = VENV / "lock.sha256"
EVERYTHING = (
    "base",
    "build",
    "gateway",
    "talker",
    "code2wav",
    "dit",
    "talk",
    "webrtc",
    "ucx",
    "otel",
    "docs",
    "dev",
    "peers",
)
EXTRAS = ("gateway", "talker", "code2wav", "dit", "talk", "webrtc", "ucx", "otel", "docs", "dev")
LINE_S = 10.0  # between two lines about progress where there is no terminal


class SetUpError(Exception):
    """Set-up cannot go on."""


class Progress:
    """One line that changes on a terminal; elsewhere a new one every `LINE_S` seconds."""

    def __init__(self) -> None:
        self._is_terminal = sys.stderr.isatty()
        self._shown_s = 0.0

    def show(self, text: str) -> None:
        now_s = time.monotonic()
        if self._is_terminal:
            width = shutil.get_terminal_size().columns - 1
            print(f"\r\033[K{text[:width]}", end="", file=sys.stderr, flush=True)
        elif now_s - self._shown_s >= LINE_S:
            self._shown_s = now_s
            print(text, file=sys.stderr, flush=True)

    def done(self, text: str) -> None:
        print(f"\r\033[K{text}" if self._is_terminal else text, file=sys.stderr, flush=True)


def check_system(thinker: str) -> None:
    """Raises SetUpError: the system lacks something that this cannot install."""
    missing = [lack for lack in system.lacks(thinker, ROOT) if lack.fatal]
    packages = [lack.package for lack in missing if lack.package]
    if packages and len(packages) == len(missing) and os.geteuid() == 0 and system.manager() == "apt":
        line = system.command(packages, "apt")
        print(
            f"missing: {'; '.join(lack.text for lack in missing)}\nas root on Debian or Ubuntu: {line}", file=sys.stderr
        )
        environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
        for words in (["apt-get", "-qq", "update"], line.split()):
            if subprocess.run(words, env=environment, stdout=subprocess.DEVNULL, check=False).returncode:
                raise SetUpError(f"{' '.join(words)} failed; its words are above")
        missing = [lack for lack in system.lacks(thinker, ROOT) if lack.fatal]
    if missing:
        how = system.commands([lack.package for lack in missing if lack.package])
        raise SetUpError("; ".join(lack.text for lack in missing) + (f"\ninstall it: {how}" if how else ""))


def make_environment() -> None:
    """Makes an empty environment, unless there is one for this lock and Python."""
    wanted = hashlib.sha256(LOCK.read_bytes()).hexdigest() + f" {platform.python_version()}"
    if STAMP.is_file() and STAMP.read_text() == wanted and PYTHON.exists():
        return
    if VENV.exists():
        print("requirements.lock or Python is another one: .venv is made anew", file=sys.stderr)
        shutil.rmtree(VENV)
    subprocess.run([sys.executable, "-m", "venv", str(VENV)], check=True)
    STAMP.write_text(wanted)


def pip(*arguments: str, report: Progress | None = None, of: int = 1) -> str:
    """Runs `pip install` and shows progress over `of` packages. Returns its output if it failed, else ""."""
    environment = {
        **os.environ,
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        "PIP_PROGRESS_BAR": "off",
        "PYTHONUNBUFFERED": "1",
    }
    command = [str(PYTHON), "-m", "pip", "install", "--no-deps", "--no-compile", *arguments]
    process = subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    )
    lines: list[str] = []
    installed = threading.Event()
    assert process.stdout
    try:
        with LOG.open("a") as log, _counting(report, of, installed):
            for line in process.stdout:
                lines.append(line)
                log.write(line)
                if report is None:
                    continue
                if found := re.match(r"\s*(?:Downloading|Using cached) (\S+?)-\d\S* \((.+?)\)", line):
                    report.show(
                        f"fetching {sum(each.startswith('Collecting') for each in lines)} of {of}: "
                        f"{Path(found[1]).name} ({found[2]})"
                    )
                elif line.startswith("Installing collected"):
                    installed.set()
        status = process.wait()
    finally:
        process.kill()
    return "".join(lines) if status else ""


@contextlib.contextmanager
def _counting(report: Progress | None, of: int, begun: threading.Event) -> Iterator[None]:
    """Counts packages in the environment while pip, silently, installs."""
    ended = threading.Event()

    def count() -> None:
        while not ended.wait(0.3):
            if begun.is_set() and report is not None:
                there = list(VENV.glob("lib/python*/site-packages/*.dist-info"))
                newest = max(there, key=lambda path: path.stat().st_mtime, default=Path("pip"))
                report.show(f"installing {min(len(there), of)} of {of}: {newest.name.partition('-')[0]}")

    thread = threading.Thread(target=count, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def install_torch(flags: Sequence[str]) -> None:
    """Installs torch's CPU build. Raises SetUpError: no place has it."""
    print("fetching torch's CPU build", file=sys.stderr)
    failures: list[str] = []
    for arguments in torch_cpu.attempts(VENV, flags):
        if failures:
            print(f"pip does not find it; asking {torch_cpu.INDEX}", file=sys.stderr)
        if not (failure := pip(*arguments)):
            return
        failures.append(failure)
    raise SetUpError("no space left on the disk" if "No space left" in failures[-1] else torch_cpu.remedy())


def _file(name: str, packages: Sequence[LockedPackage]) -> str:
    """Writes a requirements file into the environment."""
    path = VENV / f"{name}.lock"
    path.write_text("".join(each.lines for each in packages))
    return str(path)


def _cause(output: str) -> str:
    """Lines of pip's output that explain the failure."""
    if "No space left on device" in output:
        return "no space left on the disk"
    if re.search(
        r"name resolution|Network is unreachable|NewConnectionError|ConnectTimeout|Connection refused", output
    ):
        return "the package index cannot be reached; with a mirror, name it as pip does: PIP_INDEX_URL"
    errors = [line.strip() for line in output.splitlines() if line.startswith("ERROR:")]
    return "\n".join(errors[-3:] or output.splitlines()[-3:])


def set_up(thinker: str, flags: Sequence[str]) -> None:
    started_s = time.monotonic()
    check_system(thinker)
    make_environment()
    packages, report = read(), Progress()
    if thinker == "thinker-cpu":
        install_torch(flags)
        sets = [*EVERYTHING, thinker]
    else:
        sets = [*EVERYTHING, thinker, "cuda"]
    wanted = list(select(packages, sets))
    names = {each.name for each in wanted}
    if failure := pip(
        "--require-hashes", "--requirement", _file("packages", wanted), *flags, report=report, of=len(names)
    ):
        raise SetUpError(_cause(failure))
    report.show("installing Quartet itself")
    quartet = f"{ROOT}[{','.join([*EXTRAS, thinker])}]"
    if failure := pip("--no-build-isolation", "--editable", quartet, *flags):
        raise SetUpError(_cause(failure))
    subprocess.run([str(PYTHON), str(ROOT / "scripts" / "cpu_torch_env.py")], check=True)
    report.done(f"installed {len(names)} packages into .venv in {time.monotonic() - started_s:.0f} s")


def main() -> None:
    parser = argparse.ArgumentParser(description="Makes .venv with what requirements.lock says.")
    parser.add_argument("--thinker", choices=("thinker-cpu", "thinker-cuda"), default="thinker-cpu")
    flags, more = parser.parse_known_args()
    try:
        set_up(flags.thinker, more)
    except SetUpError as error:
        sys.exit(f"\nset-up: {error}\n(the whole is in {LOG}; `make setup` again goes on from here)")
    except KeyboardInterrupt:
        sys.exit("\nset-up was interrupted; `make setup` again goes on from here")


if __name__ == "__main__":
    main()
