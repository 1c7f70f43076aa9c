"""A stage of the pipeline: its replicas, their identity, and the choice of one for a request."""

import asyncio
import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import structlog

from gateway import metrics
from gateway.pipeline import balance
from gateway.pipeline.addresses import NameWatcher, Resolver, endpoints, resolve_host
from gateway.pipeline.config import StageConfig
from gateway.pipeline.kinds import KINDS
from gateway.pipeline.replica import Replica
from gateway.pipeline.replica_health import Identity
from gateway.tasks import cancel
from quartet.v1 import server_info_pb2
from services.common.errors import InternalError, Unavailable
from services.common.rpc.channels import Channels

# A replica that is down decides the identity of the others for so long: it may only be restarting.
HOLD_S = 30.0
_READS_NO_TEXT = (
    "refused: its talker speaks what its own thinker writes only, and the pipeline file says `reads: text`; "
    "start a talker that reads text (reads_text in its info)"
)

log = structlog.get_logger()


def mark_incompatible(
    replicas: Sequence[Replica], before: Identity | None, sources: Sequence[Replica], *, reads_text: bool = False
) -> Identity | None:
    """Sets each replica's `refusal`, and returns the stage's new identity.

    The identity `before` stays until no replica with it serves, or was lost less than HOLD_S ago. The most frequent one
    follows. `sources` are replicas whose checkpoint the stage must have. `reads_text`: its talkers must."""
    for replica in replicas:
        replica.refusal = next(filter(None, (_misfit(replica, source) for source in sources)), None)
        if reads_text and replica.info and not replica.info.talker.reads_text:
            replica.refusal = _READS_NO_TEXT
    fitting = {replica: replica.identity for replica in replicas if replica.identity and replica.refusal is None}
    if before not in [theirs for replica, theirs in fitting.items() if _counts(replica)]:
        healthy = [theirs for replica, theirs in fitting.items() if replica.healthy]
        before = max(healthy, key=healthy.count, default=before)
    for replica, theirs in fitting.items():
        if before and theirs != before:
            replica.refusal = _difference(theirs, before)
    return before


def _counts(replica: Replica) -> bool:
    return replica.down_since is None or time.monotonic() - replica.down_since < HOLD_S


def _misfit(replica: Replica, source: Replica) -> str | None:
    if source.info is None or replica.info is None:
        return None
    ours, theirs = replica.info.checkpoint_digest, source.info.checkpoint_digest
    if not ours or not theirs or ours == theirs:
        return None
    return (
        f"refused: it serves another checkpoint (config {ours}) than stage {source.stage}, which it reads from "
        f"(config {theirs}); start both with one model"
    )


def _difference(theirs: Identity, ours: Identity) -> str:
    if theirs[0] != ours[0]:
        what = f"it serves the model {theirs[0]!r}, the stage's other replicas {ours[0]!r}"
    else:
        what = (
            f"its config digest is {theirs[1] or 'missing'}, that of the stage's other replicas {ours[1] or 'missing'}"
        )
    return f"refused: {what}; start all replicas of a stage with one checkpoint and the same settings"


class Stage:
    """A stage's replicas.

    Attributes:
        replicas: by address.
        info: of its replicas; None until one was found serving.
        settled: set when `is_settled` was first true.
        sources, readers: stages whose streams it reads, and that read its own.
        reads_text: the gateway brings it the text of another stage.
    """

    def __init__(
        self,
        name: str,
        config: StageConfig,
        resolver: Resolver = resolve_host,
        channels: Channels | None = None,
    ) -> None:
        self.name, self.kind = name, config.kind
        self.reads_text = config.kind == "talker" and config.reads == "text"
        self.replicas: dict[str, Replica] = {}
        self.info: server_info_pb2.GetServerInfoResponse | None = None
        self.settled = asyncio.Event()
        self.sources: list[Stage] = []
        self.readers: list[Stage] = []
        self._channels = channels or Channels()
        self._identity: Identity | None = None
        self._leaving: dict[str, tuple[Replica, asyncio.Task[None]]] = {}
        self._watches: dict[str, asyncio.Task[None]] = {}
        self._timing: tuple[float, float] | None = None
        self._names = NameWatcher(name, endpoints(config.address), self._set_addresses, resolver)

    @property
    def serving(self) -> bool:
        return any(replica.serving for replica in self.replicas.values())

    @property
    def is_settled(self) -> bool:
        """Whether a replica serves, or all names and replicas were checked."""
        checked = self._names.is_settled and all(replica.was_checked for replica in self.replicas.values())
        return self.serving or checked

    @property
    def state(self) -> str:
        """ "SERVING", or why no replica serves, for people."""
        states = {address: replica.state for address, replica in self.replicas.items()}
        if "SERVING" in states.values():
            return "SERVING"
        if len(states) == 1:
            return next(iter(states.values()))
        if states:
            return "; ".join(f"{address}: {state}" for address, state in states.items())
        return "; ".join(f"{host}: {why}" for host, why in self._names.errors.items()) or "not resolved yet"

    def require_serving(self) -> None:
        if not self.serving:
            raise self.unavailable()

    def unavailable(self) -> Unavailable:
        error = Unavailable(f"the {self.kind} is not serving")
        error.origin, error.detail = self.kind, f"stage {self.name}: {self.state}"
        return error

    def fault(self, what: str) -> InternalError:
        """The error of a stage that broke the contract. `what` completes "stage NAME ..."."""
        error = InternalError(f"stage {self.name} {what}")
        error.origin = self.kind
        return error

    @property
    def loras(self) -> dict[str, str]:
        """Digests of adapters at serving replicas, by name; the most frequent one if they differ."""
        found: dict[str, Counter[str]] = {}
        for replica in self.replicas.values():
            for name, digest in replica.loras.items() if replica.serving else ():
                found.setdefault(name, Counter())[digest] += 1
        return {name: digests.most_common(1)[0][0] for name, digests in sorted(found.items())}

    def choose(self, key: bytes | None = None, avoid: Collection[Replica] = (), lora: str = "") -> Replica:
        """The replica for a request; the caller enters its `request()` before it awaits anything.

        Args:
            key: see `balance.rendezvous`.
            avoid: replicas to choose only if there is no other.
            lora: adapter that it must have; "": none.

        Raises:
            Unavailable: no replica serves, or none has the adapter.
        """
        serving = [replica for replica in self.replicas.values() if replica.serving]
        if lora:
            wanted = lora, self.loras.get(lora)
            serving = [replica for replica in serving if wanted in replica.loras.items()]
        if not serving:
            raise self.unavailable()
        serving = [replica for replica in serving if replica not in avoid] or serving
        if key is None or len(serving) == 1:
            return balance.power_of_two(serving)
        chosen = balance.rendezvous(key, serving)
        outcome = "preferred" if chosen is balance.preferred(key, serving) else "diverted"
        metrics.AFFINITY.labels(self.name, outcome).inc()
        return chosen

    async def watch(self, resolve_s: float, interval_s: float, timeout_s: float) -> None:
        """Resolves names and checks replicas, for ever."""
        self._timing = interval_s, timeout_s
        for address in self.replicas:
            self._start_watch(address)
        try:
            await self._names.watch(resolve_s)
            await asyncio.get_running_loop().create_future()  # literal addresses: only the checks go on
        finally:
            await cancel(*self._watches.values(), *(task for _, task in self._leaving.values()))

    async def check(self, timeout_s: float) -> None:
        await asyncio.gather(*(replica.check(timeout_s) for replica in self.replicas.values()))

    def describe_replicas(self) -> list[dict[str, Any]]:
        names = ("address", "state", "running", "queued", "in_flight")
        return [
            {name: getattr(replica, name) for name in names}
            | {"config_digest": replica.info.config_digest if replica.info else ""}
            for replica in self.replicas.values()
        ]

    def _set_addresses(self, addresses: Mapping[str, str]) -> None:
        for address in [known for known in self.replicas if known not in addresses]:
            self._remove(address)
        for address, server_name in addresses.items():
            if address not in self.replicas:
                self._add(address, server_name)
        self._changed()

    def _add(self, address: str, server_name: str) -> None:
        if address in self._leaving:  # back before its last request has ended
            replica, task = self._leaving.pop(address)
            task.cancel()
        else:
            replica = Replica(self.name, self.kind, address, server_name, self._channels, self._changed)
        self.replicas[address] = replica
        if self._timing is not None:
            log.info("replica added", name=self.name, address=address)
            self._start_watch(address)

    def _remove(self, address: str) -> None:
        """Closes the connection when the replica's last request has ended."""
        replica = self.replicas.pop(address)
        log.info("replica removed", name=self.name, address=address, in_flight=replica.in_flight)
        if (watch := self._watches.pop(address, None)) is not None:
            watch.cancel()
        self._leaving[address] = replica, asyncio.create_task(self._close(replica))

    async def _close(self, replica: Replica) -> None:
        await replica.idle.wait()
        del self._leaving[replica.address]
        metrics.forget_replica(self.name, replica.address)
        await self._channels.close(replica.address)

    def _start_watch(self, address: str) -> None:
        assert self._timing is not None
        self._watches[address] = asyncio.create_task(self.replicas[address].watch(*self._timing))

    def _changed(self) -> None:
        """Decides which replicas are refused, here and in the readers."""
        replicas = list(self.replicas.values())
        before = {replica: replica.refusal for replica in replicas}
        shared = self.sources if KINDS[self.kind].shares_checkpoint else ()
        sources = [found for source in shared if (found := source.representative) is not None]
        self._identity = mark_incompatible(replicas, self._identity, sources, reads_text=self.reads_text)
        for replica, refusal in before.items():
            if replica.refusal and replica.refusal != refusal:
                log.error("replica refused", name=self.name, address=replica.address, reason=replica.refusal)
            elif refusal and not replica.refusal:
                log.info("replica accepted", name=self.name, address=replica.address)
        if (serving := self.representative) is not None:
            self.info = serving.info
        states = ["serving" if replica.serving else "refused" if replica.healthy else "down" for replica in replicas]
        for state in ("serving", "refused", "down"):
            metrics.REPLICAS.labels(self.name, state).set(states.count(state))
        if self._timing is not None and self.is_settled:
            self.settled.set()
        for reader in self.readers:
            reader._changed()

    @property
    def representative(self) -> Replica | None:
        """A serving replica, whose info is true of all; None if none serves."""
        return next((replica for replica in self.replicas.values() if replica.serving), None)
