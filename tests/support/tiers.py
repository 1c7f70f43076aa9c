"""Parameters of tests by how often they are run."""

from collections.abc import Collection, Iterable

import pytest


def tiered(names: Iterable[str], quick: str, of_the_gate: Collection[str]) -> list[object]:
    """`quick` is for make test, `of_the_gate` for make test-long, the others are for make test-weekly."""

    def marks(name: str) -> tuple[pytest.MarkDecorator, ...]:
        if name == quick:
            return ()
        return (pytest.mark.long,) if name in of_the_gate else (pytest.mark.weekly,)

    return [pytest.param(name, marks=marks(name)) for name in names]
