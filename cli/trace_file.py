"""Merges a profile of all processes into one Chrome JSON trace, for Perfetto."""

import gzip
import itertools
import json
import re
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cli.terminal import CommandError

Event = dict[str, Any]
MANIFEST = "profile.json"
_COMPRESSION = 3
_BATCH = 1000  # events written at a time
_BASE = re.compile(r'"baseTimeNanoseconds"\s*:\s*(\d+)')  # Unix time that a file's times start from
_PROCESS_EVENTS = {"process_name", "process_labels", "process_sort_index"}  # written anew: process ids are
_FLOW_IDS = 10**12  # more than a file has


def merge(archive: Path, out: Path) -> "Trace":
    """Writes the trace of `archive`, a tar from the gateway's /stop_profile, to `out`, compressed by gzip.

    Times are microseconds on the gateway's clock since the first event. Raises CommandError.
    """
    try:
        with tarfile.open(archive) as files, gzip.open(out, "wt", compresslevel=_COMPRESSION, encoding="utf-8") as file:
            manifest = json.loads(_member(files, MANIFEST))
            trace = Trace(manifest)
            file.write('{"traceEvents": [\n')
            file.writelines(_lines(trace.events(files)))
            clocks = {_name(process): process["clock"] for process in manifest["processes"] if "clock" in process}
            other = {"origin_unix_us": trace.origin_us, "clocks": clocks, "missing": trace.faults}
            head = {"displayTimeUnit": "ms", "otherData": other}
            file.write(f"\n], {json.dumps(head)[1:]}")
    except (tarfile.TarError, EOFError, OSError, ValueError, KeyError) as error:
        out.unlink(missing_ok=True)
        raise CommandError(f"what the server sent of the profile cannot be read: {error}") from None
    return trace


def _member(files: tarfile.TarFile, name: str) -> bytes:
    opened = files.extractfile(name)
    assert opened is not None
    return opened.read()


def _lines(events: Iterator[Event]) -> Iterator[str]:
    encode, before = json.JSONEncoder(separators=(",", ":")).encode, ""
    while batch := list(itertools.islice(events, _BATCH)):
        yield before + encode(batch)[1:-1]
        before = ",\n"


def _events(text: str) -> Iterator[Event]:
    """Yields one event at a time: all as objects take ten times the text's memory."""
    decode, gap = json.JSONDecoder().raw_decode, re.compile(r"[\s,]*")
    opening = re.search(r'"traceEvents"\s*:\s*\[', text)
    if opening is None:
        raise ValueError("a file has no traceEvents")
    at = gap.match(text, opening.end()).end()  # pyright: ignore[reportOptionalMemberAccess]  it matches nothing, too
    while text[at : at + 1] != "]":
        event, at = decode(text, at)
        yield event
        at = gap.match(text, at).end()  # pyright: ignore[reportOptionalMemberAccess]


def _name(process: dict[str, Any]) -> str:
    return f"{process['stage']} {process['address']}"


class Trace:
    """The events of a profile. The attributes are complete when all have been yielded.

    Attributes:
        origin_us: Unix time of the first event in microseconds.
        operations: number of the engines' events.
        faults: what is missing.
    """

    def __init__(self, manifest: dict[str, Any]) -> None:
        self.processes: list[str] = []
        self.requests: set[str] = set()
        self.faults: list[str] = []
        self.operations = 0
        self._manifest = manifest
        spans = [span["start_us"] for process in manifest["processes"] for span in process["spans"]]
        starts = [process["start_us"] for process in manifest["processes"] if "start_us" in process]
        self.origin_us = min([*spans, *starts])
        self._end_us = max(process.get("end_us", self.origin_us) for process in manifest["processes"])
        self._pids, self._ids = itertools.count(1), itertools.count(1)

    def events(self, files: tarfile.TarFile) -> Iterator[Event]:
        for process in self._manifest["processes"]:
            name = _name(process).rstrip()
            pid = next(self._pids)
            yield from self._named(pid, name)
            for span in process["spans"]:
                yield from self._span(span, pid, process.get("end_us", self._end_us))
            for file in process["files"]:
                text = gzip.decompress(_member(files, file["path"])).decode()
                yield from self._operations(text, process, f"{name} {file['process']}".rstrip(), pid)
            self._note_faults(name, process)
        for lost in self._manifest["lost"]:
            self.faults.append(f"{_name(lost)}: {lost['reason']}")

    def _named(self, pid: int, name: str) -> Iterator[Event]:
        self.processes.append(name)
        yield {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": name}}
        yield {"ph": "M", "name": "process_sort_index", "pid": pid, "args": {"sort_index": pid}}

    def _span(self, span: dict[str, Any], pid: int, end_us: float) -> Iterator[Event]:
        """An asynchronous slice, as requests overlap, with its phases."""
        self.requests.add(span["request_id"])
        common = {"cat": "request", "id": f"{next(self._ids):#x}", "pid": pid, "tid": pid}
        args = {name: span[name] for name in ("request_id", "outcome")}
        name = f"{span['stage']} {span['request_id']}"
        yield {"ph": "b", "name": name, "ts": self._since(span["start_us"]), "args": args, **common}
        for phase in span["phases"]:
            yield {"ph": "b", "name": phase["name"], "ts": self._since(phase["start_us"]), "args": args, **common}
            yield {"ph": "e", "name": phase["name"], "ts": self._since(phase["end_us"]), **common}
        if (first_us := span["first_output_us"]) is not None:
            yield {"ph": "n", "name": "first output", "ts": self._since(first_us), "args": args, **common}
        yield {"ph": "e", "name": name, "ts": self._since(span["end_us"] or end_us), **common}

    def _since(self, unix_us: float) -> float:
        return round(unix_us - self.origin_us, 3)

    def _operations(self, text: str, process: dict[str, Any], name: str, own_pid: int) -> Iterator[Event]:
        """Yields torch's events with this trace's ids and time."""
        base = _BASE.search(text)
        if base is None:
            raise ValueError("a file has no baseTimeNanoseconds")
        base_us = int(base[1]) / 1000 - self.origin_us - process["clock"]["offset_us"]
        pids, labels = dict[int, int](), dict[int, str]()
        flows = next(self._ids) * _FLOW_IDS
        for event in _events(text):
            original = event.get("pid")
            if not isinstance(original, int):  # "Spans", "Traces": of the profiler
                continue
            if event["name"] in _PROCESS_EVENTS:
                labels |= {original: event["args"]["labels"]} if event["name"] == "process_labels" else {}
                continue
            if original not in pids:
                pids[original] = own_pid if original == process["pid"] else next(self._pids)
            event["pid"] = pids[original]
            if event["ph"] == "M":
                event.pop("ts", None)
                if event["name"] == "thread_name" and own_pid == event["pid"]:
                    known = process["threads"].get(str(event["tid"]))
                    event["args"] = {"name": known or event["args"]["name"]}
            else:
                event["ts"] = round(base_us + event["ts"], 3)
                self.operations += 1
            if event.get("cat") == "cpu_op":
                event.pop("args", None)  # of use to torch alone, and half of the file
            if isinstance(event.get("id"), int):  # flow ids are unique in their file only
                event["id"] += flows
            yield event
        for original, pid in pids.items():
            if pid != own_pid:
                label = labels.get(original, "")
                yield from self._named(pid, f"{name} {label if label != 'CPU' else ''}".rstrip())

    def _note_faults(self, name: str, process: dict[str, Any]) -> None:
        if process["missing"]:
            self.faults.append(f"{name}: {process['missing']}")
        if "memory" in process["ended_by"]:
            self.faults.append(f"{name}: ended by {process['ended_by']}")
        if process.get("spans_left_out"):
            self.faults.append(f"{name}: {process['spans_left_out']} spans were too many")
