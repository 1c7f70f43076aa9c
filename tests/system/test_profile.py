"""`quartet profile` and `quartet trace` on a running system: one trace of all processes, on one clock."""

import gzip
import json
import os
import re
import signal
import subprocess
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.systems.command import quartet, start
from tests.support.systems.stack import HANG_GUARD_S, Stack, until

pytestmark = pytest.mark.e2e

STAGES = ("thinker", "talker", "code2wav")
SPOKEN = {
    "messages": [{"role": "user", "content": "What is the sea?"}],
    "modalities": ["text", "audio"],
    "audio": {"format": "wav"},
    "max_tokens": 12,
    "temperature": 0,
    "quartet": {"talker": {"max_frames": 8}},
}
LONGEST_S = 60  # each profile is ended sooner


def speak(stack: Stack, request_id: str) -> str:
    """Asks for speech under that id; the id of the completion."""
    body = SPOKEN | {"model": stack.model}
    answer = stack.http.post("/v1/chat/completions", json=body, headers={"x-request-id": request_id})
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-request-id"] == request_id
    return answer.json()["id"]


def told(stack: Stack, event: str) -> dict[str, int]:
    """How often each stage's log has `event`."""
    return {name: stack.log(name).count(f'"event": "{event}"') for name in STAGES}


def server(stack: Stack) -> list[str]:
    return ["--url", stack.url, "--api-key", stack.key]


def recording(stack: Stack, directory: Path) -> subprocess.Popen[str]:
    """A `quartet profile` that all stages record for."""
    before = told(stack, "profile started")
    command = start("profile", "--seconds", str(LONGEST_S), "--out", "out", *server(stack), cwd=directory)
    until(
        lambda: (
            command.poll() is not None or all(n > before[name] for name, n in told(stack, "profile started").items())
        ),
        "the profile has started",
    )
    assert command.poll() is None, command.communicate()
    return command


def merged(command: subprocess.Popen[str], directory: Path) -> tuple[dict[str, Any], str]:
    """(the trace, what the command said), once that was told to stop."""
    command.send_signal(signal.SIGINT)
    _, said = command.communicate(timeout=HANG_GUARD_S)
    assert command.returncode == 0, said
    return json.loads(gzip.decompress((directory / "out/trace.json.gz").read_bytes())), said


def spans(trace: dict[str, Any], request_id: str) -> dict[str, dict[str, tuple[float, float]]]:
    """By stage: (start, end) of the request's span ("") and of its phases, in microseconds; a moment is both."""
    open_: dict[tuple[str, str], tuple[str, float]] = {}
    found: dict[str, dict[str, tuple[float, float]]] = {}
    stages: dict[str, str] = {}
    for event in trace["traceEvents"]:
        if event.get("cat") != "request" or event["ph"] not in "bne":
            continue
        name, key = event["name"], (event["id"], event["name"])
        if event["ph"] == "b" and event["args"]["request_id"] == request_id:
            if name.endswith(f" {request_id}"):
                stages[event["id"]] = name.partition(" ")[0]
            open_[key] = ("" if name.endswith(f" {request_id}") else name), event["ts"]
        elif event["ph"] == "e" and key in open_:
            phase, began = open_.pop(key)
            found.setdefault(stages[event["id"]], {})[phase] = began, event["ts"]
        elif event["ph"] == "n" and event["id"] in stages:
            found.setdefault(stages[event["id"]], {})[name] = event["ts"], event["ts"]
    assert not open_
    return found


def test_a_spoken_request_in_all_processes_on_one_clock(stack: Stack, tmp_path: Path) -> None:
    command = recording(stack, tmp_path)
    again = stack.http.post("/start_profile", json={"seconds": 1})
    assert (again.status_code, again.json()["error"]["code"]) == (409, "profile_running")
    completion = speak(stack, "profiled")
    trace, said = merged(command, tmp_path)
    assert "missing" not in said

    found = spans(trace, "profiled")
    assert set(found) == {"gateway", *STAGES}
    (whole_start, whole_end) = found["gateway"][""]
    prefilled = found["thinker"]["prefill"][1]
    frame, sound = found["talker"]["first output"][0], found["code2wav"]["first output"][0]
    assert whole_start < found["thinker"][""][0] < prefilled < frame < sound < whole_end
    for stage in STAGES:
        assert whole_start < found[stage][""][0] < found[stage]["decode"][1] < whole_end  # its last output

    events = trace["traceEvents"]
    assert all(event["ts"] >= 0 for event in events if event["ph"] != "M")
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert [name.partition(" ")[0] for name in names.values()] == [
        "gateway",
        "thinker",
        "thinker",
        "talker",
        "code2wav",
    ]
    operations = [event for event in events if event.get("cat") == "cpu_op" and event["name"].startswith("aten::")]
    for stage in ("talker", "code2wav"):
        own = [event for event in operations if names[event["pid"]].startswith(stage)]
        (began, ended) = found[stage][""]
        assert any(began <= event["ts"] <= ended for event in own), stage
        threads = {
            event["args"]["name"]
            for event in events
            if event["name"] == "thread_name" and event["pid"] in {each["pid"] for each in own}
        }
        assert any("engine" in name for name in threads), threads
    vllm = [event for event in events if "vLLM" in names[event["pid"]]]
    steps = [event for event in vllm if event["name"].startswith("execute_")]
    assert steps
    first, last = found["thinker"][""]
    assert any(first <= step["ts"] <= last for step in steps)

    for request_id in ("profiled", completion):
        shown = quartet("trace", request_id, *server(stack), cwd=tmp_path)
        assert shown.returncode == 0, shown.stderr
        rows = re.findall(r"^\W*(gateway|thinker|talker|code2wav) {2,}\d", shown.stdout, re.MULTILINE)
        assert rows == ["gateway", *STAGES]
        assert [word for word in ("queue", "prefill", "decode", "until first audio") if word not in shown.stdout] == []


def test_what_is_refused(stack: Stack, tmp_path: Path) -> None:
    for members, param in (
        ({"stages": ["nose"]}, "stages"),
        ({"seconds": 1e6}, "seconds"),
        ({"seconds": 0}, "seconds"),
        ({"stages": []}, "stages"),
        ({"nose": 1}, "nose"),
    ):
        answer = stack.http.post("/start_profile", json=members)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text
    answer = stack.http.post("/stop_profile")
    assert (answer.status_code, answer.json()["error"]["code"]) == (409, "no_profile")
    for path in ("/start_profile", "/stop_profile"):
        assert httpx.post(f"{stack.url}{path}").status_code == 401
    done = quartet("profile", "--stage", "nose", "--out", "out", *server(stack), cwd=tmp_path)
    assert done.returncode == 1
    assert "thinker, talker, code2wav" in done.stderr
    done = quartet("trace", "nobody", *server(stack), cwd=tmp_path)
    assert done.returncode == 1
    assert "nobody" in done.stderr


def test_a_profile_whose_client_dies_ends_by_itself(stack: Stack) -> None:
    before = told(stack, "profile ended")
    answer = stack.http.post("/start_profile", json={"stages": ["talker", "code2wav"], "seconds": 0.5})
    assert answer.json()["seconds"] == 0.5
    until(lambda: all(told(stack, "profile ended")[name] > before[name] for name in ("talker", "code2wav")))
    assert stack.http.post("/stop_profile").headers["content-type"] == "application/x-tar"  # it was kept


def test_the_rest_is_fetched_where_a_stage_dies(stack: Stack, tmp_path: Path) -> None:
    command = recording(stack, tmp_path)
    pid = stack.pid("code2wav")
    os.kill(pid, signal.SIGKILL)
    until(lambda: stack.pid("code2wav") != pid and stack.ready(), "code2wav is back")
    trace, said = merged(command, tmp_path)
    assert "missing: code2wav" in said
    names = [event["args"]["name"] for event in trace["traceEvents"] if event["name"] == "process_name"]
    assert {name.partition(" ")[0] for name in names} == {"gateway", "thinker", "talker"}
    assert trace["otherData"]["missing"]
