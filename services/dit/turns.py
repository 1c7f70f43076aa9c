"""Whether outputs of a pipeline can be made in turns and share steps: looked at once, at the start."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future

import torch

from services.common.errors import InternalError, StageError
from services.diffusion.request import OutputSpec
from services.dit.learning import MadeCall
from services.dit.output import Done, Event, Failed, Output

TIMEOUT_S = 1800.0

TakeTurns = Callable[[Sequence[Output]], Sequence[MadeCall]]
"""Makes outputs, each a call in its turn. Returns the calls."""
Learn = Callable[[Sequence[MadeCall], Sequence[MadeCall]], bool]
"""Is told of the calls of two outputs that may take turns. Returns whether it wants those of others."""


class TurnsCheck:
    """Makes outputs alone, then in turns, and compares.

    Args:
        specs: of two outputs of different prompts and numbers of steps, the least first: so that one ends in the middle
            of the next.
        like: of an output as the second one, but with a prompt as long as the first one's. It is made if what the
            calls of those two need to be joined is not learned.
    """

    def __init__(self, specs: Sequence[OutputSpec], like: OutputSpec | None = None) -> None:
        self._specs, self._like = specs, like
        self._result: Future[str] = Future()

    def reason(self) -> str:
        """Why outputs are to be made one at a time; empty: they need not. Waits; raises what ended the check."""
        return self._result.result(TIMEOUT_S)

    def run(self, take_turns: TakeTurns, learn: Learn) -> None:
        """In the engine's thread."""
        try:
            self._result.set_result(self._compare(take_turns, learn))
        except Exception as error:
            self._result.set_exception(error)

    def _compare(self, take_turns: TakeTurns, learn: Learn) -> str:
        made = [_make(take_turns, [spec]) for spec in self._specs]
        alone = [values for (values,), _ in made]
        try:
            if _equal(_make(take_turns, self._specs)[0], alone):
                (_, some), (_, others) = made
                if learn(some, others) and self._like is not None:
                    learn(some, _make(take_turns, [self._like])[1])
                return ""
            reason = "two outputs made in turns are others than alone: the pipeline changes its models during a call"
        except StageError:  # the engine has logged it
            reason = "two outputs made in turns fail, and none alone: the pipeline changes its models during a call"
        if not _equal(_make(take_turns, self._specs[:1])[0], alone[:1]):
            raise ValueError("the pipeline is not served: an output is another one after others, so it keeps something")
        return reason


def _make(take_turns: TakeTurns, specs: Sequence[OutputSpec]) -> tuple[list[torch.Tensor], Sequence[MadeCall]]:
    """The values of each result, and the calls. Raises StageError."""
    events: list[list[Event]] = [[] for _ in specs]
    calls = take_turns([Output(spec, own.append) for spec, own in zip(specs, events, strict=True)])
    made = []
    for *_, last in events:
        if isinstance(last, Failed):
            raise last.error
        if not isinstance(last, Done):
            raise InternalError("the engine lost an output")
        values = last.data.flatten()
        made.append(values if last.soundtrack is None else torch.cat([values.float(), last.soundtrack.flatten()]))
    return made, calls


def _equal(some: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(some, others, strict=True))
