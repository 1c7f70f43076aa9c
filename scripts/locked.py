"""Prints the lines of requirements.lock for some sets: `python scripts/locked.py base talker [--without NAME]...`.

A set is an extra of pyproject.toml, or one in the lock's first lines. The output is for `pip install --no-deps
--require-hashes -r FILE`.
"""

from __future__ import annotations  # an older Python is to say that it is too old

import re
import sys
from argparse import ArgumentParser
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

LOCK = Path(__file__).resolve().parent.parent / "requirements.lock"
_ENTRY = re.compile(r"^(?P<name>[a-z0-9-]+)==(?P<version>\S+).*(?:\n .*)*?\n    # of: (?P<sets>.*)\n", re.MULTILINE)


@dataclass(frozen=True)
class LockedPackage:
    """One package: its lines, for pip, and its sets."""

    name: str
    version: str
    sets: frozenset[str]
    lines: str


def read(lock: Path = LOCK) -> list[LockedPackage]:
    """All packages of the lock; one may have several versions, with markers."""
    found = _ENTRY.finditer(lock.read_text())
    return [LockedPackage(each["name"], each["version"], frozenset(each["sets"].split()), each[0]) for each in found]


def select(
    packages: Sequence[LockedPackage], sets: Sequence[str], without: Sequence[str] = ()
) -> Iterator[LockedPackage]:
    """The packages of any of `sets`. Raises ValueError: there is no such set."""
    known = frozenset[str]().union(*(each.sets for each in packages))
    for name in sets:
        if name not in known:
            raise ValueError(f"{name}: no such set; there are {', '.join(sorted(known))}")
    return (each for each in packages if each.sets.intersection(sets) and each.name not in without)


def main() -> None:
    parser = ArgumentParser(description="Prints the lines of requirements.lock for some sets.")
    parser.add_argument("sets", nargs="+", metavar="SET")
    parser.add_argument("--without", action="append", default=[], metavar="NAME", help="a package to leave out")
    flags = parser.parse_args()
    try:
        print("".join(each.lines for each in select(read(), flags.sets, flags.without)), end="")
    except ValueError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
