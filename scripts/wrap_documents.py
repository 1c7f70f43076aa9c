"""Wraps the documents' text at 120 columns: python scripts/wrap_documents.py [--check] [FILE.md ...]

With --check it names the pages that it would change, changes none, and fails if there are any.
Only paragraphs and list items with a longer line change. Tables, code and headings stay.
"""

import re
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
COLUMNS = 120
_GLUE = "\N{NO-BREAK SPACE}"
_ITEM = re.compile(r"( *)([-*+]|\d+\.)( +)\S")
_FIXED = re.compile(r" *(\||#|<|>|```|$)")  # a row, a heading, HTML, a quotation, a fence, an empty line
_STARTS_A_BLOCK = re.compile(r"(?:[-*+]|\d+\.|#+|\|)$")


def documents() -> list[Path]:
    """Every page of the repository."""
    folders = ("docs", "deploy", "examples", "benchmarks", "services", "training", "tests")
    return sorted([*ROOT.glob("*.md"), *(page for folder in folders for page in (ROOT / folder).rglob("*.md"))])


def wrapped(text: str) -> str:
    """The text, with no line of a paragraph longer than `COLUMNS`, if its words allow."""
    lines: list[str] = []
    for block, is_text in _blocks(text.split("\n")):
        lines += _wrap(block) if is_text else block
    return "\n".join(lines)


def _blocks(lines: list[str]) -> Iterator[tuple[list[str], bool]]:
    """Paragraphs and list items, which are text; each line of anything else alone."""
    block: list[str] = []
    fenced = False
    for line in lines:
        is_fence = line.lstrip().startswith("```")
        is_fixed = fenced or is_fence or _FIXED.match(line) is not None
        if block and (is_fixed or _ITEM.match(line)):
            yield block, True
            block = []
        if is_fixed:
            yield [line], False
        else:
            block.append(line)
        fenced ^= is_fence
    if block:
        yield block, True


def _wrap(block: list[str]) -> list[str]:
    if all(len(line) <= COLUMNS for line in block):
        return block
    indent = re.match(r" *", block[0])
    item = _ITEM.match(block[0])
    assert indent
    first = item[0][:-1] if item else indent[0]
    rest = " " * len(first)
    words = " ".join(line.strip() for line in block)[len(first.strip()) :].strip()
    whole = re.sub(r"`[^`]*`", lambda code: code[0].replace(" ", _GLUE), words)
    lines = textwrap.wrap(
        whole, COLUMNS, initial_indent=first, subsequent_indent=rest, break_long_words=False, break_on_hyphens=False
    )
    if any(_STARTS_A_BLOCK.match(line.split(" ")[len(rest)]) for line in lines[1:] if len(line) > len(rest)):
        return block  # a word that would begin a list: for a person to wrap
    return [line.replace(_GLUE, " ") for line in lines]


def main(arguments: list[str]) -> None:
    """Wraps the named pages, or all of them; or checks them."""
    names = [name for name in arguments if name != "--check"]
    pages = {page: page.read_text() for page in (map(Path, names) if names else documents())}
    changed = {page: new for page, text in pages.items() if (new := wrapped(text)) != text}
    if "--check" in arguments:
        sys.exit("\n".join(f"{page}: lines to wrap; run `make format`" for page in changed) or 0)
    for page, text in changed.items():
        page.write_text(text)


if __name__ == "__main__":
    main(sys.argv[1:])
