"""Kernels and bytes of captured steps, as they were when somebody looked at them last.

Any other number of kernels fails, and more than a hundredth of the bytes. What is meant to change is recorded anew by
QUARTET_RECORD_GOLDENS=1, without -n.
"""

import json
import os
from pathlib import Path

from tests.rehearsal.support.ledger import Work

FILE = Path(__file__).parents[1] / "goldens.json"
TOLERANCES = {"kernels": 0.0, "megabytes": 0.01}
RECORDS = bool(os.environ.get("QUARTET_RECORD_GOLDENS"))


def check(name: str, work: Work) -> None:
    """Compares `work` with what is recorded under `name`."""
    recorded = json.loads(FILE.read_text()) if FILE.exists() else {}
    now = {"kernels": work.kernels, "megabytes": round(work.bytes / 1e6, 1), "operators": _sorted(work)}
    if RECORDS:
        FILE.write_text(json.dumps(dict(sorted((recorded | {name: now}).items())), indent=1) + "\n")
        return
    assert name in recorded, f"{name}: {now} is not recorded"
    before = recorded[name]
    for figure, tolerance in TOLERANCES.items():
        was, became = before[figure], now[figure]
        assert abs(became - was) <= tolerance * was, f"{name}: {was} {figure} became {became}; {_changed(before, now)}"


def _sorted(work: Work) -> dict[str, int]:
    return dict(sorted(work.operators.items(), key=lambda item: (-item[1], item[0])))


def _changed(before: dict, now: dict) -> dict[str, int]:
    """Kernels more, by operator."""
    old, new = before["operators"], now["operators"]
    changes = {name: new.get(name, 0) - old.get(name, 0) for name in {*old, *new}}
    return {name: change for name, change in changes.items() if change}
