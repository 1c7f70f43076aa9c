"""Who talks, and when: sessions come as a Poisson process, and take turns with silences between them."""

import math
from random import Random
from typing import TYPE_CHECKING

from benchmarks.simulation.turn import Session, Turn

if TYPE_CHECKING:
    from benchmarks.simulation.cell import Cell

_SYSTEM_TOKENS = 50


class Sessions:
    """Args:
        count: sessions at a time, on average; so many are there at the start, in the middle of their conversations.
        realtime: each has a WebSocket with an open microphone; else each turn is a request.

    Attributes:
        now: sessions at present.
    """

    def __init__(self, cell: "Cell", count: int, random: Random, *, realtime: bool) -> None:
        self._cell, self._random, self._realtime = cell, random, realtime
        self.now, self._numbers = 0, 0
        self._per_s = count / (cell.costs.turns * self.period_s)
        for _ in range(count):
            self._begin(self._age())
        if count:
            self._plan_arrival()

    @property
    def period_s(self) -> float:
        """Between two turns of a session, if answers begin at once."""
        costs = self._cell.costs
        return costs.question_s + costs.answer_s + costs.silence_s

    def _age(self) -> int:
        """Turns that a session has had which is found at a random moment."""
        return int(math.log(1 - self._random.random()) / math.log(1 - 1 / max(1.0001, self._cell.costs.turns)))

    def _plan_arrival(self) -> None:
        self._cell.clock.after(self._random.expovariate(self._per_s), self._arrive)

    def _arrive(self) -> None:
        self._begin(0)
        self._plan_arrival()

    def _begin(self, age: int) -> None:
        costs = self._cell.costs
        user = costs.question_s * costs.sound_tokens_per_s + costs.text_tokens
        tokens = _SYSTEM_TOKENS + age * (user + costs.answer_s * costs.tokens_per_s)
        self._numbers += 1
        self.now += 1
        session = Session(self._numbers, tokens, age * user)
        if self._realtime:
            self._connect(session)
        if age:
            self._cell.remember(session)
        wait_s = self._random.random() * self.period_s if age else 0.0
        self._cell.clock.after(wait_s, self._ask, session)

    def _connect(self, session: Session) -> None:
        if session.gateway is not None:
            session.gateway.microphones -= 1
        session.gateway = self._cell.gateway_for_a_connection()
        if session.gateway is not None:
            session.gateway.microphones += 1

    def _ask(self, session: Session) -> None:
        """A question begins, whose length is known at its end only."""
        length_s = self._length(self._cell.costs.question_s)
        self._cell.clock.after(length_s, self._asked, session, length_s)

    def _asked(self, session: Session, length_s: float) -> None:
        if self._realtime and (session.gateway is None or session.gateway.state != "up"):
            self._connect(session)
        self._cell.results.started += 1
        Turn(self._cell, session, length_s, self._length(self._cell.costs.answer_s)).start()

    def answered(self, session: Session, plays_s: float) -> None:
        """An answer has ended, and is heard for `plays_s` more."""
        if self._random.random() < 1 / self._cell.costs.turns:
            self.now -= 1
            if session.gateway is not None:
                session.gateway.microphones -= 1
            return
        silence_s = self._random.expovariate(1 / self._cell.costs.silence_s) if self._cell.costs.silence_s else 0.0
        self._cell.clock.after(plays_s + silence_s, self._ask, session)

    def _length(self, mean_s: float) -> float:
        spread = self._cell.costs.spread
        return self._random.lognormvariate(math.log(mean_s) - spread**2 / 2, spread)
