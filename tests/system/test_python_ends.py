"""An Omni leaves nothing behind, however it ends: scripted stages as processes, started by a user's program.

They stand in a directory of their own as packages `services.*`, which PYTHONPATH puts before the real ones.
"""

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.support.systems.stack import HANG_GUARD_S, processes_of, until

ROOT = Path(__file__).parents[2]

STAGE = """
import argparse, asyncio, os, sys
from tests.support.scripted.stages import ScriptedStages

flags = argparse.ArgumentParser(allow_abbrev=False)
flags.add_argument("--model")
flags.add_argument("--port")
arguments, _ = flags.parse_known_args()
kind = os.path.basename(os.path.dirname(os.path.abspath(__file__)))
if arguments.model == "broken/model":
    sys.exit(f"{kind}: no such checkpoint: broken")


async def serve():
    stages = ScriptedStages([kind])
    stages.addresses[kind] = "127.0.0.1:" + arguments.port
    await stages.start(kind)
    await stages.servers[kind].wait_for_termination()


asyncio.run(serve())
"""

COMMON = """
import asyncio, gc, json, os, sys, threading, time
from pathlib import Path
from quartet import AsyncOmni, Omni, StartError

run = Path(sys.argv[1])


def start(name, kind=Omni):
    return kind("any/model", pipeline="text", run_directory=run / name)


def pid(name):
    return json.loads((run / name / "state.json").read_text())["processes"]["thinker"]["pid"]


def lives(name):
    return Path(f"/proc/{pid(name)}").exists()


def until(condition):
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def say(what):
    print(what, flush=True)
"""

ENDINGS = """
try:
    Omni("broken/model", pipeline="text", run_directory=run / "broken")
except StartError as error:
    assert "thinker: no such checkpoint: broken" in str(error), error
assert not lives("broken")

made = []
thread = threading.Thread(target=lambda: made.append(start("thread")))
thread.start()
thread.join()  # Linux would have its children killed
assert made[0].generate("Hello").text == "Hello, world"
for _ in range(6):  # with a call under way, that of the deltas: gRPC's own fork handlers crashed one child in four
    if (child := os.fork()) == 0:
        try:
            made[0].generate("Hello")
        except RuntimeError as error:
            made[0].close()
            sys.exit(0 if "forked" in str(error) else 1)  # what is done at the exit of a process is not for this one
    assert os.waitpid(child, 0)[1] == 0
assert lives("thread")
assert made[0].generate("Hello").text == "Hello, world"
made.clear()
gc.collect()
until(lambda: not lives("thread"))
say("forgotten")

try:
    with start("block") as omni:
        assert omni.generate("Hello").text == "Hello, world"
        1 / 0
except ZeroDivisionError:
    assert not lives("block")
say("left")


async def ask():
    async with start("async block", AsyncOmni) as omni:
        assert (await omni.generate("Hello")).text == "Hello, world"
    assert not lives("async block")
    open = start("async", AsyncOmni)
    await open.start()
    return open


kept = asyncio.run(ask())
also_kept = start("kept")
assert lives("async") and lives("kept")
say("open")
raise SystemExit(7)
"""

KILLED = """
omni = Omni("any/model", pipeline="text")  # in a temporary directory
if os.fork() == 0:
    time.sleep(3600)
say("ready")
time.sleep(3600)
"""


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    folder = tmp_path / "stand_ins/services/thinker"
    folder.mkdir(parents=True)
    (folder / "__main__.py").write_text(STAGE)
    others = "__path__ = __import__('pkgutil').extend_path(__path__, __name__)"
    (folder / "__init__.py").write_text(others)
    (folder.parent / "__init__.py").write_text(others)
    (tmp_path / "temporary").mkdir()
    paths = os.pathsep.join([str(tmp_path / "stand_ins"), str(ROOT)])
    return {**os.environ, "PYTHONPATH": paths, "TMPDIR": str(tmp_path / "temporary")}


@contextlib.contextmanager
def started(code: str, directory: Path, environment: dict[str, str]) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-P", "-c", COMMON + code, str(directory / "runs")]
    process = subprocess.Popen(
        command, env=environment, cwd=directory, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    family: list[psutil.Process] = []
    try:
        yield process
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):
            family = psutil.Process(process.pid).children(recursive=True)
        process.kill()
        process.wait()
        for each in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                each.kill()


def test_nothing_is_left_by_a_program_that_ends_by_itself(tmp_path: Path, environment: dict[str, str]) -> None:
    with started(ENDINGS, tmp_path, environment) as process:
        out, errors = process.communicate(timeout=HANG_GUARD_S)
    assert (process.returncode, out.split()) == (7, ["forgotten", "left", "open"]), errors
    assert "Traceback" not in errors
    assert not list(processes_of(tmp_path / "runs"))


def test_nothing_is_left_by_a_program_that_is_killed(tmp_path: Path, environment: dict[str, str]) -> None:
    with started(KILLED, tmp_path, environment) as process:
        assert process.stdout
        assert process.stdout.readline() == "ready\n"
        family = psutil.Process(process.pid).children(recursive=True)
        (forked,) = [each for each in family if each.cmdline() == psutil.Process(process.pid).cmdline()]
        process.kill()
        process.wait()
        try:
            until(lambda: not [each for each in family if each != forked and each.is_running()], "stages and reaper")
            until(lambda: not list((tmp_path / "temporary").glob("quartet-*")), "the temporary directory to go")
            assert forked.is_running()  # it was not what they ended with
        finally:
            forked.kill()
