"""Pages that lead through the code name files that exist."""

import re
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
PAGES = [
    ROOT / "docs/a-request-whole.md",
    ROOT / "docs/a-stage-whole.md",
    *ROOT.glob("docs/decisions/*.md"),
    *ROOT.glob("docs/tutorials/*.md"),
    ROOT / "docs/index.md",
    *ROOT.glob("examples/*.md"),
    ROOT / "SECURITY.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "tests/README.md",
]
CODE = r"`((?:services|gateway|cli|protos|tests|examples|docs|scripts|deploy)/[^`\s<>]+\.\w+|\.ci/run)`"


def named(page: Path) -> set[Path]:
    """Files of the repository: those in code, from its root, and those that links go to, from the page."""
    text = page.read_text()
    links = {page.parent / link for link in re.findall(r"\]\(([^)#:]+)\)", text)}
    return {ROOT / path for path in re.findall(CODE, text)} | links


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_file_that_a_page_names_is_there(page: Path) -> None:
    assert {str(file) for file in named(page) if not file.exists()} == set()


def test_the_page_of_a_whole_stage_names_the_file_of_each_step() -> None:
    rows = [line for line in PAGES[0].read_text().splitlines() if re.match(r"\| (?!step|---)", line)]
    assert len(rows) >= 15
    assert [row for row in rows if not re.search(CODE, row.rpartition(" | ")[2])] == []


def test_the_page_of_the_tests_names_fixtures_that_exist() -> None:
    tables = re.findall(r"\| fixture \|.*\n\|[-|]+\n((?:\|.*\n)*)", (ROOT / "tests/README.md").read_text())
    fixtures = set(re.findall(r"^\| `(\w+)` \|", "".join(tables), re.MULTILINE))
    assert len(fixtures) >= 10
    conftests = "".join(path.read_text() for path in ROOT.glob("tests/**/conftest.py"))
    assert fixtures <= set(re.findall(r"^(?:async )?def (\w+)\(", conftests, re.MULTILINE))


def test_every_decision_is_listed() -> None:
    folder = ROOT / "docs/decisions"
    assert named(folder / "README.md") == set(folder.glob("*.md")) - {folder / "README.md"}


def test_the_workflow_runs_the_gate() -> None:
    jobs = yaml.safe_load((ROOT / ".github/workflows/ci.yaml").read_text())["jobs"]
    runs = {name: [step["run"] for step in job["steps"] if "run" in step] for name, job in jobs.items()}
    install = "sudo apt-get update && sudo apt-get install -y --no-install-recommends libnuma1"
    assert runs["gate"] == [install, ".ci/run"]
    assert runs["newest"] == [install, "make test-newest"]
    assert runs["pythons"] == [install, "make test PYTHON=python${{ matrix.python }}"]
