"""Profiles and traces at the gateway: who may ask, whose requests are told, and how traces become one."""

import asyncio
import gzip
import io
import json
import tarfile
from pathlib import Path
from typing import Any

import pytest

from cli.request_table import trace_table
from cli.terminal import CommandError
from cli.trace_file import merge
from gateway.access.api_keys import new_key
from gateway.profiling.clocks import Clock
from tests.pure.test_api_keys import bearer, entry, write
from tests.support.systems.gateway import running

ASK = {
    "model": "scripted",
    "messages": [{"role": "user", "content": "hi"}],
    "modalities": ["text", "audio"],
    "audio": {"format": "wav"},
}


async def test_who_may_ask(tmp_path: Path):
    async with running() as gateway:
        for path in ("/start_profile", "/stop_profile"):
            answer = await gateway.http.post(path)
            assert (answer.status_code, answer.json()["error"]["code"]) == (403, "admin_required")
    one, other, admin = new_key(), new_key(), new_key()
    keys = write(tmp_path / "keys.yaml", entry("one", one), entry("other", other), entry("admin", admin, admin=True))
    async with running(api_keys_file=keys) as gateway:
        for path in ("/start_profile", "/stop_profile"):
            assert (await gateway.http.post(path)).status_code == 401
            assert (await gateway.http.post(path, headers=bearer(one))).status_code == 403
            # stages without the service, as these are, record nothing
            answer = await gateway.http.post(path, headers=bearer(admin))
            assert (answer.status_code, answer.json()["error"]["code"]) == (409, "no_profile")
        unknown = await gateway.http.post("/start_profile", json={"stages": ["nose"]}, headers=bearer(admin))
        assert (unknown.status_code, unknown.json()["error"]["param"]) == (400, "stages")

        for name, key in (("mine", one), ("mine-1", other)):
            answer = await gateway.chat(ASK, headers=bearer(key) | {"x-request-id": name})
            assert answer.json()["id"] == f"chatcmpl-{name}"

        async def seen(name: str, key: str) -> list[str] | int:
            told = await gateway.http.get(f"/v1/quartet/trace/{name}", headers=bearer(key))
            return [span["request_id"] for span in told.json()["spans"]] if told.is_success else told.status_code

        # "mine-1" could be a part of "mine", but is a request of another's
        for key in (one, admin):
            assert [await seen(name, key) for name in ("mine", "chatcmpl-mine")] == [["mine"]] * 2
        assert [await seen("mine", other), await seen("mine-1", one), await seen("nobody", admin)] == [404] * 3
        assert await seen("mine-1", other) == ["mine-1"]
        told = (await gateway.http.get("/v1/quartet/trace/mine", headers=bearer(one))).json()
        (span,) = told["spans"]
        names = [phase["name"] for phase in span["phases"]]
        assert (set(names[:2]), names[2:]) == ({"until first text", "until first audio"}, ["until its end"])
        assert "hi" not in json.dumps(span)
        assert {lost["stage"] for lost in told["unreachable"]} == {"thinker", "talker", "code2wav"}


async def test_a_trace_has_no_spans_of_another_keys_request_of_the_same_id(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Stages do not know whose a request is."""
    one, other, admin = new_key(), new_key(), new_key()
    keys = write(tmp_path / "keys.yaml", entry("one", one), entry("other", other), entry("admin", admin, admin=True))
    async with running(api_keys_file=keys) as gateway:

        async def starts(key: str, stage: str = "thinker") -> list[float]:
            found = await gateway.http.get("/v1/quartet/trace/shared", headers=bearer(key))
            return [span["start_us"] for span in found.json()["spans"] if span["stage"] == stage]

        for key in (one, other, one):
            assert (await gateway.chat(ASK, headers=bearer(key) | {"x-request-id": "shared"})).status_code == 200
        told = (await gateway.http.get("/v1/quartet/trace/shared", headers=bearer(admin))).json()["spans"]
        at_us = sorted(span["start_us"] + 2000 for span in told)
        spans = [{"request_id": "shared", "stage": "thinker", "start_us": at, "first_output_us": None} for at in at_us]

        async def ask(replica: Any, request_id: str) -> list[dict[str, Any]]:
            return spans if replica.stage == "thinker" else []

        monkeypatch.setattr("gateway.dialects.operators.profiles._ask", ask)
        assert await starts(admin) == at_us
        assert (await starts(one), await starts(other)) == (at_us[::2], at_us[1:2])
        assert [len(await starts(key, "gateway")) for key in (one, other, admin)] == [2, 1, 3]


async def test_a_request_that_is_served_has_a_span():
    async with running() as gateway:
        gateway.scripts["thinker"].hold = True
        asking = asyncio.create_task(gateway.chat(ASK, headers={"x-request-id": "held"}))
        await gateway.scripts["thinker"].holding.wait()
        (span,) = (await gateway.http.get("/v1/quartet/trace/held")).json()["spans"]
        assert (span["end_us"], span["outcome"]) == (None, "")
        gateway.scripts["thinker"].go_on()
        assert (await asking).status_code == 200
        (span,) = (await gateway.http.get("/v1/quartet/trace/held")).json()["spans"]
        assert span["outcome"] == "200"


def test_a_clock_is_set_right_only_where_it_is_known_to_be_wrong():
    assert Clock(ahead_ns=90, uncertain_ns=100).offset_ns == 0
    assert Clock(ahead_ns=-250, uncertain_ns=100).offset_ns == -250


def span(request_id: str, start_us: float, end_us: float | None, *phases: tuple[str, float, float]) -> dict[str, Any]:
    told = [{"name": name, "start_us": first, "end_us": last} for name, first, last in phases]
    rest = {"stage": "talker", "outcome": "OK" if end_us else "", "first_output_us": start_us + 1, "phases": told}
    return {"request_id": request_id, "start_us": start_us, "end_us": end_us, **rest}


def traced(base_us: int, *events: dict[str, Any]) -> bytes:
    head = {"displayTimeUnit": "ms", "baseTimeNanoseconds": base_us * 1000}
    return gzip.compress(json.dumps(head | {"traceEvents": events, "traceName": "a"}, indent=2).encode())


def archive(file: Path, **members: bytes) -> Path:
    with tarfile.open(file, "w") as written:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            written.addfile(info, io.BytesIO(data))
    return file


def test_traces_of_two_hosts_become_one(tmp_path: Path):
    """Both have one process id, and the talker's clock is a second ahead: the gateway has set its spans right."""
    second = 1_000_000.0
    talker = {
        "stage": "talker", "address": "b:1", "pid": 7, "threads": {"8": "talker-engine"}, "start_us": 5 * second,
        "end_us": 9 * second, "ended_by": "stopped", "missing": "", "files": [{"process": "", "path": "0"}],
        "spans": [span("r", 6 * second, None, ("queue", 6 * second, 7 * second))], "clock": {"offset_us": second},
    }  # fmt: skip
    thinker = talker | {
        "stage": "thinker", "address": "a:1", "files": [{"process": "vLLM rank0", "path": "1"}], "spans": [],
        "pid": 9, "clock": {"offset_us": 0.0}, "missing": "",
    }  # fmt: skip
    lost = [{"stage": "code2wav", "address": "c:1", "reason": "gone"}]
    told = {"processes": [talker, thinker], "lost": lost}
    at = {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "pid": 7, "tid": 8, "ts": 2.5, "dur": 1.0, "args": {"a": 1}}
    gpu = at | {"pid": 0, "cat": "kernel", "name": "gemm", "id": 3}
    named = {"ph": "M", "name": "process_labels", "pid": 0, "tid": 0, "ts": 1.0, "args": {"labels": "GPU 0"}}
    thread = {"ph": "M", "name": "thread_name", "pid": 7, "tid": 8, "ts": 1.0, "args": {"name": "thread 8 (python)"}}
    own = at | {"pid": "Spans", "tid": "PyTorch Profiler"}
    files = {"0": traced(int(8 * second), own, at, gpu, named, thread), "1": traced(int(6 * second), at)}
    file = archive(tmp_path / "a.tar", **{"profile.json": json.dumps(told).encode(), **files})
    merged = merge(file, tmp_path / "out.json.gz")
    trace = json.loads(gzip.decompress((tmp_path / "out.json.gz").read_bytes()))
    events = trace["traceEvents"]
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert sorted(names.values()) == ["talker b:1", "talker b:1 GPU 0", "thinker a:1", "thinker a:1 vLLM rank0"]
    # since the first thing, at 5 s: 8 s of a clock that is 1 s ahead are 7 s
    found = [(names[event["pid"]], event["ts"]) for event in events if event["ph"] == "X"]
    assert found == [("talker b:1", 2 * second + 2.5), ("talker b:1 GPU 0", 2 * second + 2.5),
                     ("thinker a:1 vLLM rank0", second + 2.5)]  # fmt: skip
    slices = [(event["ph"], event["name"], event["ts"]) for event in events if event.get("cat") == "request"]
    assert slices == [
        ("b", "talker r", second), ("b", "queue", second), ("e", "queue", 2 * second),
        ("n", "first output", second + 1), ("e", "talker r", 4 * second),
    ]  # fmt: skip
    threads = [event["args"]["name"] for event in events if event["name"] == "thread_name"]
    assert threads == ["talker-engine"]
    assert merged.faults == trace["otherData"]["missing"] == ["code2wav c:1: gone"]
    assert (merged.operations, merged.requests) == (3, {"r"})

    whole = file.read_bytes()
    for cut in (100, whole.index(files["1"]) + 10):
        file.write_bytes(whole[:cut])
        with pytest.raises(CommandError):
            merge(file, tmp_path / "cut.json.gz")
        assert not (tmp_path / "cut.json.gz").exists()


def test_a_table_of_a_request_fits_its_line():
    spans = [span("[r]", 10.0, 30.0, ("queue", 10.0, 11.0)) | {"address": "a:1"}, span("[r]-2", 12.0, None)]
    from rich.console import Console

    console = Console(width=80, file=io.StringIO(), record=True)
    spans[1]["address"] = "b:1"
    console.print(trace_table({"request_id": "[r]", "spans": spans}, console.width))
    text = console.export_text()
    assert all(len(line) <= 80 for line in text.splitlines())
    assert "request [r]" in text
    assert "talker-2" in text
    assert "not yet" in text
