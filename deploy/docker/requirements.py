"""Prints the packages of pyproject.toml that an image needs, one a line: `python requirements.py EXTRA...`.

EXTRA is one of the project's extras, or `build` for what building its wheel needs. An image installs these before it
has any code, so that a change of the code does not install them again.
"""

import sys
import tomllib


def requirements(*extras: str) -> list[str]:
    """Requirements of `extras` together with the project's own. Raises SystemExit for an unknown extra."""
    with open("pyproject.toml", "rb") as file:
        project = tomllib.load(file)
    if extras == ("build",):
        return project["build-system"]["requires"]
    known = project["project"]["optional-dependencies"]
    for extra in extras:
        if extra not in known:
            sys.exit(f"{extra}: no such extra in pyproject.toml; use build or some of {', '.join(known)}")
    return [*project["project"]["dependencies"], *(each for extra in extras for each in known[extra])]


if __name__ == "__main__":
    print("\n".join(requirements(*sys.argv[1:])))
