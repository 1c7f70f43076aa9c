"""The replicas of one request. They may be chosen a second time."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, TypeVar

import grpc
import structlog

from gateway import metrics
from gateway.pipeline.kinds import KINDS
from gateway.pipeline.replica import Replica
from gateway.pipeline.stage import Stage
from services.common.errors import NotFound, RequestCancelled, StageError, Unavailable

# Errors of a request whose replica is lost or drains.
LOST = (Unavailable, NotFound, RequestCancelled)
_CHECK_TIMEOUT_S = 1.0

log = structlog.get_logger()
Made = TypeVar("Made")
Request = TypeVar("Request", bound=Any)  # a message with a request_id


class Lease:
    """A request's place at a replica, until `end`."""

    def __init__(self, stage: Stage, replica: Replica) -> None:
        self.stage, self.replica = stage, replica
        self._faults = replica.faults
        self._place = ExitStack()
        self._place.enter_context(replica.request())

    def end(self) -> None:
        """May be called again."""
        self._place.close()

    @property
    def suspect(self) -> bool:
        """Whether the replica may be why the request failed."""
        return not self.replica.serving or self.replica.faults != self._faults


class Route:
    """A request's way through `stages`.

    Args:
        stages: at most one of them caches prompts.
        key: see `balance.prompt_key`.
        lora: adapter that the replica must have; "": none.
    """

    def __init__(self, stages: Sequence[Stage], request_id: str, key: bytes | None = None, lora: str = "") -> None:
        self.first = stages[0] if stages else None
        self._stages, self._request_id, self._key, self._lora = stages, request_id, key, lora
        self._leases: list[Lease] = []
        self._suspects: list[Lease] = []
        self._avoid: set[Replica] = set()
        self._retried = False

    @contextmanager
    def replicas(self) -> Iterator[list[Lease]]:
        """A lease for each stage, until the context ends. Raises Unavailable: a stage does not serve."""
        self._leases = []
        for stage in self._stages:
            stage.require_serving()
        try:
            for stage in self._stages:
                kind = KINDS[stage.kind]
                key, lora = self._key if kind.caches_prompts else None, self._lora if kind.loads_adapters else ""
                self._leases.append(Lease(stage, stage.choose(key, self._avoid, lora)))
            yield self._leases
        finally:
            for lease in self._leases:
                lease.end()

    def failure(self, lease: Lease, error: grpc.aio.AioRpcError) -> StageError:
        """The error of a call that failed at the lease's replica.

        If it blames another stage, that stage's replica is suspect too."""
        reason = lease.replica.failure(error)
        if isinstance(reason, Unavailable):
            for other in self._leases:
                if other is not lease and other.stage.kind == reason.origin:
                    other.replica.doubt()
        return reason

    async def again(self, error: StageError) -> bool:
        """Whether to try the request again, which ended with `error` before any output.

        It is, once, if a replica was lost or drains, and there is another. The leases must have ended."""
        if not self.may_retry(error):
            return False
        # Checks which of the others drain: this request is not tried a third time.
        with suppress(TimeoutError):
            async with asyncio.timeout(_CHECK_TIMEOUT_S):
                await asyncio.gather(*(stage.check(_CHECK_TIMEOUT_S) for stage in self._stages))
        return self.retry(error)

    def may_retry(self, error: StageError) -> bool:
        """Whether it may be tried again, if a check of all stages' replicas finds others that serve."""
        self._suspects = [lease for lease in self._leases if lease.suspect]
        return not self._retried and isinstance(error, LOST) and _replaceable(self._suspects)

    def retry(self, error: StageError) -> bool:
        """Whether it is tried again, as the check after `may_retry` has found the replicas. If so, the next
        `replicas()` avoids those that may be why it failed."""
        suspects = self._suspects
        if not all(stage.serving for stage in self._stages) or not _replaceable(suspects):
            return False
        self._retried, self._avoid = True, {lease.replica for lease in suspects}
        for lease in suspects:
            metrics.RETRIES.labels(lease.stage.name).inc()
        lost = {lease.stage.name: lease.replica.address for lease in suspects}
        why = {"error": str(error), "detail": error.detail}
        log.warning("request tried again", request_id=self._request_id, lost=lost, **why)
        return True


def _replaceable(leases: Sequence[Lease]) -> bool:
    return any(
        replica.serving and replica is not lease.replica
        for lease in leases
        for replica in lease.stage.replicas.values()
    )


async def by_one_stage(
    stage: Stage,
    request: Request,
    timeout_s: float,
    attempt: Callable[[Route, Lease, Request, float], Awaitable[Made]],
) -> Made:
    """What `attempt` makes of a request with the seconds that are left, by a replica of the one stage that it needs. If
    the replica is lost, by another one, once.

    Raises:
        StageError: the stage does not serve, or as `attempt`.
    """
    deadline = asyncio.get_running_loop().time() + timeout_s
    route = Route([stage], request.request_id)
    while True:
        left_s = max(0.001, deadline - asyncio.get_running_loop().time())
        try:
            with route.replicas() as (lease,):
                return await attempt(route, lease, request, left_s)
        except StageError as error:
            if not await route.again(error):
                raise
