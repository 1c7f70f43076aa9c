"""Installs torch's CPU build, which the public package index lacks: `python scripts/torch_cpu.py --python
.venv/bin/python`.

pip installs it as configured on this machine, from a mirror or a folder of wheels that has the build; else from
PyTorch's own index, for this one package. TORCH_INDEX names another place, an index or a folder, and no other is used.
Further flags are pip's.
"""

from __future__ import annotations  # an older Python is to say that it is too old

import os
import platform
import subprocess
import sys
from argparse import ArgumentParser
from collections.abc import Sequence
from pathlib import Path

from locked import read, select

INDEX = "https://download.pytorch.org/whl/cpu"


def attempts(folder: Path, flags: Sequence[str]) -> list[list[str]]:
    """Lists arguments of `pip install --no-deps` to try in order; says so if the lock has no hash.

    Args:
        folder: gets a file of requirements.
        flags: of pip, for each of them.
    """
    python = f"{sys.version_info[0]}.{sys.version_info[1]}"
    here = f"python_version == '{python}' and platform_machine == '{platform.machine()}'"
    builds = list(select(read(), ["torch-cpu"]))
    known = [each.lines for each in builds if here in each.lines]
    if not known:
        print(
            f"the lock has no hash of torch {builds[0].version} for {here}: what the index has is taken",
            file=sys.stderr,
        )
    file = folder / "torch.lock"
    file.write_text("".join(known) or f"torch=={builds[0].version}\n")
    wanted = [*flags, "--requirement", str(file)]
    named = os.environ.get("TORCH_INDEX")
    return [[*_only(named), *wanted]] if named else [wanted, [*_only(INDEX), *wanted]]


def remedy() -> str:
    named = os.environ.get("TORCH_INDEX")
    where = f"not in {named}" if named else f"neither where pip looks nor, as far as that is reached, in {INDEX}"
    return f"torch's CPU build is {where}: name an index, or a folder that has its wheel, by TORCH_INDEX"


def _only(place: str) -> list[str]:
    """pip's flags for one index, its address or a folder; or for a folder of wheels."""
    folder = Path(place.removeprefix("file://")).expanduser()
    if folder.is_dir() and any(folder.glob("*.whl")):
        return ["--no-index", "--find-links", str(folder.resolve())]
    return ["--index-url", folder.resolve().as_uri() if folder.is_dir() else place]


def main() -> None:
    parser = ArgumentParser(description="Installs torch's CPU build.", allow_abbrev=False)
    parser.add_argument("--python", default=sys.executable, metavar="FILE", help="of the environment to install into")
    own, flags = parser.parse_known_args()
    pip = [sys.executable, "-m", "pip", "--python", own.python, "install", "--no-deps"]
    for arguments in attempts(Path(os.environ.get("TMPDIR", "/tmp")), flags):
        if subprocess.run([*pip, *arguments], check=False).returncode == 0:
            return
    sys.exit(remedy())


if __name__ == "__main__":
    main()
