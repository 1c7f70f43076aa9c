"""Two network namespaces as two hosts on one machine, with a link between them that can be cut, or made long and slow.

Needs root, iproute2 and a kernel with veth and TUN devices: see `missing`.
"""

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.support.network.wire import TUN, run, wire

LINK = "cable"
# Nobody's: frames to it reach the other host's device, whose kernel drops them without a word.
_NOBODYS_MAC = "02:00:00:00:00:01"


@dataclass(frozen=True)
class Host:
    """A network namespace and a /dev/shm: two hosts share no memory.

    Attributes:
        name: of the namespace.
        address: on the link to the other host; by it the hosts know each other.
        reached_at: its address for the test, on a network of its own that is never cut.
        reached_from: the test's on that network.
    """

    name: str
    address: str
    reached_at: str
    reached_from: str

    def command(self, *command: str) -> list[str]:
        """`command`, to be run on this host; its process id is that of the process started."""
        # `ip netns exec` gives the process mounts of its own.
        mounted = 'mount --bind "$0" /dev/shm && exec "$@"'
        return ["ip", "netns", "exec", self.name, "sh", "-c", mounted, str(self._memory), *command]

    def make(self) -> None:
        """Makes it, with the test's way to it."""
        run("ip", "netns", "add", self.name)
        run("ip", "link", "add", self._device, "type", "veth", "peer", "name", "test", "netns", self.name)
        run("ip", "address", "add", f"{self.reached_from}/30", "dev", self._device)
        run("ip", "-n", self.name, "address", "add", f"{self.reached_at}/30", "dev", "test")
        run("ip", "link", "set", self._device, "up")
        for device in ("lo", "test"):
            run("ip", "-n", self.name, "link", "set", device, "up")
        self._memory.mkdir()
        run("mount", "-t", "tmpfs", "tmpfs", str(self._memory))

    def remove(self) -> None:
        """Removes what there is of it. Its processes must have ended."""
        for command in (
            ["ip", "link", "delete", self._device],  # it would go with the namespace, but later
            ["ip", "netns", "delete", self.name],
            ["umount", str(self._memory)],
        ):
            subprocess.run(command, capture_output=True)
        with contextlib.suppress(FileNotFoundError):
            self._memory.rmdir()

    @property
    def _device(self) -> str:
        return self.name.replace("-", "").replace("quartet", "qt")  # at most 15 characters

    @property
    def _memory(self) -> Path:
        return Path("/run", self.name)


class TwoHosts:
    """Hosts `a` and `b`, and the link between them: an Ethernet of two (veth)."""

    def __init__(self, a: Host, b: Host) -> None:
        self.a, self.b = a, b

    def join(self) -> None:
        """Lays the cable."""
        run("ip", "-n", self.a.name, "link", "add", "name", LINK, "type", "veth", "peer", LINK, "netns", self.b.name)
        for host in (self.a, self.b):
            run("ip", "-n", host.name, "address", "add", f"{host.address}/24", "dev", LINK)
            run("ip", "-n", host.name, "link", "set", LINK, "up")

    @contextlib.contextmanager
    def pulled(self) -> Iterator[None]:
        """The cable is out: b's device is down, a's has no carrier."""
        run("ip", "-n", self.b.name, "link", "set", LINK, "down")
        try:
            yield
        finally:
            run("ip", "-n", self.b.name, "link", "set", LINK, "up")

    @contextlib.contextmanager
    def silent(self) -> Iterator[None]:
        """Every packet is lost, and no device knows: a switch on the way is gone."""
        for host, other in self._directions():
            lost = ["lladdr", _NOBODYS_MAC, "dev", LINK, "nud", "permanent"]
            run("ip", "-n", host.name, "neighbour", "replace", other.address, *lost)
        try:
            yield
        finally:
            for host, other in self._directions():
                run("ip", "-n", host.name, "neighbour", "delete", other.address, "dev", LINK)

    @contextlib.contextmanager
    def far(self, delay_s: float, rate_bps: float) -> Iterator[None]:
        """A packet takes `delay_s` one way, and each direction carries `rate_bps` bits a second. Connections stay."""
        with wire("far", (self.a.name, self.b.name), delay_s, rate_bps) as directions:
            for host, other in self._directions():
                run("ip", "-n", host.name, "route", "add", other.address, "dev", "far", "src", host.address)
            yield  # the routes go with the devices
            assert all(direction.packets for direction in directions), "packets went another way"

    def _directions(self) -> tuple[tuple[Host, Host], ...]:
        return (self.a, self.b), (self.b, self.a)


@contextlib.contextmanager
def two_hosts() -> Iterator[TwoHosts]:
    """Two hosts and their link; removes everything at the end, also after a failure, and what killed tests left."""
    _remove_leftovers()
    hosts = _of(os.getpid())
    try:
        for host in (hosts.a, hosts.b):
            host.make()
        hosts.join()
        yield hosts
    finally:
        for host in (hosts.a, hosts.b):
            host.remove()


def missing() -> str:
    """What this machine lacks to have two hosts; "" if nothing."""
    if os.geteuid() != 0:
        return "needs root, for network namespaces"
    for program in ("ip", "mount"):
        if shutil.which(program) is None:
            return f"needs the program {program}"
    try:
        with two_hosts() as hosts, wire("far", (hosts.a.name, hosts.b.name), 0.001, 1e9):
            for host in (hosts.a, hosts.b):
                run(*host.command("true"))
    except OSError as error:
        return f"needs network namespaces, veth and {TUN}: {error}"
    return ""


def _of(process: int) -> TwoHosts:
    """The hosts of a test's process, made or not."""
    network = 0xC6120000 + process % 2**14 * 8  # in 198.18.0.0/15, which is set aside for tests of networks
    return TwoHosts(
        *(
            Host(f"quartet-{process}-{letter}", f"192.0.2.{number + 1}", _dotted(first + 2), _dotted(first + 1))
            for number, (letter, first) in enumerate(zip("ab", (network, network + 4), strict=True))
        )
    )


def _remove_leftovers() -> None:
    for namespace in Path("/run/netns").glob("quartet-*-a"):
        process = int(namespace.name.split("-")[1])
        if not Path("/proc", str(process)).exists():
            hosts = _of(process)
            hosts.a.remove()
            hosts.b.remove()


def _dotted(address: int) -> str:
    return ".".join(str(byte) for byte in address.to_bytes(4, "big"))
