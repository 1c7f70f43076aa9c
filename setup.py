"""Generates the gRPC stubs into the package `quartet.v1` whenever the project is built or installed."""

import sys
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).parent
sys.path.insert(0, str(ROOT / "protos"))

from generate import generate  # noqa: E402


class BuildWithStubs(build_py):
    def run(self) -> None:
        generate(ROOT)
        super().run()


if __name__ == "__main__":
    generate(ROOT)  # before packages are looked up
    setup(cmdclass={"build_py": BuildWithStubs})
