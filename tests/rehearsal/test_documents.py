"""Figures in documents that come from the rehearsal."""

from pathlib import Path

from tests.rehearsal.support.speed import table

DOCUMENT = Path(__file__).parents[2] / "docs" / "gpus.md"


def test_the_table_of_computed_speed_is_what_was_recorded():
    rows = table()
    assert "\n".join(rows) in DOCUMENT.read_text(), "docs/gpus.md needs:\n" + "\n".join(rows)
