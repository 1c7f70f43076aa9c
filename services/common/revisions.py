"""A model of the hub at a revision, a commit, a branch or a tag, is one name: OWNER/NAME@REVISION."""

import re
from pathlib import Path

_REVISION = re.compile(r"[A-Za-z0-9][\w./-]{0,255}")


def pinned(model: str, revision: str | None) -> str:
    """`model` at `revision`; None: as it is. Raises ValueError: it can have none, or has another."""
    if revision is None or model.endswith(f"@{revision}"):
        return model
    if Path(model).is_dir():
        raise ValueError(f"a directory has no revisions: leave it out, or give a model of the hub instead of {model}")
    if "@" in model:
        raise ValueError(f"{model} names one already: leave it out")
    if not _REVISION.fullmatch(revision):
        raise ValueError(f"{revision!r} is no commit, branch or tag")
    return f"{model}@{revision}"


def parted(model: str) -> tuple[str, str | None]:
    """(Name, revision) of a model of the hub; None: its newest commit."""
    name, _, revision = model.partition("@")
    return name, revision or None
