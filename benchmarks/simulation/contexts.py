"""The contexts in a thinker's KV cache: those of running answers, and others while there is room."""

from collections import OrderedDict


class Contexts:
    """`capacity`: tokens."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._kept = OrderedDict[int, float]()  # the least recently used one first
        self._running = 0.0
        self._held = 0.0

    def cached(self, session: int) -> float:
        """Tokens of the session's context that need not be computed."""
        return self._kept.get(session, 0.0)

    def start(self, session: int, tokens: float) -> bool:
        """Takes room for an answer, whose context will have `tokens`; drops contexts that were used longest ago.

        False: the running ones leave too little."""
        if self._running and self._running + tokens > self._capacity:
            return False
        self._held -= self._kept.pop(session, 0.0)
        self._running += tokens
        while self._kept and self._running + self._held > self._capacity:
            self._held -= self._kept.popitem(last=False)[1]
        return True

    def end(self, session: int, tokens: float, keep: bool = True) -> None:
        """The answer has ended. Its context is kept until the room is needed; not `keep`: it is not complete."""
        self._running -= tokens
        if keep:
            self._held += tokens - self._kept.pop(session, 0.0)
            self._kept[session] = tokens
