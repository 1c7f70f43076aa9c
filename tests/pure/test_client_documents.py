"""What docs/realtime-clients.md tells to write is what the tested programs do."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
# A link to the program, and the code that follows it.
SECTION = re.compile(r"^Program: [^\n]*\(\.\./(tests/clients/\S+)\)\n+```(?:py|js)\n(.*?)^```", re.M | re.S)


def test_the_lines_are_those_of_the_programs() -> None:
    sections = SECTION.findall((ROOT / "docs" / "realtime-clients.md").read_text())
    programs = sorted(str(file.relative_to(ROOT)) for file in (ROOT / "tests" / "clients").glob("*_talk.*"))
    assert sorted(name for name, _ in sections) == programs
    for name, lines in sections:
        program = [line.strip() for line in (ROOT / name).read_text().splitlines()]
        for line in lines.splitlines():
            assert line.strip() in program, f"{name}: {line}"
