"""Runs a request through its stages."""

import asyncio
import uuid
from collections.abc import AsyncGenerator, Coroutine, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from typing import Any

import grpc

from gateway.pipeline.balance import prompt_key
from gateway.pipeline.event_buffer import EventBuffer
from gateway.pipeline.events import Event, Finished, PromptRead, TextDelta
from gateway.pipeline.kinds import KINDS
from gateway.pipeline.links import Links, Source
from gateway.pipeline.pipeline import Pipeline
from gateway.pipeline.places import TakePlace, in_turn
from gateway.pipeline.response_events import ResponseFault
from gateway.pipeline.route import LOST, Lease, Route
from gateway.pipeline.typed_text import TypedText
from gateway.pipeline.utterances import Utterances, add_summaries, following_starts
from gateway.tasks import cancel
from quartet.v1 import code2wav_pb2, talker_pb2, thinker_pb2
from services.common.errors import DeadlineExceeded, InternalError, InvalidInput, QueueFull, StageError, StageLost

# Stages get so much less time than the request has: their own error about the deadline still arrives.
_DEADLINE_MARGIN_S = 0.5
# When one stage fails, its neighbours fail too, perhaps earlier. So the kind of error decides which is the root: errors
# about the request precede errors about a lost neighbour. StageLost names the stage that is gone: it is always a root.
_ROOT_FIRST = (InvalidInput, QueueFull, DeadlineExceeded, InternalError, *LOST)
ECHO_GRACE_S = 0.25


@dataclass(frozen=True)
class Job:
    """A request for one answer.

    Attributes:
        starts: start messages by kind of stage.
        media: files of the first stage's media that have no data, in their order.
        text: follows the text in the first stage's start message.
        conversation_id: all its turns go to one thinker; "": the prompt's beginning decides.
        is_transcript: it is for the stage of the output `transcript`, if there is one.
        utterance_bytes: UTF-8 of the longest text that is spoken at a time, where a talker reads another stage's text.
    """

    request_id: str
    starts: Mapping[str, Any]
    media: Sequence[bytes] = ()
    text: TypedText | None = None
    conversation_id: str = ""
    utterance_bytes: int = 0
    is_transcript: bool = False


def speech(speak: talker_pb2.SpeakStart) -> dict[str, Any]:
    return {"talker": speak, "code2wav": code2wav_pb2.DecodeRequest(sample_format=code2wav_pb2.SAMPLE_FORMAT_PCM16)}


async def run(
    pipeline: Pipeline, jobs: Sequence[Job], timeout_s: float, take_place: TakePlace | None = None
) -> AsyncGenerator[tuple[int, Event], None]:
    """Runs `jobs` and yields (index of the job, event).

    A job's events begin with PromptRead and end with Finished. Closing the iterator cancels every stage.

    Args:
        take_place: for each job beside the first, which begin as places come free; None: all run at the same time.

    Raises:
        StageError: of the first job that failed. `origin` is the kind of the stage at fault, "" the gateway.
    """
    events = EventBuffer()
    deadline = asyncio.get_running_loop().time() + timeout_s

    async def answer(index: int) -> None:
        await _Answer(pipeline, jobs[index], index, events, deadline).run()

    if take_place is None or len(jobs) == 1:
        answers = [answer(index) for index in range(len(jobs))]
    else:
        answers = in_turn([partial(answer, index) for index in range(len(jobs))], take_place)
    work = asyncio.create_task(gather_or_cancel(answers))
    work.add_done_callback(events.wake)
    timer = asyncio.get_running_loop().call_at(deadline, work.cancel)
    try:
        while True:
            await events.wait(work.done)
            # a failure drops the events that wait
            if _has_failed(work) or (event := events.take()) is None:
                break
            yield event
        if work.cancelled():
            raise DeadlineExceeded(f"the request took longer than its {timeout_s:g} s")
        work.result()
    finally:
        timer.cancel()
        await cancel(work)


def _has_failed(work: asyncio.Task[Any]) -> bool:
    return work.done() and (work.cancelled() or work.exception() is not None)


class _Answer:
    """A job on its way through the stages."""

    def __init__(self, pipeline: Pipeline, job: Job, index: int, events: EventBuffer, deadline: float) -> None:
        self._job, self._index, self._events, self._deadline = job, index, events, deadline
        able = (pipeline.transcript if job.is_transcript else ()) or pipeline.answer
        stages = [stage for stage in able if stage.kind in job.starts]
        reader = next((job.starts[stage.kind] for stage in stages if KINDS[stage.kind].caches_prompts), None)
        self._is_plain = isinstance(reader, thinker_pb2.GenerateStart) and not (
            reader.tools or reader.sampling.HasField("top_logprobs")
        )
        key = job.conversation_id.encode() or (None if reader is None else prompt_key(reader, job.media))
        self._route = Route(stages, job.request_id, key, "" if reader is None else reader.lora)
        self._prompt_read = asyncio.Event()  # set when PromptRead is in `events`
        self._has_output = False  # the client may have a part of the answer, which rules out a second attempt
        self._failed = False  # a stage of this attempt has
        self._early: list[thinker_pb2.GenerateDelta] = []  # deltas that came before the prompt was read
        self._spoken: Utterances | None = None  # what a talker that reads text has of this attempt

    async def run(self) -> None:
        while True:
            self._failed, self._early = False, []
            try:
                with self._route.replicas() as leases:
                    await self._attempt(leases)
                return
            except StageError as error:
                if self._has_output or not await self._route.again(error):
                    raise

    async def _attempt(self, leases: Sequence[Lease]) -> None:
        begin = next((i for i, lease in enumerate(leases) if i and lease.stage.reads_text), len(leases))
        calls = self._calls(self._job.request_id, self._job.starts, leases[:begin], self._job.text)
        if speaking := leases[begin:]:
            self._spoken = Utterances(self._job.utterance_bytes)
            calls.append(self._speak(speaking, self._spoken))
        summaries: dict[str, Any] = {}
        for ended in await gather_or_cancel(calls):
            summaries |= ended
        await self._emit(Finished(summaries))

    def _calls(
        self,
        request_id: str,
        starts: Mapping[str, Any],
        leases: Sequence[Lease],
        text: TypedText | None,
        *,
        is_last: bool = True,
    ) -> list[Coroutine[Any, Any, dict[str, Any]]]:
        """The calls of stages that pull from each other. `is_last`: after them they need their places no more."""
        linked = linked_starts(request_id, starts, leases)
        return [self._call(lease, linked[lease.stage.kind], text, is_last) for lease in leases]

    async def _speak(self, leases: Sequence[Lease], spoken: Utterances) -> dict[str, Any]:
        """Speaks one utterance after the other. Returns summaries by kind of stage. Raises StageError."""
        total: dict[str, Any] = {}
        try:
            async for number, utterance in spoken:
                request_id = f"{self._job.request_id}-utterance-{number}" if number else self._job.request_id
                if (starts := following_starts(self._job.starts, total)) is None:
                    break
                for ended in await gather_or_cancel(self._calls(request_id, starts, leases, utterance, is_last=False)):
                    add_summaries(total, ended)
        finally:
            for lease in leases:
                lease.end()
        return total

    async def _call(self, lease: Lease, start: Any, text: TypedText | None, is_last: bool) -> dict[str, Any]:
        """Calls a replica, emits its events, and returns its summary by the kind of stage. Raises StageError."""
        kind, is_first = KINDS[lease.stage.kind], lease.stage is self._route.first
        media = self._job.media if is_first else ()
        call = lease.replica.call(start, media, self._time_left_s(), text, self._take_delta)
        summary = None
        try:
            async for response in call:
                if response.HasField("summary"):
                    summary = response.summary
                if (event := kind.event(start, response)) is not None:
                    await self._emit(event, is_first)
        except grpc.aio.AioRpcError as error:
            self._failed = True
            raise self._route.failure(lease, error) from error
        except ResponseFault as fault:
            raise lease.stage.fault(str(fault)) from None
        finally:
            call.cancel()
            if is_last:
                lease.end()
        if summary is None:
            raise lease.stage.fault("ended the call without a summary")
        return {kind.name: summary}

    async def _emit(self, event: Event, is_first: bool = True) -> None:
        """Sends an event; those of later stages wait for PromptRead."""
        if self._failed:  # output of the other stages must not prevent a second attempt
            return
        if isinstance(event, PromptRead):
            if self._prompt_read.is_set():  # by the attempt before
                return
            await self._events.put(self._index, event)
            self._prompt_read.set()
            for delta in self._early:
                self._take_delta(delta)
            return
        if not is_first:
            await self._prompt_read.wait()  # the calls are read side by side: sound may be here first
        self._has_output = True
        if self._spoken is not None:
            self._spoken.read(event)
        await self._events.put(self._index, event)

    def _take_delta(self, delta: thinker_pb2.GenerateDelta) -> None:
        """Sends a delta that came outside of the call; waits for no client."""
        if not self._prompt_read.is_set():
            self._early.append(delta)
        elif not self._failed:
            self._has_output = True
            event = TextDelta(delta, self._is_plain)
            if self._spoken is not None:
                self._spoken.read(event)
            self._events.put_now(self._index, event)

    def _time_left_s(self) -> float:
        left_s = self._deadline - asyncio.get_running_loop().time()
        return max(left_s - min(_DEADLINE_MARGIN_S, left_s / 10), 0.001)


def linked_starts(request_id: str, starts: Mapping[str, Any], leases: Sequence[Lease]) -> dict[str, Any]:
    """Copies of start messages, by kind, with the request's id and their neighbours."""
    linked = {lease.stage.kind: deepcopy(starts[lease.stage.kind]) for lease in leases}
    replicas = {lease.stage.kind: lease.replica for lease in leases}
    sources: dict[str, list[Source]] = {kind: [] for kind in linked}
    stream_ids: dict[str, list[str]] = {kind: [] for kind in linked}
    for reader in (lease.stage for lease in leases):
        for kind in (stage.kind for stage in reader.sources if stage.kind in linked):
            # Not the request's id: a stage may still be ending a request of that id, or an attempt before.
            stream_id = f"{request_id}-{uuid.uuid4().hex[:8]}"
            stream_ids[kind].append(stream_id)
            sources[reader.kind].append(Source(kind, linked[kind], replicas[kind].source(stream_id)))
    for kind, start in linked.items():
        start.request_id = request_id
        KINDS[kind].link(start, Links(sources[kind], stream_ids[kind], replicas[kind].info))
    return linked


async def gather_or_cancel(parts: Sequence[Coroutine[Any, Any, Any]]) -> list[Any]:
    """Results of `parts`, run at the same time. If one fails, or this is cancelled, all others end first.

    Raises:
        StageError: the root error. If the first may be the echo of another, the others have ECHO_GRACE_S to fail.
    """
    tasks = [asyncio.ensure_future(part) for part in parts]
    try:
        _, pending = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        if pending and all(map(_may_be_echo, _failures(tasks))):
            await asyncio.wait(pending, timeout=ECHO_GRACE_S)
    finally:
        await cancel(*tasks)
    if failures := _failures(tasks):
        raise min(failures, key=_rank)
    return [task.result() for task in tasks]


def _failures(tasks: Sequence[asyncio.Future[Any]]) -> list[StageError]:
    """Errors of stages. Any other exception is a bug, and raised."""
    failures = []
    for task in tasks:
        error = task.exception() if task.done() and not task.cancelled() else None
        if isinstance(error, StageError):
            failures.append(error)
        elif error is not None:
            raise error
    return failures


def _may_be_echo(failure: StageError) -> bool:
    return isinstance(failure, LOST) and not isinstance(failure, StageLost)


def _rank(failure: StageError) -> int:
    return next((i for i, kind in enumerate(_ROOT_FIRST) if isinstance(failure, kind)), len(_ROOT_FIRST))
