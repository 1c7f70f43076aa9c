"""Works on batches, one at a time, while nobody else needs the stages."""

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing, suppress
from dataclasses import dataclass, replace
from typing import Any, Self

import structlog

from gateway.answers.batches.lines import MAX_LINES, BatchLine, LineError, read_line, split
from gateway.answers.batches.store import BatchLost, BatchStore, StoredBatch
from gateway.answers.files.store import StoredFile
from gateway.answers.gateway import Gateway
from gateway.errors import ApiError
from gateway.tasks import cancel

_RENEWAL_S = 4.0
_LOOK_S = 2.0  # for batches that another gateway left, or that were made there
_IDLE_S = 0.02
_STARVED_S = 10.0  # a line begins then, however busy the gateway is: a batch ends some day
_AGAIN_S = 2.0  # after a stage was full or away
_LOWEST_PRIORITY = 2**31 - 1
_BY_PRIORITY = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings")

log = structlog.get_logger()


@dataclass(frozen=True)
class LineAnswer:
    """What the gateway answers to a line. `body`: JSON's value; of sound its base64."""

    status: int
    request_id: str
    body: Any


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
        job = _BatchJob(self._gateway, self.store, batch)
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

    async def _do(self, job: "_BatchJob") -> None:
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

    async def _answer(self, job: "_BatchJob") -> None:
        done, running = await self.store.done(job.batch.id), set[asyncio.Task[None]]()
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
            await cancel(*running)

    async def _until_idle(self) -> None:
        """Waits while the gateway answers anybody else."""
        end_s = time.monotonic() + _STARVED_S
        while self._gateway.admission.in_flight > self._running and time.monotonic() < end_s:  # noqa: ASYNC110
            await asyncio.sleep(_IDLE_S)

    async def _answer_line(self, job: "_BatchJob", line: BatchLine) -> None:
        endpoint, body = job.body["endpoint"], dict(line.body)
        if endpoint in _BY_PRIORITY:
            body.setdefault("priority", _LOWEST_PRIORITY)
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


class _BatchJob:
    """A batch that this gateway holds. Methods raise BatchLost; ApiError."""

    def __init__(self, gateway: Gateway, store: BatchStore, batch: StoredBatch) -> None:
        self._gateway, self._store, self.batch = gateway, store, batch
        self.body, self.cancels = dict(batch.body), batch.cancels
        if self.body["status"] == "cancelling":  # as it is told; it is worked on as before
            self.body["status"] = "in_progress" if self.body["in_progress_at"] else "validating"

    @property
    def is_late(self) -> bool:
        return time.time() >= self.body["expires_at"]

    async def lines(self) -> AsyncGenerator[BatchLine, None]:
        """Raises LineError; ApiError: 404, the input file is gone."""
        owner, file_id = self.batch.owner or None, self.body["input_file_id"]
        file = await self._gateway.files.get(file_id, owner)
        if file is None:
            raise ApiError(404, f"the input file {file_id} is gone", "input_file_id", "file_not_found")
        async with (
            aclosing(await self._gateway.files.open(file)) as pieces,
            aclosing(split(pieces)) as lines,
        ):
            async for number, line in lines:
                yield await asyncio.to_thread(read_line, number, line, self.body["endpoint"])

    async def validate(self) -> None:
        """Reads all lines: a batch with a fault does nothing."""
        errors, ids = list[dict[str, Any]](), set[str]()
        total = 0
        try:
            async with aclosing(self.lines()) as lines:
                async for line in lines:
                    total += 1
                    if total > MAX_LINES:
                        raise LineError(line.number, "too_many_requests", f"a batch has at most {MAX_LINES} lines")
                    if line.custom_id in ids:
                        reason = f"its custom_id {line.custom_id[:80]!r} is that of another line, too"
                        raise LineError(line.number, "duplicate_custom_id", reason, "custom_id")
                    ids.add(line.custom_id)
        except LineError as error:
            errors.append(error.body)
        except ApiError as error:
            if error.status != 404:
                raise
            errors.append(self.fault(error))
        if not total and not errors:
            errors.append({"code": "empty_file", "message": "the file has no line", "line": None, "param": None})
        if errors:
            await self.fail(errors)
            return
        now = int(time.time())
        counts = {"total": total, "completed": 0, "failed": 0}
        self.body |= {"status": "in_progress", "in_progress_at": now, "request_counts": counts}
        await self._save()

    async def fail(self, errors: list[dict[str, Any]]) -> None:
        self.body |= {"status": "failed", "failed_at": int(time.time()), "errors": {"object": "list", "data": errors}}
        await self._save(is_over=True)

    @staticmethod
    def fault(error: ApiError) -> dict[str, Any]:
        """OpenAI's BatchError."""
        return {"code": error.code, "message": error.message, "line": None, "param": error.param}

    async def keep(self, line: BatchLine, answer: LineAnswer) -> None:
        """What a line came to, once."""
        response = {"status_code": answer.status, "request_id": answer.request_id, "body": answer.body}
        result = {"id": f"batch_req_{secrets.token_hex(16)}", "custom_id": line.custom_id, "response": response}
        await self._store.add_line(self.batch.id, line.number, answer.status != 200, result | {"error": None})

    async def finish(self) -> None:
        """Puts what its lines came to into files."""
        now, done = int(time.time()), await self._store.done(self.batch.id)
        left_out = len(done) < self.body["request_counts"]["total"]
        if left_out:
            await self._leave_out(done)
        self.body |= {"status": "finalizing", "finalizing_at": now}
        await self._save()
        counted = {}
        for is_error, name in ((False, "output"), (True, "error")):
            counted[name] = 0
            file_id = await self._write(is_error, name, counted)
            self.body[f"{name}_file_id"] = file_id
        counts = self.body["request_counts"] | {"completed": counted["output"], "failed": counted["error"]}
        status = ("cancelled" if self.cancels else "expired") if left_out else "completed"
        self.body |= {"status": status, f"{status}_at": int(time.time()), "request_counts": counts}
        await self._save(is_over=True)

    async def _leave_out(self, done: set[int]) -> None:
        code = "batch_cancelled" if self.cancels else "batch_expired"
        why = "the batch was cancelled" if self.cancels else "the batch's time was over"
        error = {"code": code, "message": f"{why} before this request was sent"}
        async with aclosing(self.lines()) as lines:
            async for line in lines:
                if line.number not in done:
                    result = {"id": f"batch_req_{secrets.token_hex(16)}", "custom_id": line.custom_id, "response": None}
                    await self._store.add_line(self.batch.id, line.number, True, result | {"error": error})

    async def _write(self, is_error: bool, name: str, counted: dict[str, int]) -> str | None:
        """A file of results; None: there are none."""
        first = await self._store.results(self.batch.id, is_error, -1)
        if not first:
            return None
        now, kept_s = time.time(), self.body["output_expires_s"] or self._gateway.settings.file_ttl_s

        def described() -> StoredFile:
            return StoredFile("", "", "batch_output", f"{self.batch.id}_{name}.jsonl", 0, int(now), now + kept_s)

        async def pieces() -> AsyncGenerator[bytes, None]:
            rows = first
            while rows:
                counted[name] += len(rows)
                yield "".join(f"{text}\n" for _, text in rows).encode()
                rows = await self._store.results(self.batch.id, is_error, rows[-1][0])

        async with aclosing(pieces()) as written:
            file = await self._gateway.files.create(written, self.batch.owner or None, described)
        return file.id

    async def _save(self, is_over: bool = False) -> None:
        await self._store.save(replace(self.batch, body=self.body), is_over)
