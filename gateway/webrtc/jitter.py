"""Puts packets into their order. Nothing waits unless one is missing."""

from collections.abc import Iterator

from aiortc.rtp import RtpPacket

_NUMBERS = 1 << 16  # of packets, then they begin again
_LEAST_WAIT, _MOST_WAIT = 2, 12  # packets
_CALM_PACKETS = 500  # in order: 10 s


class JitterBuffer:
    """Holds packets behind a missing one until that comes, or `wait` packets are held: then it is given up.

    `wait` grows when a packet comes after it was given up, and shrinks while the network is calm: each packet of it
    delays the answer to who speaks by 20 ms after a loss, and only then. No clock is needed: who listens here, unlike a
    loudspeaker, may have the sound at any pace.

    Attributes:
        late: packets that came after they were given up.
    """

    def __init__(self) -> None:
        self.wait, self.late = _LEAST_WAIT, 0
        self._next: int | None = None
        self._held = dict[int, RtpPacket]()
        self._calm = 0

    def add(self, packet: RtpPacket) -> Iterator[RtpPacket]:
        """Yields the packets whose turn it is, in order."""
        number = packet.sequence_number
        if self._next is None:
            self._next = number
        ahead = (number - self._next) % _NUMBERS
        if ahead >= _NUMBERS // 2:
            self._was_late(_NUMBERS - ahead)
            return
        if ahead > _MOST_WAIT * 4:  # the client has begun anew, or was away
            yield from self._flushed()
            self._next = number
        self._held[number] = packet
        while self._held:
            if (due := self._held.pop(self._next, None)) is not None:
                yield due
                self._grow_calm()
            elif len(self._held) < self.wait:
                return
            self._next = (self._next + 1) % _NUMBERS

    def _flushed(self) -> Iterator[RtpPacket]:
        begin = self._next or 0
        for number in sorted(self._held, key=lambda number: (number - begin) % _NUMBERS):
            yield self._held[number]
        self._held.clear()

    def _was_late(self, by: int) -> None:
        self.late += 1
        self._calm = 0
        self.wait = min(max(self.wait + 1, by + len(self._held) + 1), _MOST_WAIT)

    def _grow_calm(self) -> None:
        self._calm += 1
        if self._calm >= _CALM_PACKETS:
            self._calm = 0
            self.wait = max(_LEAST_WAIT, self.wait - 1)
