"""Prints the packages of pyproject.toml that an image needs, one a line: `python requirements.py EXTRA`.

EXTRA is one of the project's extras, or `build` for what building its wheel needs. An image installs these before it
has any code, so that a change of the code does not install them again.
"""

import sys
import tomllib


def requirements(extra: str) -> list[str]:
    """Requirements of `extra` together with the project's own. Raises SystemExit for an unknown extra."""
    with open("pyproject.toml", "rb") as file:
        project = tomllib.load(file)
    if extra == "build":
        return project["build-system"]["requires"]
    extras = project["project"]["optional-dependencies"]
    if extra not in extras:
        sys.exit(f"{extra}: no such extra in pyproject.toml; use build or one of {', '.join(extras)}")
    return [*project["project"]["dependencies"], *extras[extra]]


if __name__ == "__main__":
    print("\n".join(requirements(sys.argv[1])))
