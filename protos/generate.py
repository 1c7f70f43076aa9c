"""Generates `quartet/v1/*_pb2.py`, their type stubs and gRPC classes from `protos/quartet/v1/*.proto`.

Called by setup.py on every build and by `make protos`. The output is never edited nor committed.
"""

import subprocess
import sys
from importlib.resources import files
from pathlib import Path


def generate(root: Path) -> None:
    """Writes the stubs below `root`. Raises SystemExit with protoc's exit status if a proto is invalid."""
    protos = sorted((root / "protos" / "quartet" / "v1").glob("*.proto"))
    arguments = [
        f"-I{root / 'protos'}",
        f"-I{files('grpc_tools') / '_proto'}",
        f"--python_out={root}",
        f"--pyi_out={root}",
        f"--grpc_python_out={root}",
        *map(str, protos),
    ]
    done = subprocess.run([sys.executable, "-m", "grpc_tools.protoc", *arguments], check=False)
    if done.returncode:
        raise SystemExit(done.returncode)
    (root / "quartet" / "v1" / "__init__.py").touch()


if __name__ == "__main__":
    generate(Path(__file__).resolve().parent.parent)
