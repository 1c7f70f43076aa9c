"""Lines of the documents have at most 120 columns, and the program that wraps them changes nothing else."""

from pathlib import Path

import pytest

from scripts.wrap_documents import COLUMNS, ROOT, documents, wrapped

LONG = "word " * 40


@pytest.mark.parametrize("page", documents(), ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_is_wrapped(page: Path) -> None:
    text = page.read_text()
    assert wrapped(text) == text, "run `make format`"


@pytest.mark.parametrize("kept", [f"| {LONG}|", f"```sh\n{LONG}\n```", f"# {LONG}", f"<p>{LONG}</p>", "short\nlines"])
def test_what_is_no_paragraph_stays(kept: str) -> None:
    assert wrapped(kept) == kept


@pytest.mark.parametrize(("first", "rest"), [("", ""), ("- ", "  "), ("  - ", "    "), ("12. ", "    ")])
def test_a_long_line_is_wrapped(first: str, rest: str) -> None:
    lines = wrapped(first + LONG).split("\n")
    assert [line[: len(rest)] for line in lines[1:]] == [rest] * (len(lines) - 1)
    assert max(map(len, lines)) <= COLUMNS
    assert " ".join(lines).split() == (first + LONG).split()


def test_code_stays_on_one_line() -> None:
    code = f"`{'flag ' * 10}`"
    assert code in wrapped(f"{'word ' * 20}{code} {'word ' * 20}")


def test_a_line_does_not_begin_with_what_begins_a_list() -> None:
    dangerous = f"{'word ' * 23}one - {'word ' * 20}"
    assert "\n- " not in wrapped(dangerous)
