"""A batch that this gateway works on: from its input file to the files of its results."""

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any

from gateway.answers.batches.lines import MAX_LINES, BatchLine, LineError, read_line, split
from gateway.answers.batches.store import BatchStore, StoredBatch
from gateway.answers.files.store import StoredFile
from gateway.answers.gateway import Gateway
from gateway.errors import ApiError


@dataclass(frozen=True)
class LineAnswer:
    """What the gateway answers to a line. `body`: JSON's value; a text; of sound its base64."""

    status: int
    request_id: str
    body: Any


class BatchJob:
    """Methods raise BatchLost, another gateway works on it; ApiError."""

    def __init__(self, gateway: Gateway, store: BatchStore, batch: StoredBatch) -> None:
        self._gateway, self._store, self.batch = gateway, store, batch
        self.body, self.cancels = dict(batch.body), batch.cancels
        if self.body["status"] == "cancelling":  # what clients see of it; it is worked on as before
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
        await self._keep(line, answer.status != 200, response=response, error=None)

    async def _keep(self, line: BatchLine, is_error: bool, **members: Any) -> None:
        result = {"id": f"batch_req_{secrets.token_hex(16)}", "custom_id": line.custom_id, **members}
        await self._store.add_line(self.batch.id, line.number, is_error, result)

    async def finish(self) -> None:
        """Puts what its lines came to into files."""
        now, done = int(time.time()), await self._store.done(self.batch.id)
        left_out = len(done) < self.body["request_counts"]["total"]
        if left_out:
            await self._leave_out(done)
        self.body |= {"status": "finalizing", "finalizing_at": now}
        await self._save()
        self.body["output_file_id"], completed = await self._write(is_error=False)
        self.body["error_file_id"], failed = await self._write(is_error=True)
        counts = self.body["request_counts"] | {"completed": completed, "failed": failed}
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
                    await self._keep(line, True, response=None, error=error)

    async def _write(self, is_error: bool) -> tuple[str | None, int]:
        """(id of a file of results, how many there are); None: there are none."""
        first = await self._store.results(self.batch.id, is_error, -1)
        if not first:
            return None, 0
        filename, count = f"{self.batch.id}_{'error' if is_error else 'output'}.jsonl", 0
        now, kept_s = time.time(), self.body["output_expires_s"] or self._gateway.settings.file_ttl_s

        def described() -> StoredFile:
            return StoredFile("", "", "batch_output", filename, 0, int(now), now + kept_s)

        async def pieces() -> AsyncGenerator[bytes, None]:
            nonlocal count
            rows = first
            while rows:
                count += len(rows)
                yield "".join(f"{text}\n" for _, text in rows).encode()
                rows = await self._store.results(self.batch.id, is_error, rows[-1][0])

        async with aclosing(pieces()) as written:
            file = await self._gateway.files.create(written, self.batch.owner or None, described)
        return file.id, count

    async def _save(self, is_over: bool = False) -> None:
        await self._store.save(replace(self.batch, body=self.body), is_over)
