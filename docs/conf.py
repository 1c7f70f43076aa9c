"""The documents as a site: `make docs`.

The repository's root is the source, so that a link is the same here as on a forge: to a page, to a heading, and to any
other file, of which the site has a copy. With -W each link whose target is not there is an error, and each page that no
list names.
"""

import re
import tomllib
from pathlib import Path

from docutils import nodes
from sphinx.addnodes import pending_xref
from sphinx.application import Sphinx

ROOT = Path(__file__).parent.parent

project, author = "Quartet", "the Quartet developers"
release = version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
root_doc = "docs/index"
include_patterns = [
    *("*.md", "docs/**.md", "deploy/**.md"),
    *(f"{folder}/*.md" for folder in ("examples", "benchmarks", "tests", "tests/clients", "training")),
]
# Hidden folders, what is built, and whatever else lies in a checkout are not even looked into.
_PLACES = {"docs", "deploy", "examples", "benchmarks", "tests", "training"}
exclude_patterns = [
    ".*",
    "docs/_build",
    *(each.name for each in ROOT.iterdir() if each.is_dir() and each.name not in _PLACES),
]

extensions = ["myst_parser"]
myst_heading_anchors = 4  # those that forges give to headings
nitpicky = True

html_theme = "furo"
html_title = f"Quartet {release}"
html_copy_source = False
html_additional_pages = {"index": "to_index.html"}  # the site's address alone leads to docs/index.html
templates_path = ["."]


def lists_of_pages(app: Sphinx, name: str, source: list[str]) -> None:
    """The site's navigation is what pages list: each section of the index, and the decisions."""
    if name == root_doc:
        for section in re.findall(r"^## .*?(?=^## |\Z)", source[0], re.MULTILINE | re.DOTALL):
            title = section.partition("\n")[0].removeprefix("## ")
            source[0] += _toctree(re.findall(r"^(?:-|\d\.) \[[^\]]*\]\(([^)#]+)\.md\)", section, re.MULTILINE), title)
    elif name == "docs/decisions/README":
        source[0] += _toctree(re.findall(r"^\| \[[^\]]*\]\(([^)#]+)\.md\)", source[0], re.MULTILINE), "Decisions")


def _toctree(pages: list[str], title: str) -> str:
    return "\n".join(["\n```{toctree}", ":hidden:", f":caption: {title}", "", *pages, "```\n"])


def folders_are_text(app: Sphinx, document: nodes.document) -> None:
    """A forge shows a folder; the site has none."""
    for link in list(document.findall(pending_xref)):
        if (Path(app.env.doc2path(app.env.docname)).parent / link["reftarget"]).is_dir():
            link.replace_self(link.children)


def setup(app: Sphinx) -> None:
    app.connect("source-read", lists_of_pages)
    app.connect("doctree-read", folders_are_text)
