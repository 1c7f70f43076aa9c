"""What surrounds the body of a request's RPC: admission, errors, timings, one log line, metrics, a span."""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from contextvars import ContextVar
from typing import Any

import grpc
import structlog

from services.common.errors import InternalError, InvalidInput, QueueFull, StageError, Unavailable
from services.common.rpc.requests import MAX_ID_CHARACTERS, check_id
from services.common.rpc.status import abort
from services.common.telemetry import metrics, tracing
from services.common.telemetry.spans import Span, Spans
from services.common.telemetry.stopwatch import Stopwatch

STAGE_KEY = "quartet-stage"  # gRPC metadata: the calling stage, for metrics
_stage: ContextVar[str] = ContextVar("stage", default="")
_at_end: ContextVar[ExitStack | None] = ContextVar("at_end", default=None)

log = structlog.get_logger()


def outgoing_metadata() -> tuple[tuple[str, str], ...]:
    """Metadata of a call for the request being served: who calls, and its trace."""
    caller = _stage.get()
    return (*(((STAGE_KEY, caller),) if caller else ()), *(tracing.metadata() or ()))


def at_end_of_request(callback: Callable[[], object]) -> None:
    """Calls `callback` when the request being served has ended; outside of one, never."""
    if (stack := _at_end.get()) is not None:
        stack.callback(callback)


class Admission:
    """Admits `max_running` requests and `max_queued` more; the engine does the queueing. Closed until `open()`, and
    again from `drain()` on.

    Args:
        max_running: requests the engine works on.
        max_queued: requests that may wait beyond those.
        stage: name in the metrics.

    Attributes:
        spans: of the requests that `serve_call` serves here.
    """

    def __init__(self, max_running: int, max_queued: int, stage: str = "") -> None:
        self.max_running = max_running
        self.max_queued = max_queued
        self.in_flight = 0
        self.spans = Spans()
        self._closed: str | None = "the stage is loading its model; retry later"
        self._idle = asyncio.Event()
        self._idle.set()
        self._stage = stage
        metrics.RUNNING.labels(stage).set_function(lambda: self.running)
        metrics.QUEUED.labels(stage).set_function(lambda: self.queued)

    @property
    def running(self) -> int:
        """Requests that the engine has room for. May be read from any thread, as `queued`."""
        return min(self.in_flight, self.max_running)

    @property
    def queued(self) -> int:
        return max(0, self.in_flight - self.max_running)

    def open(self) -> None:
        self._closed = None

    @contextmanager
    def admit(self) -> Generator[None]:
        """Holds a place for one request.

        Raises:
            Unavailable: the stage is loading or draining.
            QueueFull: all places are taken.
        """
        if self._closed:
            metrics.REFUSED.labels(self._stage, "not_serving").inc()
            raise Unavailable(self._closed)
        if self.in_flight >= self.max_running + self.max_queued:
            metrics.REFUSED.labels(self._stage, "queue_full").inc()
            raise QueueFull(f"{self.max_running} requests are running and {self.max_queued} are queued; retry later")
        self.in_flight += 1
        self._idle.clear()
        try:
            yield
        finally:
            self.in_flight -= 1
            if not self.in_flight:
                self._idle.set()

    async def drain(self) -> None:
        """Refuses new requests; returns when the last one in flight has ended."""
        self._closed = "the stage is draining and takes no new requests; try another replica"
        await self._idle.wait()


class Call:
    """A request being served.

    Args:
        stage: name of the stage.
        request_id: the same in every stage.
        span: None without traces.
    """

    def __init__(self, stage: str, request_id: str, span: tracing.Span | None = None) -> None:
        self.stage = stage
        self.request_id = request_id
        self.timings = Stopwatch()
        self._end: float | None = None
        self._outcome = ""
        self._span = span
        self._fields: dict[str, Any] = {}

    def set(self, **fields: Any) -> None:
        """Adds fields to the log line. Never content of the user."""
        self._fields.update(fields)

    def span(self) -> Span:
        """Where its time went up to now, or its end."""
        timings = self.timings
        return Span(
            request_id=self.request_id,
            stage=self.stage,
            start=timings.accepted,
            end=self._end,
            outcome=self._outcome,
            phases=timings.phases(),
            first_output=timings.first_output,
        )

    def end(self, outcome: str) -> None:
        self._end, self._outcome = time.monotonic(), outcome
        total_ms, first_output_ms = self.timings.elapsed_ms(), self.timings.first_output_ms
        metrics.REQUESTS.labels(self.stage, outcome).inc()
        metrics.DURATION.labels(self.stage).observe(total_ms / 1000)
        if first_output_ms is not None:
            metrics.FIRST_OUTPUT.labels(self.stage).observe(first_output_ms / 1000)
        if self._span:
            self._trace(self._span, outcome)
            self._fields["trace_id"] = self._span.trace_id
        log.info(
            "request",
            request_id=self.request_id,
            outcome=outcome,
            total_ms=round(total_ms, 1),
            first_output_ms=None if first_output_ms is None else round(first_output_ms, 1),
            **self._fields,
        )

    def _trace(self, span: tracing.Span, outcome: str) -> None:
        span.event("started", self.timings.started)
        span.event("prefilled", self.timings.prefilled)
        span.event("first output", self.timings.first_output)
        fields = {name: value for name, value in self._fields.items() if name != "error"}  # it may quote the user
        span.set(stage=self.stage, outcome=outcome, **fields)
        span.end("" if outcome == "OK" else outcome)


@asynccontextmanager
async def serve_call(
    stage: str, request_id: str, context: grpc.aio.ServicerContext[Any, Any], admission: Admission
) -> AsyncGenerator[Call]:
    """Wraps the body of an RPC that serves one request. A StageError raised inside becomes the call's status, any other
    exception INTERNAL with its traceback in the log."""
    shown = request_id[:MAX_ID_CHARACTERS]  # it is kept, even if it is refused
    span = tracing.begin(stage, shown, tracing.as_headers(context.invocation_metadata()))
    _stage.set(stage)
    call = Call(stage, shown, span)
    outcome = "OK"
    at_end = ExitStack()  # its last entry ends first
    at_end.enter_context(admission.spans.serving(call.span))
    at_end.callback(lambda: call.end(outcome))
    at_end.enter_context(metrics.IN_FLIGHT.labels(stage).track_inprogress())
    _at_end.set(at_end)
    try:
        check_id("request_id", request_id)
        with admission.admit():
            yield call
    except StageError as error:
        outcome = error.status
        # the reason of a refusal may quote the user
        said = f"{error.field} is refused" if isinstance(error, InvalidInput) else str(error)
        call.set(error=said, **({"detail": error.detail} if error.detail else {}))
        await abort(context, error)
    except (asyncio.CancelledError, GeneratorExit):
        outcome = "CANCELLED"
        raise
    except grpc.aio.AbortError:
        outcome = "ABORTED"
        raise
    except Exception:
        outcome = "INTERNAL"
        log.exception("request failed", request_id=request_id)
        await abort(context, InternalError(f"{stage} failed; its log has the details of request {request_id}"))
    finally:
        at_end.close()
