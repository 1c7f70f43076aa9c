"""The replicas that one request goes to, and the one time that they may be chosen anew."""

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress

import grpc
import structlog

from gateway import metrics
from gateway.pipeline.kinds import KINDS
from gateway.pipeline.replica import Replica
from gateway.pipeline.stage import Stage
from services.common.errors import NotFound, RequestCancelled, StageError, Unavailable

# What a request hears, from one stage or another, when a replica is lost or drains.
LOST = (Unavailable, NotFound, RequestCancelled)
_CHECK_TIMEOUT_S = 1.0

log = structlog.get_logger()


class Lease:
    """A request's place at a replica, counted in its load until `end`."""

    def __init__(self, stage: Stage, replica: Replica) -> None:
        self.stage, self.replica = stage, replica
        self._faults = replica.faults
        self._place = ExitStack()
        self._place.enter_context(replica.request())

    def end(self) -> None:
        """The replica's part is done. May be called again."""
        self._place.close()

    @property
    def suspect(self) -> bool:
        """Whether the replica may be why the request failed."""
        return not self.replica.serving or self.replica.faults != self._faults


class Route:
    """A request's way through `stages`.

    Args:
        stages: those it needs, at most one of them of a kind that caches prompts.
        request_id: for the log.
        key: what of the request that one may have cached; see `balance.prompt_key`.
        lora: adapter that the thinker must have; "": none.
    """

    def __init__(self, stages: Sequence[Stage], request_id: str, key: bytes | None = None, lora: str = "") -> None:
        self._stages, self._request_id, self._key, self._lora = stages, request_id, key, lora
        self._leases: list[Lease] = []
        self._avoid: set[Replica] = set()
        self._retried = False

    @contextmanager
    def replicas(self) -> Iterator[list[Lease]]:
        """A replica for each stage, in the order of the stages. Each lease ends with the context at the latest.

        Raises:
            Unavailable: a stage does not serve.
        """
        self._leases = []
        for stage in self._stages:
            stage.require_serving()
        try:
            for stage in self._stages:
                key = self._key if KINDS[stage.kind].caches_prompts else None
                lora = self._lora if stage.kind == "thinker" else ""
                self._leases.append(Lease(stage, stage.choose(key, self._avoid, lora)))
            yield self._leases
        finally:
            for lease in self._leases:
                lease.end()

    def failure(self, lease: Lease, error: grpc.aio.AioRpcError) -> StageError:
        """Why a call to the lease's replica failed. If that says that another replica of this request is gone, that one
        is a suspect at once: our own call there may have ended, or not know it yet."""
        reason = lease.replica.failure(error)
        if isinstance(reason, Unavailable):
            for other in self._leases:
                if other is not lease and other.stage.kind == reason.origin:
                    other.replica.doubt()
        return reason

    async def again(self, error: StageError) -> bool:
        """Whether the request, which ended with `error` before it had any output, is to be tried once more: if a
        replica of it was lost or takes no more requests, and there is another. Called when the leases have ended.
        """
        suspects = [lease for lease in self._leases if lease.suspect]
        if self._retried or not isinstance(error, LOST) or not _replaceable(suspects):
            return False
        # Which of the others drain is asked, not guessed: this request is not tried a third time.
        with suppress(TimeoutError):
            async with asyncio.timeout(_CHECK_TIMEOUT_S):
                await asyncio.gather(*(stage.check(_CHECK_TIMEOUT_S) for stage in self._stages))
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
    """Whether another replica serves the stage of one of `leases`."""
    return any(
        replica.serving and replica is not lease.replica
        for lease in leases
        for replica in lease.stage.replicas.values()
    )
