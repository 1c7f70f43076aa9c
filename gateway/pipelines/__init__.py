"""The pipeline files that come with Quartet, as YAML in this folder."""

from pathlib import Path

SHIPPED = Path(__file__).parent


def pipeline_file(named: Path) -> Path:
    """The pipeline file that a user names: a path, or where there is no such file the name of a shipped one."""
    shipped = SHIPPED / named.with_suffix(".yaml").name
    return shipped if named.parent == Path() and not named.exists() and shipped.is_file() else named
