"""Worker processes of the gateway."""

import json
import os
import socket
from dataclasses import asdict, dataclass
from pathlib import Path

from gateway.settings import GatewaySettings

# Environment variable by which the supervisor gives a process its `Worker`.
VARIABLE = "QUARTET_WORKER"


@dataclass(frozen=True)
class Worker:
    """A worker process.

    Attributes:
        number: from 0.
        count, port: of all workers.
        directory: private; has their sockets, what clients said, and responses that are kept nowhere else.
        counts_directory: private; has what is counted.
        secret: by which workers know each other.
    """

    number: int
    count: int
    port: int
    directory: str
    counts_directory: str
    secret: str

    @classmethod
    def of_this_process(cls) -> "Worker | None":
        identity = os.environ.get(VARIABLE)
        return None if identity is None else cls(**json.loads(identity))

    @property
    def is_first(self) -> bool:
        """Whether it tells other gateways what the keys of all workers use."""
        return self.number == 0

    def settings(self, of_all: GatewaySettings) -> GatewaySettings:
        return of_all.of_one(self.count, Path(self.directory))

    @property
    def environment(self) -> dict[str, str]:
        return os.environ | {VARIABLE: json.dumps(asdict(self))}

    @property
    def shared_file(self) -> Path:
        return Path(self.directory) / "shared.sqlite"

    @property
    def counts_file(self) -> Path:
        return Path(self.counts_directory) / "counts.sqlite"

    @property
    def lock_file(self) -> Path:
        return Path(self.counts_directory) / "turn.lock"

    def socket_of(self, number: int) -> Path:
        """By which other workers reach worker `number`."""
        return Path(self.directory) / f"{number}.sock"

    def listen(self, host: str) -> list[socket.socket]:
        """The shared port, and the socket for other workers."""
        own = self.socket_of(self.number)
        own.unlink(missing_ok=True)  # of the process that had this number before
        local = socket.socket(socket.AF_UNIX)
        local.bind(str(own))
        return [_bound(host, self.port, shared=True), local]


def reserve(host: str, port: int) -> socket.socket:
    """Binds a port that processes of this user may share. Raises OSError: it is taken."""
    with _bound(host, port, shared=False) as free:  # another gateway's port could be shared, too
        port = free.getsockname()[1]
    return _bound(host, port, shared=True)


def _bound(host: str, port: int, *, shared: bool) -> socket.socket:
    (family, kind, protocol, _, address), *_ = socket.getaddrinfo(
        host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )
    bound = socket.socket(family, kind, protocol)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if shared:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    try:
        bound.bind(address)
    except OSError:
        bound.close()
        raise
    return bound
