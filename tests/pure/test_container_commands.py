"""What containers run under docker compose beside the stage: deploy/docker/start.py and healthy, as processes here.

Their waits are shortened and their files are in a directory of the test; `make test-compose` has them in containers.
"""

import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

DOCKER = Path(__file__).parents[2] / "deploy/docker"
LONG_S = 60


class Container:
    """Copies of both commands that have `directory` for /tmp and /run.

    Attributes:
        ready: status that the stage's /ready answers.
    """

    def __init__(self, directory: Path) -> None:
        self.directory, self.ready = directory, 503
        short = {"BETWEEN_TRIES_S = 1.0": "BETWEEN_TRIES_S = 0.0", "PAUSE_S = 120.0": "PAUSE_S = 600.0"}
        short |= {"-ge 60": "-ge 2", "read -r -t 5 -u": "read -r -t 0.1 -u", "read -r -t 1 -u": "read -r -t 0.1 -u"}
        text = {name: (DOCKER / name).read_text() for name in ("start.py", "healthy")}
        assert all(any(old in each for each in text.values()) for old in short)
        for name, content in text.items():
            for old, new in {**short, "/tmp/": f"{directory}/", "/run/": f"{directory}/"}.items():
                content = content.replace(old, new)
            (directory / name).write_text(content)
        self.file("quartet-starts").mkdir()
        container = self

        class Stage(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.send_response(container.ready)
                self.end_headers()
                self.wfile.write(b"as it is")

            def log_message(self, *_) -> None:
                pass

        self.server = HTTPServer(("127.0.0.1", 0), Stage)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def file(self, name: str) -> Path:
        """One of those that the commands share."""
        return self.directory / name

    def start(self, code: str) -> subprocess.Popen[str]:
        """start.py with a stage that is Python's `code`."""
        command = [sys.executable, "-IS", self.file("start.py"), sys.executable, "-c", code]
        return subprocess.Popen(command, stderr=subprocess.PIPE, text=True)

    def watch(self) -> subprocess.Popen[str]:
        """The health command."""
        command = ["bash", self.file("healthy"), "--watch", str(self.server.server_port), "/ready"]
        return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)

    def check(self) -> tuple[int, str]:
        """Status and output of the health command."""
        watch = self.watch()
        said, _ = watch.communicate(timeout=LONG_S)
        return watch.returncode, said.strip()


@pytest.fixture
def container(tmp_path: Path) -> Iterator[Container]:
    made = Container(tmp_path)
    yield made
    made.server.shutdown()
    made.server.server_close()


def wait_for(file: Path) -> None:
    end = time.monotonic() + LONG_S
    while not file.exists():
        assert time.monotonic() < end, file
        time.sleep(0.02)


def failed(container: Container, code: str) -> tuple[str, list[str]]:
    """The error and the lines of a start that was tried to the end, and stopped in its pause."""
    process = container.start(code)
    wait_for(container.file("quartet-failed"))
    while not list(container.file("quartet-starts").iterdir()):
        time.sleep(0.02)
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    _, said = process.communicate(timeout=LONG_S)
    assert process.returncode == 0
    assert not list(container.file("quartet-starts").iterdir()), "nobody is to know of it any more"
    lines = said.splitlines()
    last = json.loads(lines[-1])
    assert "failed to start 3 times" in last["event"]
    assert container.file("quartet-failed").read_text() == f"failed to start 3 times: {last['error']}\n"
    return last["error"], lines


@pytest.mark.parametrize(
    ("code", "error"),
    [
        ("raise ValueError('no such model')", "ValueError: no such model"),
        ("import sys; print('one\\n  two', file=sys.stderr); sys.exit(2)", "two"),
        ("raise SystemExit(3)", "ended with status 3, without a word"),
        ("import os; print('loading'); os.kill(os.getpid(), 11)", "ended by SIGSEGV"),
        (
            """import json, sys; print(json.dumps({"level": "critical", "event": "cannot start", "error": "why"}))
print("leaked: 1", file=sys.stderr); sys.exit(2)""",
            "why",
        ),
    ],
)
def test_the_third_failed_start_says_why_and_waits(container, code, error):
    said, lines = failed(container, code)
    assert said == error
    tries = [line for line in lines if '"failed to start; trying again"' in line]
    assert [json.loads(line)["failures"] for line in tries] == [1, 2]


def test_a_stage_that_has_served_ends_its_container_with_its_status(container):
    served = container.file("quartet-served")
    process = container.start(f"open({str(served)!r}, 'w').close(); raise SystemExit(7)")
    process.communicate(timeout=LONG_S)
    assert process.returncode == 7
    assert not container.file("quartet-failed").exists()


def test_a_stop_is_passed_on_and_what_a_stage_leaves_is_killed(container):
    begun, left = container.file("begun"), container.file("left")
    code = f"""import os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(5))
child = subprocess.Popen(["sleep", "600"])
open({str(left)!r}, "w").write(str(child.pid))
os.rename({str(left)!r}, {str(begun)!r})
time.sleep(600)"""
    process = container.start(code)
    wait_for(begun)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=LONG_S)
    assert process.returncode == 5
    child = Path(f"/proc/{begun.read_text()}/stat")
    end = time.monotonic() + LONG_S
    while child.exists() and " Z " not in child.read_text():  # it is another process's to reap
        assert time.monotonic() < end
        time.sleep(0.02)


def test_a_check_waits_for_the_first_time_and_then_for_news(container):
    watch = container.watch()
    with pytest.raises(subprocess.TimeoutExpired):
        watch.wait(2.5)  # longer than a later check lasts without news
    container.ready = 200
    assert watch.wait(LONG_S) == 0
    assert container.file("quartet-served").exists()
    assert container.check() == (0, ""), "a check without news"
    container.ready = 503
    assert container.check() == (1, "/ready: 503 as it is")
    assert container.check() == (1, "/ready: 503 as it is"), "and it is not news twice"
    container.ready = 200
    assert container.check() == (0, "")


def test_a_check_after_one_that_was_cut_off_says_at_once_how_it_is(container):
    container.ready = 200
    assert container.check() == (0, "")
    watch = container.watch()
    (news,) = container.directory.glob("quartet-health.*")
    while "asking" not in news.read_text():
        time.sleep(0.02)
    watch.kill()
    watch.wait(LONG_S)
    assert "asking" in news.read_text()
    assert container.check() == (0, "")
    assert news.read_text() == "well\n"


def test_a_check_says_why_a_stage_cannot_start(container):
    container.file("quartet-failed").write_text("failed to start 3 times: no such model\n")
    assert container.check() == (1, "failed to start 3 times: no such model")


def test_a_check_does_not_wait_where_another_container_cannot_start(container):
    """What is in the file was so just now; that of a container which is gone was long ago."""
    other = container.file("quartet-starts") / "talker-1234"
    other.write_text(f"{time.time() - 3600:.0f} talker cannot start\n")
    watch = container.watch()
    with pytest.raises(subprocess.TimeoutExpired):
        watch.wait(1)
    other.write_text(f"{time.time() + LONG_S:.0f} talker cannot start\n")
    said, _ = watch.communicate(timeout=LONG_S)
    assert (watch.returncode, said) == (0, "talker cannot start; not waited for: /ready: 503 as it is\n")
    assert not container.file("quartet-served").exists()
