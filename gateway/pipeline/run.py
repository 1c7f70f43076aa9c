"""Runs a request through its stages: opens all of them at once, merges their outputs, ends them together."""

import asyncio
import uuid
from collections.abc import AsyncGenerator, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import grpc

from gateway.pipeline.balance import prompt_key
from gateway.pipeline.event_buffer import EventBuffer
from gateway.pipeline.events import (
    AudioDelta,
    CodesDelta,
    Event,
    Finished,
    PromptRead,
    PromptTokens,
    TextDelta,
    TextEnd,
)
from gateway.pipeline.pipeline import Pipeline
from gateway.pipeline.replica import Replica
from gateway.pipeline.route import LOST, Lease, Route
from gateway.pipeline.stage import Stage
from gateway.pipeline.typed_text import TypedText
from quartet.v1 import code2wav_pb2, talker_pb2, tensor_pb2, thinker_pb2
from services.common.errors import DeadlineExceeded, InternalError, InvalidInput, QueueFull, StageError, StageLost

# Stages get this much less time than the request has, so that their own word on the deadline still arrives.
_DEADLINE_MARGIN_S = 0.5
# When one stage fails, its neighbours fail too, and their errors may arrive first. So the kind of error decides which
# is the root: what a stage says of the request itself comes before what it says of a lost neighbour. A stage that is
# gone is a root whoever tells: StageLost names it.
_ROOT_FIRST = (InvalidInput, QueueFull, DeadlineExceeded, InternalError, *LOST)
ECHO_GRACE_S = 0.25


@dataclass(frozen=True)
class Job:
    """One answer to be made.

    Attributes:
        request_id: names the answer in every stage.
        starts: start messages by kind of stage, of the stages of the pipeline's answer that are needed: GenerateStart,
            SpeakStart, DecodeRequest. Ids and sources are filled in by the run.
        media: files of the first stage's media parts without data, in their order.
        text: what follows of the text that the first stage speaks.
        conversation_id: names the conversation that this is a turn of, for the choice of the thinker: the others went
            there too. "": not known; the prompt's beginning is what goes by.
    """

    request_id: str
    starts: Mapping[str, Any]
    media: Sequence[bytes] = ()
    text: TypedText | None = None
    conversation_id: str = ""


def speech(speak: talker_pb2.SpeakStart) -> dict[str, Any]:
    """Start messages of the stages that speak, as `speak` says."""
    return {"talker": speak, "code2wav": code2wav_pb2.DecodeRequest(sample_format=code2wav_pb2.SAMPLE_FORMAT_PCM16)}


async def run(pipeline: Pipeline, jobs: Sequence[Job], timeout_s: float) -> AsyncGenerator[tuple[int, Event], None]:
    """Runs `jobs` at the same time and yields (index of the job, event) as things happen: for each job PromptRead, then
    what is new of its answer, last Finished. Closing the iterator cancels every stage.

    Raises:
        StageError: of the first job that failed; all others are cancelled. Its `origin` is the kind of the stage that
            it began in, "" the gateway itself.
    """
    events = EventBuffer()
    deadline = asyncio.get_running_loop().time() + timeout_s
    answers = [_Answer(pipeline, job, index, events, deadline).run() for index, job in enumerate(jobs)]
    work = asyncio.create_task(gather_or_cancel(answers))
    work.add_done_callback(events.wake)
    timer = asyncio.get_running_loop().call_at(deadline, work.cancel)
    try:
        while not _has_failed(work):  # or else what waits is not told
            await events.wait(work.done)
            if _has_failed(work) or (event := events.take()) is None:
                break
            yield event
        if work.cancelled():
            raise DeadlineExceeded(f"the request took longer than its {timeout_s:g} s")
        work.result()
    finally:
        timer.cancel()
        work.cancel()
        await asyncio.shield(asyncio.gather(work, return_exceptions=True))


def _has_failed(work: asyncio.Task[Any]) -> bool:
    return work.done() and (work.cancelled() or work.exception() is not None)


def _sound_as(decode: code2wav_pb2.DecodeRequest, speak: talker_pb2.SpeakStart, replica: Replica) -> None:
    """Tells code2wav what it shares with the talker: the voice, where it has voices of its own, and the seed. Without
    one its noise is that of seed 0, though the talker draws another each time."""
    decode.seed = speak.sampling.seed % 2**64  # the talker's has a sign
    if replica.info and replica.info.code2wav.voices:
        decode.voice = speak.speaker


class _Answer:
    """One job on its way through the stages."""

    def __init__(self, pipeline: Pipeline, job: Job, index: int, events: EventBuffer, deadline: float) -> None:
        self._job, self._index, self._events, self._deadline = job, index, events, deadline
        stages = [stage for stage in pipeline.answer if stage.kind in job.starts]
        thinker: thinker_pb2.GenerateStart | None = job.starts.get("thinker")
        key = job.conversation_id.encode() or (None if thinker is None else prompt_key(thinker, job.media))
        self._route = Route(stages, job.request_id, key, "" if thinker is None else thinker.lora)
        self._prompt_read = asyncio.Event()
        self._has_output = self._failed = False
        self._early: list[thinker_pb2.GenerateDelta] = []  # deltas that came before the prompt was read

    async def run(self) -> None:
        while True:
            self._failed = False
            self._early.clear()
            try:
                with self._route.replicas() as leases:
                    await self._attempt(leases)
                return
            except StageError as error:
                if self._has_output or not await self._route.again(error):
                    raise

    async def _attempt(self, leases: Sequence[Lease]) -> None:
        calls = [self._call(lease, start) for lease, start in zip(leases, self._starts(leases), strict=True)]
        summaries = await gather_or_cancel(calls)
        await self._emit(
            Finished(**{lease.stage.kind: summary for lease, summary in zip(leases, summaries, strict=True)})
        )

    def _starts(self, leases: Sequence[Lease]) -> Iterator[Any]:
        """The start messages: each stage reads the stream of the one before, and is read by the one after."""
        # Not the request's id: a client may use that again, or we on another replica, while a stage still ends the
        # request before.
        stream_id = f"{self._job.request_id}-{uuid.uuid4().hex[:8]}"
        for i, lease in enumerate(leases):
            start = self._job.starts[lease.stage.kind]
            start.request_id = self._job.request_id
            if lease.stage.kind == "code2wav":
                _sound_as(start, self._job.starts["talker"], lease.replica)
            if i > 0:
                start.source.CopyFrom(leases[i - 1].replica.source(stream_id))
            if i + 1 < len(leases):
                start.output_stream_id = stream_id
            yield start

    async def _call(self, lease: Lease, start: Any) -> Any:
        """Calls the lease's replica, passes on what it answers, and returns its summary.

        Raises:
            StageError: the replica failed, or was lost and is marked down.
        """
        # the log-probabilities of a prompt are in the call, and come before the deltas
        is_ordered = lease.stage.kind == "thinker" and start.sampling.HasField("prompt_logprobs")
        take = None if is_ordered else self._take_delta
        call = lease.replica.call(start, self._job.media, self._time_left_s(), self._job.text, take)
        summary = None
        try:
            async for response in call:
                if response.HasField("summary"):
                    summary = response.summary
                    if lease.stage.kind == "thinker":
                        await self._emit(TextEnd(summary))
                elif (event := _event(lease.stage, start, response)) is not None:
                    await self._emit(event)
        except grpc.aio.AioRpcError as error:
            self._failed = True
            raise self._route.failure(lease, error) from error
        finally:
            call.cancel()
            lease.end()
        if summary is None:
            raise lease.stage.fault("ended the call without a summary")
        return summary

    async def _emit(self, event: Event) -> None:
        if self._failed:  # what the other stages still make must not keep the answer from being tried again
            return
        if isinstance(event, PromptRead):
            if self._prompt_read.is_set():  # by the replica before: the client has been told
                return
            await self._events.put(self._index, event)
            self._prompt_read.set()
            for delta in self._early:
                self._take_delta(delta)
            return
        if isinstance(event, AudioDelta | CodesDelta):
            await self._prompt_read.wait()  # the stages' calls are read side by side: sound may be here first
        self._has_output = True
        await self._events.put(self._index, event)

    def _take_delta(self, delta: thinker_pb2.GenerateDelta) -> None:
        """Passes on what does not come in the thinker's call. The text of an answer may all wait for a slow client."""
        if not self._prompt_read.is_set():
            self._early.append(delta)
        elif not self._failed:
            self._has_output = True
            self._events.put_now(self._index, TextDelta(delta))

    def _time_left_s(self) -> float:
        left_s = self._deadline - asyncio.get_running_loop().time()
        return max(left_s - min(_DEADLINE_MARGIN_S, left_s / 10), 0.001)


def _event(stage: Stage, start: Any, response: Any) -> Event | None:
    """What the stage's response to `start` says, if it is for the client. Raises InternalError: it cannot be right."""
    match response.WhichOneof("message"):
        case "prompt":
            return PromptRead(response.prompt)
        case "started" if start.HasField("text"):
            return PromptRead(thinker_pb2.PromptInfo(), start.text.text)
        case "prompt_logprobs":
            return PromptTokens(response.prompt_logprobs.tokens)
        case "delta":
            return TextDelta(response.delta)
        case "frames":
            codes = response.frames.tensor
            if codes.dtype != tensor_pb2.DATA_TYPE_INT32 or len(codes.shape) != 2:
                raise stage.fault(f"sent {tensor_pb2.DataType.Name(codes.dtype)} codes of shape {list(codes.shape)}")
            numbers, groups = memoryview(codes.inline).cast("i").tolist(), codes.shape[1]
            return CodesDelta([numbers[i : i + groups] for i in range(0, len(numbers), groups)]) if numbers else None
        case "audio":
            samples = response.audio.samples
            if samples.dtype != tensor_pb2.DATA_TYPE_INT16:
                raise stage.fault(f"sent {tensor_pb2.DataType.Name(samples.dtype)} samples, not PCM16")
            return AudioDelta(samples.inline) if samples.inline else None
    return None


async def gather_or_cancel(parts: Sequence[Coroutine[Any, Any, Any]]) -> list[Any]:
    """Results of `parts`, run at the same time. When one fails, or this is cancelled, the others are cancelled and
    waited for.

    Raises:
        StageError: the root error. If the first error can be an echo of another part's, the others have
            ECHO_GRACE_S to state theirs.
    """
    tasks = [asyncio.ensure_future(part) for part in parts]
    try:
        _, pending = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        if pending and all(map(_may_be_echo, _failures(tasks))):
            await asyncio.wait(pending, timeout=ECHO_GRACE_S)
    finally:
        for task in tasks:
            task.cancel()
        # A second cancellation must not leave these running.
        await asyncio.shield(asyncio.gather(*tasks, return_exceptions=True))
    if failures := _failures(tasks):
        raise min(failures, key=_rank)
    return [task.result() for task in tasks]


def _failures(tasks: Sequence[asyncio.Future[Any]]) -> list[StageError]:
    """Errors of stages in the order of `tasks`; any other exception is raised at once, being a bug."""
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
