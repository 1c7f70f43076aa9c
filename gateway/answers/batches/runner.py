"""Works on batches, one at a time, while nobody else needs the stages."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import aclosing, suppress
from typing import Any, Self

import structlog

from gateway.answers.batches.job import BatchJob, LineAnswer
from gateway.answers.batches.lines import BatchLine
from gateway.answers.batches.store import BatchLost, BatchStore, StoredBatch
from gateway.answers.gateway import Gateway
from gateway.errors import ApiError
from gateway.tasks import cancel
from services.common.sampling_limits import BACKGROUND_PRIORITY

_RENEWAL_S = 4.0
_LOOK_S = 2.0  # for batches that another gateway left, or that were made there
_IDLE_S = 0.02
_QUIET_S = 1.0  # who has just been answered may ask again, and then finds no line
_STARVED_S = 10.0  # a line begins then, however busy the gateway is: a batch ends some day
_AGAIN_S = 2.0  # after a stage was full or away
_BY_PRIORITY = (
    *("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings"),
    *("/v1/audio/transcriptions", "/v1/audio/translations"),
)

log = structlog.get_logger()

Ask = Callable[[str, dict[str, Any], str | None], Awaitable[LineAnswer]]
"""Has the gateway answer (endpoint, body) for the owner. Raises ApiError: 401, the owner's API key is gone."""


class BatchRunner:
    """Use as `async with`. Leaving it gives the batch back, which another gateway goes on with.

    Args:
        ask: answers a line.
    """

    def __init__(self, gateway: Gateway, store: BatchStore, ask: Ask) -> None:
        self._gateway, self.store, self._ask = gateway, store, ask
        self._most = gateway.settings.batch_requests  # lines at a time
        self._running = 0  # lines
        self._others_s = -_QUIET_S  # when somebody else was there
        self._made = asyncio.Event()

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._work())
        return self

    async def __aexit__(self, *_: object) -> None:
        await cancel(self._task)
        await self.store.close()

    def wake(self) -> None:
        """A batch was made here."""
        self._made.set()

    async def _work(self) -> None:
        if not await self.store.may_have_some():
            await self._made.wait()
        while True:
            try:
                while (batch := await self._next()) is not None:
                    await self._work_on(batch)
            except ApiError:
                pass  # the store has logged it, and may be there again soon
            except Exception:
                log.exception("batches cannot be worked on")
            with suppress(TimeoutError):
                async with asyncio.timeout(_LOOK_S):
                    await self._made.wait()
            self._made.clear()

    async def _next(self) -> StoredBatch | None:
        """None: there is none, or the stages have not said yet what they serve."""
        return await self.store.take(self.models) if self._gateway.pipeline.is_settled else None

    @property
    def models(self) -> list[str]:
        """Without adapters, which come and go."""
        names = self._gateway.catalog
        return [name for name in names.models if names.parent_of(name) is None]

    async def _work_on(self, batch: StoredBatch) -> None:
        job = BatchJob(self._gateway, self.store, batch)
        work = asyncio.create_task(self._do(job))
        try:
            while not work.done():
                await asyncio.wait([work], timeout=_RENEWAL_S)
                if not work.done():
                    with suppress(ApiError):  # the database is away: the lease may hold until it is back
                        job.cancels = job.cancels or await self.store.renew(batch.id)
            work.result()
        except BatchLost:
            log.warning("another gateway works on a batch", batch=batch.id)
        finally:
            await cancel(work)
            with suppress(ApiError):
                await self.store.give_back(batch.id)

    async def _do(self, job: "BatchJob") -> None:
        began = time.monotonic()
        log.info("working on a batch", batch=job.batch.id, status=job.body["status"])
        try:
            if job.body["status"] == "validating":
                await job.validate()
            if job.body["status"] == "in_progress":
                await self._answer(job)
            if job.body["status"] in ("in_progress", "finalizing"):
                await job.finish()
        except ApiError as error:
            if error.status != 404:  # else the input file was deleted meanwhile
                raise
            await job.fail([job.fault(error)])
        counts = job.body["request_counts"]
        duration_ms = round((time.monotonic() - began) * 1000, 1)
        log.info("batch", batch=job.batch.id, status=job.body["status"], duration_ms=duration_ms, **counts)

    async def _answer(self, job: "BatchJob") -> None:
        done, running = await self.store.done(job.batch.id), set[asyncio.Task[None]]()
        looking = asyncio.create_task(self._look_for_others())
        try:
            async with aclosing(job.lines()) as lines:
                async for line in lines:
                    if line.number in done:
                        continue
                    if job.cancels or job.is_late:
                        break
                    await self._until_idle()
                    running.add(asyncio.create_task(self._answer_line(job, line)))
                    if len(running) >= self._most:
                        ended, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                        for task in ended:
                            task.result()
            for task in running:
                await task
        finally:
            await cancel(looking, *running)

    async def _look_for_others(self) -> None:
        while True:
            self._is_quiet()
            await asyncio.sleep(_IDLE_S)

    def _is_quiet(self) -> bool:
        """Whether nobody else has been there for a moment."""
        now_s = time.monotonic()
        if self._has_others():
            self._others_s = now_s
        return now_s >= self._others_s + _QUIET_S

    def _has_others(self) -> bool:
        """Whether the gateway answers anybody else, or each replica of a stage somebody of another gateway."""
        if self._gateway.admission.in_flight > self._running:
            return True
        stages = self._gateway.pipeline.by_name.values()
        serving = ([each for each in stage.replicas.values() if each.serving] for stage in stages)
        return any(replicas and all(each.of_others for each in replicas) for replicas in serving)

    async def _until_idle(self) -> None:
        end_s = time.monotonic() + _STARVED_S
        while not self._is_quiet() and time.monotonic() < end_s:  # noqa: ASYNC110
            await asyncio.sleep(_IDLE_S)

    async def _answer_line(self, job: "BatchJob", line: BatchLine) -> None:
        endpoint, body = job.body["endpoint"], dict(line.body)
        if endpoint in _BY_PRIORITY:
            body.setdefault("priority", BACKGROUND_PRIORITY)
        self._running += 1
        try:
            while True:
                try:
                    answer = await self._ask(endpoint, body, job.batch.owner or None)
                except ApiError as error:
                    answer = LineAnswer(error.status, "", error.body())
                if answer.status not in (429, 503) or job.cancels or job.is_late:
                    break
                await asyncio.sleep(_AGAIN_S)
        finally:
            self._running -= 1
        await job.keep(line, answer)
