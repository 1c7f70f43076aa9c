"""Builds `guard.cpp` once on a machine, and loads it once in a process."""

import ctypes
import functools
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from torch.utils.cpp_extension import include_paths, library_paths

from tests.support.kept import kept_folder

SOURCE = Path(__file__).with_name("guard.cpp")
FLAGS = ("-shared", "-fPIC", "-std=c++20")
LIBRARIES = ("-lc10",)  # loaded already, so its path need not be kept


@functools.cache
def load_guard() -> None:
    """Lets torch's CPU build index fake CUDA tensors. Skips the test without a C++ compiler."""
    if torch.version.cuda is not None:
        return
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("needs g++")

    def build(folder: Path) -> None:
        includes = [f"-I{path}" for path in include_paths()]
        places = [f"-L{path}" for path in library_paths()]
        command = [compiler, *FLAGS, *includes, str(SOURCE), *places, *LIBRARIES, "-o", str(folder / "guard.so")]
        subprocess.run(command, check=True)

    ctypes.CDLL(str(kept_folder(build, SOURCE, FLAGS, LIBRARIES) / "guard.so"))
