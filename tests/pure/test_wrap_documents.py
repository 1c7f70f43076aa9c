"""The program that wraps the documents changes long lines alone. `make style` checks the documents with it."""

from pathlib import Path

import pytest

from scripts.wrap_documents import COLUMNS, main, wrapped

LONG = "word " * 40


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


def test_a_check_names_the_page_and_leaves_it(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(LONG)
    with pytest.raises(SystemExit, match=r"page\.md"):
        main(["--check", str(page)])
    assert page.read_text() == LONG
    main([str(page)])
    with pytest.raises(SystemExit) as passed:
        main(["--check", str(page)])
    assert passed.value.code == 0
