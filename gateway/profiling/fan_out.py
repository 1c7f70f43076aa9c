"""Profiles of all replicas, and the gateway's own spans."""

import asyncio
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import grpc

from gateway.pipeline.pipeline import Pipeline
from gateway.pipeline.replica import Replica
from gateway.profiling.clocks import Clock, clock_of
from gateway.workers.siblings import Siblings
from quartet.v1 import profile_pb2, profile_pb2_grpc
from services.common.errors import AlreadyExists, InternalError, InvalidInput, NotFound, StageError
from services.common.profiles import KEEP_S
from services.common.telemetry.spans import Spans, Watch, monotonic_to_unix_ns

CLOCK_TIMEOUT_S = 5.0
GATEWAY = "gateway"
_BEGINS, _ENDS = "profile_begins", "profile_ends"  # calls from worker to worker


@dataclass
class ReplicaProfile:
    """A replica's profile, or failure. `files` are (process, local file)."""

    replica: Replica
    failure: StageError | None = None
    clock: Clock = field(default_factory=lambda: Clock(0, 0))
    profile: profile_pb2.Profile = field(default_factory=profile_pb2.Profile)
    files: list[tuple[str, Path]] = field(default_factory=list)


class Profiler:
    """Profiles the stages of a pipeline. They keep the profiles: any gateway can stop them, and any of its workers.

    Args:
        spans: of this process.
        siblings: the gateway's other workers, which have spans, too.
    """

    def __init__(self, pipeline: Pipeline, spans: Spans, timeout_s: float, siblings: Siblings) -> None:
        self._pipeline, self._spans, self._timeout_s, self._siblings = pipeline, spans, timeout_s, siblings
        self._watch: Watch | None = None
        self._started: dict[Replica, None] = {}
        self._turn = asyncio.Lock()
        siblings.on(_BEGINS, self._on_begin)
        siblings.on(_ENDS, self._on_end)

    def replicas(self, stages: Sequence[str] | None = None) -> list[Replica]:
        """Of the named stages, or of all. Raises InvalidInput: no such stage."""
        known = self._pipeline.by_name
        for name in stages or ():
            if name not in known:
                raise InvalidInput("stages", f"there is no stage {name!r}; use some of {', '.join(known)}")
        return [replica for name in dict.fromkeys(stages or known) for replica in known[name].replicas.values()]

    async def start(self, replicas: Sequence[Replica], seconds: float) -> dict[Replica, float | StageError]:
        """Starts profiles of at most `seconds` (0: each replica's own limit); returns each one's limit, or failure.

        Raises:
            AlreadyExists: a replica records already: all are stopped.
            InvalidInput: a replica refuses `seconds`: all are stopped.
            StageError: none records.
        """

        async def ask(replica: Replica) -> float | StageError:
            stub = profile_pb2_grpc.ProfileServiceStub(replica.channel)
            try:
                request = profile_pb2.StartProfileRequest(seconds=seconds)
                return (await stub.StartProfile(request, timeout=self._timeout_s)).seconds
            except grpc.aio.AioRpcError as error:
                return self._why(replica, error)

        async with self._turn:
            answers = dict(zip(replicas, await asyncio.gather(*map(ask, replicas)), strict=True))
            failures = [answer for answer in answers.values() if isinstance(answer, StageError)]
            refusals = [failure for failure in failures if isinstance(failure, AlreadyExists | InvalidInput)]
            started = [replica for replica, answer in answers.items() if not isinstance(answer, StageError)]
            if refusals or not started:
                await asyncio.gather(*map(self._discard, started))
                raise (refusals or failures)[0]
            longest_s = max(answer for answer in answers.values() if not isinstance(answer, StageError))
            self._begin(started, longest_s)
            begun = {"replicas": [[replica.stage, replica.address] for replica in started], "seconds": longest_s}
            await self._siblings.call_others(_BEGINS, begun)
            return answers

    def _begin(self, started: Sequence[Replica], longest_s: float) -> None:
        """Collects this process's spans while replicas record."""
        if self._watch is not None:
            self._spans.unwatch(self._watch)
        self._watch = watch = self._spans.watch()
        self._started = dict.fromkeys(started)
        asyncio.get_running_loop().call_later(longest_s + KEEP_S, self._spans.unwatch, watch)

    async def _on_begin(self, begun: Any) -> None:
        known = {(replica.stage, replica.address): replica for replica in self.replicas()}
        started = [known[stage, address] for stage, address in begun["replicas"] if (stage, address) in known]
        self._begin(started, begun["seconds"])

    async def _on_end(self, recorded_unix_ns: Any) -> list[dict[str, Any]]:
        return self._end(*recorded_unix_ns)

    async def _discard(self, replica: Replica) -> None:
        try:
            async for _ in self._stop(replica):
                pass
        except grpc.aio.AioRpcError as error:
            replica.failure(error)

    async def stop(self, directory: Path) -> tuple[list[ReplicaProfile], list[dict[str, Any]]]:
        """Stops all profiles: (those of replicas with files in `directory`, the gateway's spans, by their start).

        Raises:
            NotFound: no replica has a profile.
            StageError: no replica could be reached.
        """
        async with self._turn:
            replicas = list(self._started | dict.fromkeys(self.replicas()))
            tasks = [self._fetch(replica, directory / f"{i}") for i, replica in enumerate(replicas)]
            fetched = await asyncio.gather(*tasks)
            found = [each for each in fetched if not isinstance(each.failure, NotFound)]
            if not found:
                raise NotFound("no stage has a profile; POST /start_profile starts one")
            stopped = [each for each in found if each.failure is None]
            start_unix_ns = min((each.profile.start_unix_ns - each.clock.offset_ns for each in stopped), default=0)
            end_unix_ns = max((each.profile.end_unix_ns - each.clock.offset_ns for each in stopped), default=0)
            others = await self._siblings.call_others(_ENDS, [start_unix_ns, end_unix_ns])
            own = [*self._end(start_unix_ns, end_unix_ns), *chain.from_iterable(others)]
            if not stopped and (failure := found[0].failure):
                raise failure
            return found, sorted(own, key=lambda span: span["start_us"])

    def _end(self, start_unix_ns: int, end_unix_ns: int) -> list[dict[str, Any]]:
        """This process's spans between two times, while the profiles were recorded."""
        watch, self._watch, self._started = self._watch, None, {}
        if watch is not None:
            self._spans.unwatch(watch)
        to_unix_ns = monotonic_to_unix_ns()
        ended = watch.spans if watch is not None else self._spans.ended()
        spans = [span.to_message(to_unix_ns) for span in (*ended, *self._spans.served())]
        return [
            as_json(span)
            for span in spans
            if span.start_unix_ns < end_unix_ns and (not span.outcome or span.end_unix_ns > start_unix_ns)
        ]

    async def _fetch(self, replica: Replica, prefix: Path) -> ReplicaProfile:
        """Fetches a profile into files that begin with `prefix`."""
        fetched = ReplicaProfile(replica)
        try:
            await _receive(self._stop(replica), fetched, prefix)
            fetched.clock = await clock_of(replica, CLOCK_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            fetched.failure = self._why(replica, error)
        return fetched

    def _stop(self, replica: Replica) -> Any:
        stub = profile_pb2_grpc.ProfileServiceStub(replica.channel)
        return stub.StopProfile(profile_pb2.StopProfileRequest(), timeout=self._timeout_s)

    def _why(self, replica: Replica, error: grpc.aio.AioRpcError) -> StageError:
        """Why a replica has no profile. NotFound: none was started, or it takes none."""
        failure = replica.failure(error)
        if error.code() is grpc.StatusCode.UNIMPLEMENTED:  # a stage of another make
            return NotFound("it takes no profiles")
        if isinstance(failure, NotFound) and replica in self._started:
            return InternalError(f"the {replica.kind} has started anew since; what it had recorded is gone")
        return failure


async def _receive(messages: Any, fetched: ReplicaProfile, prefix: Path) -> None:
    with ExitStack() as files:
        opened = None
        async for message in messages:
            match message.WhichOneof("payload"):
                case "profile":
                    fetched.profile = message.profile
                case "file":
                    path = prefix.with_name(f"{prefix.name}-{len(fetched.files)}.json.gz")
                    fetched.files.append((message.file.process, path))
                    opened = files.enter_context(path.open("wb"))
                case "data" if opened is not None:
                    await asyncio.to_thread(opened.write, message.data)


def as_json(span: profile_pb2.Span, offset_ns: int = 0) -> dict[str, Any]:
    """A span; times are microseconds of Unix time less `offset_ns`."""

    def unix_us(at_ns: int) -> float:
        return (at_ns - offset_ns) / 1000

    return {
        "request_id": span.request_id,
        "stage": span.stage,
        "start_us": unix_us(span.start_unix_ns),
        "end_us": unix_us(span.end_unix_ns) if span.HasField("end_unix_ns") else None,
        "outcome": span.outcome,
        "phases": [
            {"name": phase.name, "start_us": unix_us(phase.start_unix_ns), "end_us": unix_us(phase.end_unix_ns)}
            for phase in span.phases
        ],
        "first_output_us": unix_us(span.first_output_unix_ns) if span.HasField("first_output_unix_ns") else None,
    }


def manifest(fetched: Sequence[ReplicaProfile], own: list[dict[str, Any]]) -> dict[str, Any]:
    """`profile.json`; times are microseconds of this gateway's Unix time."""
    return {
        "made_at": int(time.time()),
        "processes": [
            {"stage": GATEWAY, "address": "", "spans": own, "files": [], "missing": "", "ended_by": ""},
            *(_process(each) for each in fetched if each.failure is None),
        ],
        "lost": [
            {"stage": each.replica.stage, "address": each.replica.address, "reason": str(each.failure)}
            for each in fetched
            if each.failure is not None
        ],
    }


def _process(fetched: ReplicaProfile) -> dict[str, Any]:
    profile, clock = fetched.profile, fetched.clock
    return {
        "stage": fetched.replica.stage,
        "address": fetched.replica.address,
        "pid": profile.pid,
        "threads": {str(number): name for number, name in profile.threads.items()},
        "start_us": (profile.start_unix_ns - clock.offset_ns) / 1000,
        "end_us": (profile.end_unix_ns - clock.offset_ns) / 1000,
        "ended_by": profile.ended_by,
        "missing": profile.missing,
        "spans": [as_json(span, clock.offset_ns) for span in profile.spans],
        "spans_left_out": profile.spans_left_out,
        "files": [{"process": process, "path": path.name} for process, path in fetched.files],
        "clock": {
            "offset_us": clock.offset_ns / 1000,
            "measured_us": clock.ahead_ns / 1000,
            "uncertain_us": clock.uncertain_ns / 1000,
        },
    }
