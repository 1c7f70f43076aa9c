"""quartet.v1.ProfileService, the same for every stage: one profile at a time, which ends by itself and is kept until it
has been fetched."""

import asyncio
import contextlib
import os
import shutil
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

import grpc
import structlog

from quartet.v1 import profile_pb2, profile_pb2_grpc
from services.common.engine.process import resident_bytes
from services.common.errors import AlreadyExists, InvalidInput, NotFound, StageError, Unavailable
from services.common.rpc.status import abort
from services.common.telemetry.spans import Span, Spans, Watch, monotonic_to_unix_ns

SERVICE = profile_pb2.DESCRIPTOR.services_by_name["ProfileService"].full_name
MIB = 1024 * 1024
PIECE_BYTES = 256 * 1024
MAX_S = 60.0  # longest profile
MAX_MIB = 1024  # by which the process may grow meanwhile, and size of the trace
KEEP_S = 600.0  # a profile that nobody fetches
CHECK_INTERVAL_S = 0.2  # of the memory that it takes

_Result = TypeVar("_Result")
log = structlog.get_logger()

# (process, as in TraceFile; its file in Chrome's JSON trace format, gzipped).
Trace = tuple[str, Path]


class Recorder(Protocol):
    """Records what an engine does. `start` and `stop` are called in turns, on the event loop."""

    async def start(self) -> None: ...

    async def stop(self, directory: Path) -> Sequence[Trace]:
        """Ends recording, and writes what was recorded into `directory`."""
        ...


@dataclass(eq=False)
class Recorded:
    """A profile that has ended. `files` are there until it is dropped."""

    summary: profile_pb2.Profile
    directory: Path
    files: Sequence[Trace] = ()


@dataclass(eq=False)
class _Running:
    start_unix_ns: int
    began_s: float
    limit_s: float
    watch: Watch
    limit: asyncio.Task[None] | None = None


class Profiles(profile_pb2_grpc.ProfileServiceServicer):
    """Serves the profiles of one stage, and its spans. For one event loop.

    Args:
        stage: its kind.
        spans: of its requests.

    Attributes:
        recorder: of its engine; None until the engine is loaded.
    """

    def __init__(self, stage: str, spans: Spans) -> None:
        self.recorder: Recorder | None = None
        self._stage, self._spans = stage, spans
        self._turn = asyncio.Lock()
        self._running: _Running | None = None
        self._recorded: Recorded | None = None
        self._expiry: asyncio.TimerHandle | None = None

    async def start(self, seconds: float) -> float:
        """Begins one of at most `seconds` (0: MAX_S); returns after how many it ends by itself. Goes on if the caller
        is cancelled.

        Raises:
            AlreadyExists: one is recorded now.
            InvalidInput: seconds.
            Unavailable: the engine is not loaded.
        """
        if not 0 <= seconds <= MAX_S:
            raise InvalidInput("seconds", f"must be above 0 and at most {MAX_S:g}, the {self._stage}'s limit")
        return await _to_its_end(self._start(seconds or MAX_S))

    async def _start(self, seconds: float) -> float:
        async with self._turn:
            if self.recorder is None:
                raise Unavailable("the stage is loading its model; retry later")
            if (running := self._running) is not None:
                gone_s = time.monotonic() - running.began_s
                which = f"the {self._stage} records a profile since {gone_s:.1f} s, for {running.limit_s:g} s"
                raise AlreadyExists(f"{which}; stop it first")
            self.drop()
            watch, memory = self._spans.watch(), await asyncio.to_thread(resident_bytes)
            self._running = _Running(time.time_ns(), time.monotonic(), seconds, watch)
            try:
                await self.recorder.start()
            except BaseException:
                self._running = None
                self._spans.unwatch(watch)
                raise
            self._running.limit = asyncio.create_task(self._limit(self._running, memory))
            log.info("profile started", seconds=seconds)
            return seconds

    async def _limit(self, running: _Running, memory_bytes: int) -> None:
        ended_by = f"its limit of {running.limit_s:g} s"
        while (left_s := running.began_s + running.limit_s - time.monotonic()) > 0:
            await asyncio.sleep(min(CHECK_INTERVAL_S, left_s))
            grown_bytes = await asyncio.to_thread(resident_bytes) - memory_bytes
            if grown_bytes > MAX_MIB * MIB:
                ended_by = f"its limit of memory: the process grew by {grown_bytes // MIB} MiB"
                break
        running.limit = None
        async with self._turn:
            if self._running is running:
                await self._end(ended_by)

    async def stop(self) -> Recorded:
        """Ends the running profile; returns it, or one that has ended by itself.

        Raises:
            NotFound: there is neither.
        """
        return await _to_its_end(self._stop())

    async def _stop(self) -> Recorded:
        async with self._turn:
            if self._running is not None:
                await self._end("stopped")
            if self._recorded is None:
                raise NotFound(f"the {self._stage} has no profile; start one")
            self._keep(self._recorded)  # as long again: it is to be fetched
            return self._recorded

    async def _end(self, ended_by: str) -> None:
        assert self._running is not None
        assert self.recorder is not None
        running, self._running = self._running, None
        if running.limit is not None:
            running.limit.cancel()
        self._spans.unwatch(running.watch)
        summary = profile_pb2.Profile(
            stage=self._stage, start_unix_ns=running.start_unix_ns, end_unix_ns=time.time_ns(), ended_by=ended_by
        )
        summary.spans_left_out, summary.pid = running.watch.left_out, os.getpid()
        summary.threads.update({thread.native_id: thread.name for thread in threading.enumerate() if thread.native_id})
        # Many: in a thread, of objects that nothing changes.
        spans = [*running.watch.spans, *self._spans.served()]
        summary.spans.extend(await asyncio.to_thread(_messages, spans))
        directory = Path(await asyncio.to_thread(tempfile.mkdtemp, prefix="quartet-profile-"))
        self._recorded = recorded = Recorded(summary, directory)
        try:
            files = await self.recorder.stop(directory)
            size_bytes = sum(file.stat().st_size for _, file in files)
            if size_bytes > MAX_MIB * MIB:
                summary.missing = f"the trace has {size_bytes // MIB} MiB, more than {MAX_MIB}"
            else:
                recorded.files = files
        except Exception:
            log.exception("the profile failed")
            summary.missing = "recording failed; the stage's log has the details"
        log.info("profile ended", by=ended_by, files=len(recorded.files), spans=len(spans))
        self._keep(recorded)

    def _keep(self, recorded: Recorded) -> None:
        if self._expiry is not None:
            self._expiry.cancel()
        self._expiry = asyncio.get_running_loop().call_later(KEEP_S, self.drop, recorded)

    def drop(self, recorded: Recorded | None = None) -> None:
        """Forgets what was recorded, if it is `recorded` or that is None, and removes its files."""
        if self._recorded is None or (recorded is not None and recorded is not self._recorded):
            return
        if self._expiry is not None:
            self._expiry.cancel()
        shutil.rmtree(self._recorded.directory, ignore_errors=True)
        self._recorded = None

    async def close(self) -> None:
        with contextlib.suppress(NotFound):
            await self.stop()
        self.drop()

    async def StartProfile(
        self, request: profile_pb2.StartProfileRequest, context: grpc.aio.ServicerContext
    ) -> profile_pb2.StartProfileResponse:
        try:
            seconds = await self.start(request.seconds)
        except StageError as error:
            await abort(context, error)
        return profile_pb2.StartProfileResponse(seconds=seconds)

    async def StopProfile(
        self, request: profile_pb2.StopProfileRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[profile_pb2.StopProfileResponse]:
        try:
            recorded = await self.stop()
        except StageError as error:
            await abort(context, error)
        with contextlib.ExitStack() as opened:  # all at once: the start of the next profile removes these files
            files = [(process, opened.enter_context(file.open("rb"))) for process, file in recorded.files]
            yield profile_pb2.StopProfileResponse(profile=recorded.summary)
            for process, file in files:
                described = profile_pb2.TraceFile(process=process, size_bytes=os.fstat(file.fileno()).st_size)
                yield profile_pb2.StopProfileResponse(file=described)
                while piece := await asyncio.to_thread(file.read, PIECE_BYTES):
                    yield profile_pb2.StopProfileResponse(data=piece)
        self.drop(recorded)

    async def GetSpans(
        self, request: profile_pb2.GetSpansRequest, context: grpc.aio.ServicerContext
    ) -> profile_pb2.GetSpansResponse:
        received = time.time_ns()
        spans = _messages(self._spans.find(request.request_id))
        return profile_pb2.GetSpansResponse(spans=spans, received_unix_ns=received, answered_unix_ns=time.time_ns())


def _messages(spans: Sequence[Span]) -> list[profile_pb2.Span]:
    to_unix_ns = monotonic_to_unix_ns()
    return [span.to_message(to_unix_ns) for span in spans]


async def _to_its_end(work: Coroutine[Any, Any, _Result]) -> _Result:
    """Awaits `work`, which goes on if the caller is cancelled."""
    task = asyncio.create_task(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        task.add_done_callback(lambda done: done.cancelled() or done.exception())  # nobody is there to hear of it
        raise
