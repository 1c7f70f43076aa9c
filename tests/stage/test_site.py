"""`make docs`, which `make lint` runs: links that lead nowhere are errors, and pages that nobody finds."""

import re
import shutil
import subprocess
import sys
from pathlib import Path
from urllib.parse import urlsplit

from tests.support.documents import PAGES, ROOT

# A page with one fault each, and what is said of it.
FAULTS = {
    "[a](other.md)": "cross-reference target not found: 'other.md'",
    "[a](good.md#no-heading)": "local id not found in doc 'docs/good': 'no-heading'",
    "[a](#no-heading)": "target not found.*no-heading",
    "[a](../services/nothing.py)": "cross-reference target not found: '../services/nothing.py'",
    "![a](nothing.svg)": "image file not readable: docs/nothing.svg",
}


def test_what_leads_nowhere_is_an_error(tmp_path: Path) -> None:
    docs = tmp_path / "docs"
    docs.mkdir()
    for name in ("pyproject.toml", "docs/conf.py", "docs/to_index.html"):
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / "services").mkdir()
    (tmp_path / "services/there.py").touch()
    names = ["good", *(f"fault{i}" for i in range(len(FAULTS)))]
    (docs / "index.md").write_text("# A\n\n## Pages\n\n" + "".join(f"- [{name}]({name}.md)\n" for name in names))
    links = ("good.md#one-heading", "#one-heading", "../services/there.py", "../services", "../README.md")
    (docs / "good.md").write_text("# Good\n\n## One heading\n\n" + " ".join(f"[a]({link})" for link in links))
    (tmp_path / "README.md").write_text("# Nobody finds it\n")
    for i, text in enumerate(FAULTS):
        (docs / f"fault{i}.md").write_text(f"# Fault\n\n{text}\n")
    flags = ("--conf-dir", "docs", "--fail-on-warning", "--keep-going", "--quiet")
    command = [sys.executable, "-m", "sphinx", *flags, ".", "html"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1, done.stderr
    said = re.findall(r"(\w+)\.md(?::\d+)?: WARNING: (.*)", done.stderr)
    assert len(said) == len(FAULTS) + 1, done.stderr
    told = dict(said)
    for i, expected in enumerate(FAULTS.values()):
        assert re.search(expected, told[f"fault{i}"]), done.stderr
    assert "isn't included in any toctree" in told["README"]


def test_the_gate_makes_the_site() -> None:
    makefile = (ROOT / "Makefile").read_text()
    assert re.search(r"^lint:.* docs\b", makefile, re.MULTILINE)
    assert re.search(r"^docs:.*\n\t.*sphinx .*--fail-on-warning", makefile, re.MULTILINE)
    assert "make -j 3 lint environments\n" in (ROOT / ".ci/run").read_text()


def test_links_to_elsewhere_are_whole() -> None:
    """They are not asked for: no test needs the network."""
    found = {link for page in PAGES for link in re.findall(r"\]\((\w+:[^)]*)\)|<(http[^>]*)>", page.read_text())}
    for link in (either or other for either, other in found):
        parts = urlsplit(link)
        assert re.fullmatch(r"[\w.-]+\.[a-z]+(:\d+)?|127\.0\.0\.1:\d+", parts.netloc), link
        assert parts.scheme == "https" or parts.hostname == "127.0.0.1", link
        assert not re.search(r"\s|[.,;]$", link), link
    assert len(found) > 4
