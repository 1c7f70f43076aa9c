"""Whether outputs of a pipeline can be made in turns: looked at once, at the start, where no test has."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future

import torch

from services.common.errors import InternalError, StageError
from services.diffusion.request import OutputSpec
from services.dit.output import Done, Event, Failed, Output

TIMEOUT_S = 1800.0


class TurnsCheck:
    """Makes outputs alone, then in turns, and compares.

    Args:
        specs: of outputs of different prompts and numbers of steps, the least first: so that one ends in the middle of
            the next.
    """

    def __init__(self, specs: Sequence[OutputSpec]) -> None:
        self._specs = specs
        self._result: Future[str] = Future()

    def reason(self) -> str:
        """Why outputs are to be made one at a time; empty: they need not. Waits; raises what ended the check."""
        return self._result.result(TIMEOUT_S)

    def run(self, take_turns: Callable[[Sequence[Output]], object]) -> None:
        """In the engine's thread."""
        try:
            self._result.set_result(self._compare(take_turns))
        except Exception as error:
            self._result.set_exception(error)

    def _compare(self, take_turns: Callable[[Sequence[Output]], object]) -> str:
        alone = [_make(take_turns, [spec])[0] for spec in self._specs]
        try:
            if _equal(_make(take_turns, self._specs), alone):
                return ""
            reason = "two outputs made in turns are others than alone: the pipeline changes its models during a call"
        except StageError:  # the engine has logged it
            reason = "two outputs made in turns fail, and none alone: the pipeline changes its models during a call"
        if not _equal(_make(take_turns, self._specs[:1]), alone[:1]):
            raise ValueError("the pipeline is not served: an output is another one after others, so it keeps something")
        return reason


def _make(take_turns: Callable[[Sequence[Output]], object], specs: Sequence[OutputSpec]) -> list[torch.Tensor]:
    """The values of each result. Raises StageError."""
    events: list[list[Event]] = [[] for _ in specs]
    take_turns([Output(spec, own.append) for spec, own in zip(specs, events, strict=True)])
    made = []
    for *_, last in events:
        if isinstance(last, Failed):
            raise last.error
        if not isinstance(last, Done):
            raise InternalError("the engine lost an output")
        values = last.data.flatten()
        made.append(values if last.soundtrack is None else torch.cat([values.float(), last.soundtrack.flatten()]))
    return made


def _equal(some: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(some, others, strict=True))
