"""What the documents on other people's clients tell to write is what the tested programs do."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# A link to the program, and the code that follows it.
SECTION = re.compile(r"^Program: [^\n]*\(\.\./(tests/clients/\S+)\)\n+```(?:py|js)\n(.*?)^```", re.M | re.S)


@pytest.mark.parametrize(("page", "pattern"), [("realtime-clients", "*_talk.*"), ("message-clients", "anthropic_*.py")])
def test_the_lines_are_those_of_the_programs(page: str, pattern: str) -> None:
    sections = SECTION.findall((ROOT / "docs" / f"{page}.md").read_text())
    programs = sorted(str(file.relative_to(ROOT)) for file in (ROOT / "tests" / "clients").glob(pattern))
    assert sorted(name for name, _ in sections) == programs
    for name, lines in sections:
        program = [line.strip() for line in (ROOT / name).read_text().splitlines()]
        for line in lines.splitlines():
            assert line.strip() in program, f"{name}: {line}"
