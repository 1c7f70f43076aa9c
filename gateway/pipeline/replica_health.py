"""Health, identity and load of a replica."""

import asyncio
import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import grpc
import structlog

from gateway import metrics
from quartet.v1 import server_info_pb2, server_info_pb2_grpc
from services.common.rpc.channels import Channels

# Health checks in a row without an answer before a serving replica counts as down: a busy machine may be late. One
# whose connection is refused or reset is down at once.
LATE_CHECKS = 3
_NOT_CHECKED = "not checked yet"

_choices = itertools.count(1)
Identity = tuple[str, str]  # model, digest of its config

log = structlog.get_logger()


class ReplicaHealth:
    """Health, identity and load of a process that serves a stage.

    Args:
        address: "ip:port", for other stages too.
        server_name: name in its certificate; "" is the address's host.
        on_change: called when health or identity has changed.

    Attributes:
        health: "SERVING", or the reason, for people.
        refusal: why it gets no requests although it is healthy.
        info: None until it was found serving.
        down_since: `time.monotonic()`; None while it serves.
        running, queued: its requests at the last check.
        kv_cache_usage: 0 to 1.
        of_others: requests of other gateways at the last check.
        in_flight: requests of this gateway.
        last_chosen: number of its last request, counted over all replicas.
        idle: set while there are none.
        faults: calls that ended because it is gone, or takes no requests.
    """

    def __init__(
        self, stage: str, kind: str, address: str, server_name: str, channels: Channels, on_change: Callable[[], None]
    ) -> None:
        self.stage, self.kind, self.address, self.server_name = stage, kind, address, server_name
        self.health = _NOT_CHECKED
        self.refusal: str | None = None
        self.info: server_info_pb2.GetServerInfoResponse | None = None
        self.down_since: float | None = time.monotonic()
        self.running = self.queued = self.in_flight = self.last_chosen = self.faults = 0
        self.kv_cache_usage = 0.0
        self.of_others = self._losses = self._revision = self._late = 0
        self._channels, self._on_change = channels, on_change
        self._check_now, self.idle = asyncio.Event(), asyncio.Event()
        self.idle.set()

    @property
    def channel(self) -> grpc.aio.Channel:
        return self._channels.channel(self.address, self.server_name)

    @property
    def identity(self) -> Identity | None:
        """What all replicas of a stage must share."""
        return (self.info.model, self.info.config_digest) if self.info else None

    @property
    def loras(self) -> dict[str, str]:
        return {lora.name: lora.digest for lora in self.info.thinker.loras} if self.info else {}

    @property
    def healthy(self) -> bool:
        return self.health == "SERVING"

    @property
    def was_checked(self) -> bool:
        return self.health != _NOT_CHECKED

    @property
    def serving(self) -> bool:
        return self.healthy and self.refusal is None

    @property
    def state(self) -> str:
        """ "SERVING", or why it gets no requests."""
        return self.refusal if self.healthy and self.refusal else self.health

    @property
    def load(self) -> int:
        """Requests of other gateways at the last check, and of this gateway now."""
        return self.of_others + self.in_flight

    @contextmanager
    def request(self) -> Iterator[None]:
        """Counts a request of this gateway while the context lasts."""
        self.in_flight += 1
        self.last_chosen = next(_choices)
        self.idle.clear()
        metrics.CHOSEN.labels(self.stage, self.address).inc()
        try:
            yield
        finally:
            self.in_flight -= 1
            if not self.in_flight:
                self.idle.set()

    def doubt(self) -> None:
        """Has it checked at once."""
        self.faults += 1
        self._check_now.set()

    def lose(self, reason: str) -> None:
        """Marks it down until a check finds it serving."""
        self._losses += 1
        self._set_health(f"lost: {reason}")

    async def watch(self, interval_s: float, timeout_s: float) -> None:
        while True:
            await self.check(timeout_s)
            with suppress(TimeoutError):
                async with asyncio.timeout(interval_s):
                    await self._check_now.wait()
            self._check_now.clear()

    async def check(self, timeout_s: float) -> None:
        """Requests health, load and, where it may have changed, info."""
        ours_before, losses = self.in_flight, self._losses
        server = server_info_pb2_grpc.ServerInfoServiceStub(self.channel)
        info: server_info_pb2.GetServerInfoResponse | None = None  # not self.info: checks may overtake each other
        was_healthy = self.healthy
        try:
            load = await server.GetLoad(server_info_pb2.GetLoadRequest(), timeout=timeout_s)
            self.take_load(load, ours_before)
            if load.serving and (not was_healthy or self.info is None or load.info_revision != self._revision):
                info = await server.GetServerInfo(server_info_pb2.GetServerInfoRequest(), timeout=timeout_s)
                self._revision = load.info_revision
        except grpc.aio.AioRpcError as error:
            self.check_failed(error.code(), error.details() or "", was_healthy)
        else:
            self.check_answered(load.serving, info, losses)

    @property
    def losses(self) -> int:
        """How often it was lost: a check that began before the last time says nothing."""
        return self._losses

    def take_load(self, load: server_info_pb2.GetLoadResponse, ours_before: int) -> None:
        """Takes the load of an answered check, before which `ours_before` requests of this gateway were there."""
        self.running, self.queued, self.kv_cache_usage = load.running, load.queued, load.kv_cache_usage
        # The replica counts ours too. A request that came or went meanwhile may be on either side of the count.
        self.of_others = max(0, load.running + load.queued - max(ours_before, self.in_flight))
        metrics.LOAD.labels(self.stage, self.address).set(self.load)

    def check_failed(self, code: grpc.StatusCode, details: str, was_healthy: bool) -> None:
        """Takes the end of a check without an answer. `was_healthy`: when the check began."""
        self._late = self._late + 1 if code == grpc.StatusCode.DEADLINE_EXCEEDED else LATE_CHECKS
        if was_healthy and self._late < LATE_CHECKS:
            return
        health = f"{code.name} at {self.address}"
        if self._channels.credentials:  # no other text names what is wrong with a certificate
            health += f" ({details.rpartition('last error: ')[2]})"
        self._set_health(health)

    def check_answered(
        self, serving: bool, info: server_info_pb2.GetServerInfoResponse | None, losses_before: int
    ) -> None:
        """Takes the end of an answered check, before which the replica had been lost `losses_before` times."""
        self._late = 0
        if losses_before == self._losses:  # else the answer may be older than the loss, and another check follows
            self._set_health("SERVING" if serving else "NOT_SERVING", info)

    def _set_health(self, health: str, info: server_info_pb2.GetServerInfoResponse | None = None) -> None:
        info = info or self.info
        changed = health != self.health or info != self.info
        if health != self.health:
            log.info("stage state", name=self.stage, address=self.address, state=health, before=self.health)
        self.health, self.info = health, info
        if self.healthy:
            self.down_since = None
        elif self.down_since is None:
            self.down_since = time.monotonic()
        if changed or self.refusal:
            self._on_change()
