"""Blocks of code in the documents, and the commands of their shell blocks."""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [
    *sorted(ROOT.glob("*.md")),
    *sorted(ROOT.glob("docs/**/*.md")),
    *sorted(ROOT.glob("deploy/**/*.md")),
    *sorted(ROOT.glob("examples/*.md")),
]
SHELL = ("sh", "bash", "console")
URL = "http://127.0.0.1:8000"  # of every gateway in the documents
_FENCE = re.compile(r"^( *)```(\w*)[^\n]*\n(.*?)^ *```", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    """A block of code: `where` is FILE:LINE."""

    where: str
    language: str
    text: str


@dataclass(frozen=True)
class Command:
    """One program that a shell block starts.

    Attributes:
        where: FILE:LINE of its block.
        words: the program, without `.venv/bin/`, and its arguments; what is set before it and where its output goes
            is left out.
        text: the lines that it is from, as they are written.
        stdin: the text that `<<<` gives it.
    """

    where: str
    words: tuple[str, ...]
    text: str
    stdin: str = ""

    @property
    def page(self) -> str:
        """The file."""
        return self.where.partition(":")[0]

    def __str__(self) -> str:
        return f"{self.where} {shlex.join(self.words)}"


def blocks(*languages: str, pages: list[Path] | None = None) -> Iterator[Block]:
    """All blocks of the documents in one of these languages; of any, if none is named."""
    for page in pages or PAGES:
        text = page.read_text()
        for found in _FENCE.finditer(text):
            if found[2] in languages or not languages:
                line = text.count("\n", 0, found.start()) + 1
                yield Block(f"{page.relative_to(ROOT)}:{line}", found[2], found[3])


def commands(*pages: str) -> list[Command]:
    """All commands of the documents, or of these pages, in their order."""
    named = [ROOT / page for page in pages]
    return [each for block in blocks(*SHELL, pages=named) for each in commands_of(block)]


def commands_of(block: Block) -> Iterator[Command]:
    """The commands of a shell block. A loop is one command, `for`, with its text as the argument."""
    for text in _whole(block.text):
        if text.startswith("for "):
            yield Command(block.where, ("for", text), text)
        else:
            yield from _simple(block.where, text)


def _whole(text: str) -> Iterator[str]:
    """Lines, joined as far as quotes, backslashes and loops go on."""
    held = ""
    for line in text.splitlines():
        held += line.removeprefix("$ ") + "\n"
        if not held.strip():
            held = ""
        elif _is_whole(held):
            yield held.strip()
            held = ""
    assert not held, f"this never ends: {held}"


def _is_whole(text: str) -> bool:
    if text.rstrip("\n").endswith("\\") or (text.startswith("for ") and not text.endswith("done\n")):
        return False
    try:
        shlex.split(text, comments=True)
    except ValueError:  # a quote is open
        return False
    return True


def _simple(where: str, text: str) -> Iterator[Command]:
    """The programs of one line, which may be several between `;`, `|`, `&&` and brackets."""
    lexer = shlex.shlex(text.replace("\\\n", " "), posix=True, punctuation_chars="();<>|&")
    lexer.whitespace_split = True
    words: list[str] = []
    stdin, tokens = "", iter([*lexer, ";"])
    for token in tokens:
        if set(token) <= set("<>"):
            target = next(tokens)
            stdin = target if token == "<<<" else stdin
        elif set(token) <= set("();|&"):
            while words and (words[0] in "{}" or re.fullmatch(r"[A-Z_]+=.*", words[0])):
                words.pop(0)
            if words and token != "()":  # else it is the name of a function
                yield Command(where, (words[0].removeprefix(".venv/bin/"), *words[1:]), text, stdin)
            words, stdin = [], ""
        else:
            words.append(token)
