"""One trace of all processes from what the gateway sends of a profile: Chrome's JSON trace format, for Perfetto."""

import gzip
import itertools
import json
import tarfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cli.terminal import CommandError

Event = dict[str, Any]
MANIFEST = "profile.json"
_COMPRESSION = 5
_OF_PROCESSES = {"process_name", "process_labels", "process_sort_index"}  # written anew: process ids are
_FLOW_IDS = 10**12  # more than a file has


@dataclass
class Merged:
    """What is in a trace.

    Attributes:
        processes: names of those in it.
        operations: number of the engines' events.
        requests: ids of those that have a span in it.
        faults: what is missing, and why, for people.
    """

    processes: list[str] = field(default_factory=list)
    operations: int = 0
    requests: set[str] = field(default_factory=set)
    faults: list[str] = field(default_factory=list)


def merge(archive: Path, out: Path) -> Merged:
    """Writes the trace of `archive`, a tar from the gateway's /stop_profile, to `out`, compressed by gzip.

    Its times are microseconds since the first thing in it, on the gateway's clock. One file of the archive is in memory
    at a time.

    Raises:
        CommandError: the archive is cut short, or a file in it is none.
    """
    merged = Merged()
    try:
        with tarfile.open(archive) as files, gzip.open(out, "wt", compresslevel=_COMPRESSION, encoding="utf-8") as file:
            told = json.loads(_member(files, MANIFEST))
            file.write('{"traceEvents": [\n')
            file.writelines(_lines(_Writer(told, merged).events(files)))
            head = {"displayTimeUnit": "ms", "otherData": _other_data(told, merged)}
            file.write(f"\n], {json.dumps(head)[1:]}")
    except (tarfile.TarError, EOFError, OSError, ValueError, KeyError) as error:
        out.unlink(missing_ok=True)
        raise CommandError(f"what the server sent of the profile cannot be read: {error}") from None
    return merged


def _member(files: tarfile.TarFile, name: str) -> bytes:
    opened = files.extractfile(name)
    assert opened is not None
    return opened.read()


def _lines(events: Iterable[Event]) -> Iterator[str]:
    before = ""
    for event in events:
        yield before + json.dumps(event, separators=(",", ":"))
        before = ",\n"


def _origin_us(told: dict[str, Any]) -> float:
    """The first moment in it: Unix time in microseconds."""
    spans = [span["start_us"] for process in told["processes"] for span in process["spans"]]
    return min([*spans, *(process["start_us"] for process in told["processes"] if "start_us" in process)])


def _other_data(told: dict[str, Any], merged: Merged) -> dict[str, Any]:
    """What a reader of the file may want to know beside: the clocks, and what is missing."""
    return {
        "origin_unix_us": _origin_us(told),
        "clocks": {
            f"{process['stage']} {process['address']}": process["clock"]
            for process in told["processes"]
            if "clock" in process
        },
        "missing": merged.faults,
    }


class _Writer:
    """The events of a profile that the gateway `told` of; what they are is counted in `merged`."""

    def __init__(self, told: dict[str, Any], merged: Merged) -> None:
        self._told, self._merged = told, merged
        self._origin_us = _origin_us(told)
        self._end_us = max(process.get("end_us", self._origin_us) for process in told["processes"])
        self._pids, self._ids = itertools.count(1), itertools.count(1)

    def events(self, files: tarfile.TarFile) -> Iterator[Event]:
        """All of them."""
        for process in self._told["processes"]:
            name = f"{process['stage']} {process['address']}".rstrip()
            pid, opening = self._process(name)
            yield from opening
            for span in process["spans"]:
                yield from self._span(span, pid, process.get("end_us", self._end_us))
            for file in process["files"]:
                trace = json.loads(gzip.decompress(_member(files, file["path"])))
                yield from self._operations(trace, process, f"{name} {file['process']}".rstrip(), pid)
            self._note_faults(name, process)
        for lost in self._told["lost"]:
            self._merged.faults.append(f"{lost['stage']} {lost['address']}: {lost['reason']}")

    def _process(self, name: str) -> tuple[int, list[Event]]:
        """(id, what says that it has this name) of a process."""
        pid = next(self._pids)
        self._merged.processes.append(name)
        described = [
            {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": name}},
            {"ph": "M", "name": "process_sort_index", "pid": pid, "args": {"sort_index": pid}},
        ]
        return pid, described

    def _span(self, span: dict[str, Any], pid: int, end_us: float) -> Iterator[Event]:
        """A request: an asynchronous slice, as requests overlap, with its phases in it."""
        self._merged.requests.add(span["request_id"])
        common = {"cat": "request", "id": f"{next(self._ids):#x}", "pid": pid, "tid": pid}
        args = {name: span[name] for name in ("request_id", "outcome")}
        slices = [(f"{span['stage']} {span['request_id']}", span["start_us"], span["end_us"] or end_us, args)]
        slices += [(phase["name"], phase["start_us"], phase["end_us"], args) for phase in span["phases"]]
        (name, start_us, last_us, _), *phases = slices
        yield {"ph": "b", "name": name, "ts": self._since(start_us), "args": args, **common}
        for name_of_phase, phase_us, phase_end_us, _ in phases:
            yield {"ph": "b", "name": name_of_phase, "ts": self._since(phase_us), "args": args, **common}
            yield {"ph": "e", "name": name_of_phase, "ts": self._since(phase_end_us), **common}
        if (first_us := span["first_output_us"]) is not None:
            yield {"ph": "n", "name": "first output", "ts": self._since(first_us), "args": args, **common}
        yield {"ph": "e", "name": name, "ts": self._since(last_us), **common}

    def _since(self, unix_us: float) -> float:
        return round(unix_us - self._origin_us, 3)

    def _operations(self, trace: dict[str, Any], process: dict[str, Any], name: str, own_pid: int) -> Iterator[Event]:
        """The events of a file of torch's profiler, with this trace's process ids and time."""
        events: list[Event] = trace["traceEvents"]
        base_us = int(trace["baseTimeNanoseconds"]) / 1000 - self._origin_us - process["clock"]["offset_us"]
        labels = {event["pid"]: event["args"]["labels"] for event in events if event["name"] == "process_labels"}
        pids: dict[int, int] = {}
        flows = next(self._ids) * _FLOW_IDS
        for event in events:
            theirs = event.get("pid")
            if not isinstance(theirs, int) or event["name"] in _OF_PROCESSES:  # "Spans", "Traces": of the profiler
                continue
            if theirs not in pids:
                if theirs == process["pid"]:
                    pids[theirs] = own_pid
                else:
                    label = labels.get(theirs, "")
                    pids[theirs], opening = self._process(f"{name} {label if label != 'CPU' else ''}".rstrip())
                    yield from opening
            event["pid"] = pids[theirs]
            if event["ph"] == "M":
                event.pop("ts", None)
                if event["name"] == "thread_name" and own_pid == event["pid"]:
                    known = process["threads"].get(str(event["tid"]))
                    event["args"] = {"name": known or event["args"]["name"]}
            else:
                event["ts"] = round(base_us + event["ts"], 3)
                self._merged.operations += 1
            if isinstance(event.get("id"), int):  # arrows from a call to its kernel: each file has ids of its own
                event["id"] += flows
            yield event

    def _note_faults(self, name: str, process: dict[str, Any]) -> None:
        """What is missing of `process`, and that it may be less than was asked for."""
        faults = self._merged.faults
        if process["missing"]:
            faults.append(f"{name}: {process['missing']}")
        if "memory" in process["ended_by"]:
            faults.append(f"{name}: ended by {process['ended_by']}")
        if process.get("spans_left_out"):
            faults.append(f"{name}: {process['spans_left_out']} spans were too many")
