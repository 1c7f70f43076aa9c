"""What is used of the limits of a key."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class KeyUsage:
    """The use of one key.

    Attributes:
        running: requests.
        sessions: that are open.
        admitted: requests by the whole second of this machine's clock in which they came; in seconds to come are those
            that are owed.
    """

    running: int = 0
    sessions: int = 0
    admitted: Mapping[int, int] = field(default_factory=dict)

    def since(self, second: int) -> "KeyUsage":
        admitted = {at: requests for at, requests in self.admitted.items() if at >= second}
        return KeyUsage(self.running, self.sessions, admitted)


def total(usages: Iterable[KeyUsage]) -> KeyUsage:
    running, sessions, admitted = 0, 0, Counter[int]()
    for usage in usages:
        running, sessions = running + usage.running, sessions + usage.sessions
        admitted.update(usage.admitted)
    return KeyUsage(running, sessions, dict(admitted))
