"""Runs a request through its stages: opens all of them at once, merges their outputs, ends them together."""

import asyncio
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from typing import Any, TypeVar

import grpc

from gateway.pipeline.affinity import prefix_key
from gateway.pipeline.job import AudioDelta, Event, Finished, Job, PromptRead, Speech, StageFailure, TextDelta
from gateway.pipeline.route import Lease, Route
from gateway.pipeline.stages import Stage, Stages
from gateway.pipeline.together import all_or_none
from quartet.v1 import (
    code2wav_pb2,
    code2wav_pb2_grpc,
    media_pb2,
    stream_pb2,
    talker_pb2,
    talker_pb2_grpc,
    tensor_pb2,
    thinker_pb2,
    thinker_pb2_grpc,
)
from services.common.rpc.errors import DeadlineExceeded, InternalError, StageError
from services.common.telemetry import tracing

# Events that may wait for a slow client. Beyond, the stages' streams are not read, which slows the stages down.
_MAX_BUFFERED_EVENTS = 64
_MEDIA_CHUNK_BYTES = 256 * 1024
# Stages get this much less time than the request has, so that their own word on the deadline still arrives.
_DEADLINE_MARGIN_S = 0.5

Queue = asyncio.Queue[tuple[int, Event]]
Summary = TypeVar("Summary")


async def run(stages: Stages, jobs: Sequence[Job], timeout_s: float) -> AsyncGenerator[tuple[int, Event], None]:
    """Runs `jobs` at the same time and yields (index of the job, event) as things happen: for each job PromptRead, then
    TextDelta and AudioDelta, last Finished. Closing the iterator cancels every stage.

    Raises:
        StageFailure: the first job that failed; all others are cancelled.
    """
    queue: Queue = asyncio.Queue(_MAX_BUFFERED_EVENTS)
    deadline = asyncio.get_running_loop().time() + timeout_s
    answers = [_Answer(stages, job, index, queue, deadline).run() for index, job in enumerate(jobs)]
    work = asyncio.create_task(all_or_none(answers))
    timer = asyncio.get_running_loop().call_at(deadline, work.cancel)
    try:
        while (event := await _next(queue, work)) is not None:
            yield event
        if work.cancelled():
            limit = f"the request took longer than its {timeout_s:g} s"
            raise StageFailure("gateway", DeadlineExceeded(limit))
        work.result()
    finally:
        timer.cancel()
        work.cancel()
        await asyncio.shield(asyncio.gather(work, return_exceptions=True))


async def _next(queue: Queue, work: asyncio.Task) -> tuple[int, Event] | None:
    """The next event. None when `work` has failed, whatever is still queued, or has succeeded and nothing is."""
    if not work.done() and queue.empty():
        get = asyncio.ensure_future(queue.get())
        try:
            await asyncio.wait((get, work), return_when=asyncio.FIRST_COMPLETED)
            if get.done():
                return get.result()
        finally:
            get.cancel()
    failed = work.done() and (work.cancelled() or work.exception() is not None)
    return None if failed or queue.empty() else queue.get_nowait()


class _Answer:
    """One job on its way through the stages."""

    def __init__(self, stages: Stages, job: Job, index: int, queue: Queue, deadline: float) -> None:
        self._stages, self._job, self._index = stages, job, index
        self._queue, self._deadline = queue, deadline
        self._request_id = job.start.request_id
        self._stream_id = ""
        self._needs = self._needed()
        self._route = Route(self._needs, self._request_id, prefix_key(job))
        self._prompt_read = self._has_output = self._failed = False

    async def run(self) -> None:
        while True:
            for stage in self._needs:
                _require_serving(stage)
            self._failed = False
            try:
                with self._route.replicas() as leases:
                    await self._attempt(*leases)
                return
            except StageFailure as failure:
                if self._has_output or not await self._route.again(failure.error):
                    raise

    def _needed(self) -> list[Stage]:
        thinker, talker, code2wav = self._stages.thinker, self._stages.talker, self._stages.code2wav
        assert thinker is not None
        if self._job.speech is None:
            return [thinker]
        assert talker is not None, "speech was asked of a pipeline without audio"
        assert code2wav is not None
        return [thinker, talker, code2wav]

    async def _attempt(self, thinker: Lease, talker: Lease | None = None, code2wav: Lease | None = None) -> None:
        if talker is None or code2wav is None or self._job.speech is None:
            (summary,) = await all_or_none([self._think(thinker)])
            await self._emit(Finished(summary, None, None))
            return
        # Not the request's id: a client may use that again, or we on another replica, while a stage still ends the
        # request before.
        self._stream_id = self._job.start.output_stream_id = f"{self._request_id}-{uuid.uuid4().hex[:8]}"
        summaries = await all_or_none(
            [
                self._think(thinker),
                self._speak(talker, thinker.replica.source(self._stream_id), self._job.speech),
                self._decode(code2wav, talker.replica.source(self._stream_id)),
            ]
        )
        await self._emit(Finished(*summaries))

    async def _think(self, lease: Lease) -> thinker_pb2.GenerateSummary:
        stub = thinker_pb2_grpc.ThinkerServiceStub(lease.replica.channel)
        call = stub.Generate(self._thinker_requests(), timeout=self._time_left_s(), metadata=tracing.metadata())
        summary = None
        async with aclosing(self._responses(lease, call)) as responses:
            async for response in responses:
                match response.WhichOneof("message"):
                    case "prompt":
                        await self._emit(PromptRead(response.prompt))
                    case "delta":
                        await self._emit(TextDelta(response.delta))
                    case "summary":
                        summary = response.summary
        return _complete(lease, summary)

    async def _thinker_requests(self) -> AsyncIterator[thinker_pb2.GenerateRequest]:
        yield thinker_pb2.GenerateRequest(start=self._job.start)
        for file in self._job.late_media:
            for begin in range(0, len(file), _MEDIA_CHUNK_BYTES):
                chunk = media_pb2.MediaChunk(data=file[begin : begin + _MEDIA_CHUNK_BYTES])
                yield thinker_pb2.GenerateRequest(media=chunk)

    async def _speak(self, lease: Lease, source: stream_pb2.StreamSource, speech: Speech) -> talker_pb2.SpeakSummary:
        request = talker_pb2.SpeakRequest(
            request_id=self._request_id,
            source=source,
            speaker=speech.speaker,
            sampling=speech.sampling,
            output_stream_id=self._stream_id,
        )
        stub = talker_pb2_grpc.TalkerServiceStub(lease.replica.channel)
        call = stub.Speak(request, timeout=self._time_left_s(), metadata=tracing.metadata())
        summary = None
        async with aclosing(self._responses(lease, call)) as responses:
            async for response in responses:
                if response.HasField("summary"):
                    summary = response.summary
        return _complete(lease, summary)

    async def _decode(self, lease: Lease, source: stream_pb2.StreamSource) -> code2wav_pb2.DecodeSummary:
        request = code2wav_pb2.DecodeRequest(
            request_id=self._request_id,
            source=source,
            sample_format=code2wav_pb2.SAMPLE_FORMAT_PCM16,
        )
        stub = code2wav_pb2_grpc.Code2WavServiceStub(lease.replica.channel)
        call = stub.Decode(request, timeout=self._time_left_s(), metadata=tracing.metadata())
        summary = None
        async with aclosing(self._responses(lease, call)) as responses:
            async for response in responses:
                if response.HasField("summary"):
                    summary = response.summary
                    continue
                samples = response.audio.samples
                if samples.dtype != tensor_pb2.DATA_TYPE_INT16:
                    dtype = tensor_pb2.DataType.Name(samples.dtype)
                    wrong = InternalError(f"stage {lease.stage.name} sent {dtype} samples, not PCM16")
                    raise StageFailure(lease.stage.kind, wrong)
                if samples.inline:
                    await self._emit(AudioDelta(samples.inline))
        return _complete(lease, summary)

    async def _responses(self, lease: Lease, call: Any) -> AsyncGenerator[Any, None]:
        """Responses of `call`, which is cancelled at the end, when its lease ends too.

        Raises:
            StageFailure: the replica failed, or was lost and is marked down.
        """
        try:
            async for response in call:
                yield response
        except grpc.aio.AioRpcError as error:
            self._failed = True
            raise StageFailure(lease.stage.kind, self._route.failure(lease, error)) from error
        finally:
            call.cancel()
            lease.end()

    async def _emit(self, event: Event) -> None:
        if self._failed:  # what the other stages still make must not keep the answer from being tried again
            return
        if isinstance(event, PromptRead):
            if self._prompt_read:  # by the replica before: the client has been told
                return
            self._prompt_read = True
        else:
            self._has_output = True
        await self._queue.put((self._index, event))

    def _time_left_s(self) -> float:
        left_s = self._deadline - asyncio.get_running_loop().time()
        return max(left_s - min(_DEADLINE_MARGIN_S, left_s / 10), 0.001)


def _require_serving(stage: Stage) -> None:
    try:
        stage.require_serving()
    except StageError as error:
        raise StageFailure(stage.kind, error) from None


def _complete(lease: Lease, summary: Summary | None) -> Summary:
    if summary is None:
        wrong = InternalError(f"stage {lease.stage.name} ended the call without a summary")
        raise StageFailure(lease.stage.kind, wrong)
    return summary
