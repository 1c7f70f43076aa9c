"""A long and slow wire between two network namespaces, in user space: for kernels without tc's netem."""

import contextlib
import fcntl
import os
import select
import struct
import subprocess
import threading
import time
from collections import deque
from collections.abc import Iterator

TUN = "/dev/net/tun"
MTU_BYTES = 1500
QUEUE_PACKETS = 1000  # as netem's default; what comes beyond is dropped
_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000


class _Direction:
    """IP packets on their way from one end to the other, in order.

    Args:
        source, target: descriptors of TUN devices.
        delay_s: from the last bit sent until it arrives.
        rate_bps: bits sent a second.
    """

    def __init__(self, source: int, target: int, delay_s: float, rate_bps: float) -> None:
        self.source = source
        self.packets = 0
        self._target, self._delay_s, self._rate_bps = target, delay_s, rate_bps
        self._under_way: deque[tuple[float, float, bytes]] = deque()  # (sent, arrives: time.monotonic(); the packet)
        self._free_at = 0.0

    def take(self) -> None:
        """Reads a packet and puts it on the wire."""
        packet, now = os.read(self.source, 65536), time.monotonic()
        waiting = sum(sent > now for sent, _, _ in self._under_way) if len(self._under_way) > QUEUE_PACKETS else 0
        if waiting < QUEUE_PACKETS:
            self._free_at = max(self._free_at, now) + len(packet) * 8 / self._rate_bps
            self._under_way.append((self._free_at, self._free_at + self._delay_s, packet))

    def deliver(self) -> float | None:
        """Writes what has arrived. Returns in how many seconds the next packet does, None if there is none."""
        while self._under_way:
            _, arrives, packet = self._under_way[0]
            if (left_s := arrives - time.monotonic()) > 0:
                return left_s
            self._under_way.popleft()
            self.packets += 1
            with contextlib.suppress(OSError):  # the device was taken down: packets are lost, as on a real wire
                os.write(self._target, packet)
        return None


@contextlib.contextmanager
def wire(name: str, namespaces: tuple[str, str], delay_s: float, rate_bps: float) -> Iterator[tuple[_Direction, ...]]:
    """Gives each of two namespaces a device `name` (at most 14 characters), up and without an address. What is routed
    to one leaves at the other `delay_s` later, at most `rate_bps` in each direction. Yields both directions."""
    ends: list[int] = []
    try:
        for number, namespace in enumerate(namespaces):
            device = f"{name}{number}"
            ends.append(os.open(TUN, os.O_RDWR))
            fcntl.ioctl(ends[-1], _TUNSETIFF, struct.pack("16sH22x", device.encode(), _IFF_TUN | _IFF_NO_PI))
            run("ip", "link", "set", device, "mtu", str(MTU_BYTES), "netns", namespace, "name", name)
            run("ip", "-n", namespace, "link", "set", name, "up")
        directions = tuple(
            _Direction(source, target, delay_s, rate_bps) for source, target in ((ends[0], ends[1]), (ends[1], ends[0]))
        )
        stop = os.eventfd(0)
        carrier = threading.Thread(target=_carry, args=(directions, stop), daemon=True)
        carrier.start()
        try:
            yield directions
        finally:
            os.eventfd_write(stop, 1)
            carrier.join()
            os.close(stop)
    finally:
        for end in ends:  # the devices go with them
            os.close(end)


def run(*command: str) -> None:
    """Runs a program. Raises OSError with what it said if it failed."""
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise OSError(f"{' '.join(command)}: {done.stderr.strip()}")


def _carry(directions: tuple[_Direction, ...], stop: int) -> None:
    by_source = {direction.source: direction for direction in directions}
    while True:
        waits_s = [left_s for direction in directions if (left_s := direction.deliver()) is not None]
        ready, _, _ = select.select([*by_source, stop], [], [], min(waits_s, default=None))
        if stop in ready:
            return
        for source in ready:
            by_source[source].take()
