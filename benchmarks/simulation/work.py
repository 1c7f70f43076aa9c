"""The part of an answer that one engine makes."""

from collections.abc import Callable

from benchmarks.simulation.contexts import Contexts
from benchmarks.simulation.engine import Engine, Work


class _Part(Work):
    """Attributes:
    is_live: it is not cancelled, and has not ended.
    """

    def __init__(self, engine: Engine, positions: float, tokens: float) -> None:
        self.engine, self.positions, self.tokens = engine, positions, tokens
        self.is_live, self.is_started, self._runs = True, False, False

    def take_room(self) -> bool:
        return True

    def run(self) -> None:
        self._runs = True
        self.engine.run(self)

    def end(self) -> None:
        """It ends, or is cancelled; may be called again."""
        if not self.is_live:
            return
        self.is_live = False
        if self._runs:
            self.engine.stop(self)
        if self.is_started:
            self.engine.leave()


class Writing(_Part):
    """A thinker's part: `count` tokens for the session whose context has `tokens` with them.

    Args:
        at: counts of tokens that somebody waits for.
        written: gets each of these, the first token included, as soon as they are there.
    """

    def __init__(
        self,
        engine: Engine,
        contexts: Contexts,
        session: int,
        tokens: float,
        count: int,
        at: list[int],
        written: Callable[[int], None],
    ) -> None:
        super().__init__(engine, tokens - count, tokens)
        self._contexts, self._session, self._count = contexts, session, count
        self._at, self._written = at, written

    def take_room(self) -> bool:
        """What is cached of its context need not be computed."""
        cached = self._contexts.cached(self._session)
        if not self._contexts.start(self._session, self.tokens):
            return False
        self.positions = max(1.0, self.tokens - self._count - cached)
        return True

    def prefilled(self) -> None:
        self.run()
        for count in self._at:
            if count > 1:
                self.engine.when(self, count - 1, lambda count=count: self._made(count))
        self._made(1)

    def _made(self, count: int) -> None:
        if count == self._count:
            self._finish(keep=True)
        self._written(count)

    def end(self) -> None:
        self._finish(keep=False)

    def _finish(self, keep: bool) -> None:
        if self.is_live and self.is_started:
            self._contexts.end(self._session, self.tokens, keep)
        super().end()


class Speaking(_Part):
    """A talker's part: frames up to each of the counts `at`, of which `made` gets the index.

    It makes one frame with each token of the `tokens_in_all`, and then the others. While it waits for text it counts as
    one of the batch."""

    def __init__(
        self,
        engine: Engine,
        positions: float,
        at: list[int],
        tokens_in_all: int,
        made: Callable[[int], None],
    ) -> None:
        super().__init__(engine, positions, positions + at[-1] / 2)
        self._at, self._tokens_in_all, self._made = at, tokens_in_all, made
        self._text, self._index, self._parked = 1, 0, False

    def written(self, tokens: int) -> None:
        self._text = tokens
        if self._parked and self.is_live and self._has_text:
            self._parked = False
            self.engine.when(self, 1, self._reached)  # all frames but the last were made as their tokens came

    @property
    def _has_text(self) -> bool:
        return self._text >= min(self._at[self._index], self._tokens_in_all)

    def prefilled(self) -> None:
        self.run()
        self._go_on(0)

    def _go_on(self, frames: int) -> None:
        if self._has_text:
            self.engine.when(self, self._at[self._index] - frames, self._reached)
        else:
            self._parked = True

    def _reached(self) -> None:
        index, self._index = self._index, self._index + 1
        if self._index == len(self._at):
            self.end()
        else:
            self._go_on(self._at[index])
        self._made(index)
