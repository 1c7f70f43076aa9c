"""What the images are made of: `make sbom` lists it (CycloneDX), `make audit` looks for known faults in it.

Both read requirements.lock, so that no image is needed. The tools are those of requirements-audit.lock.
"""

import subprocess
import sys
import tempfile
from argparse import ArgumentParser
from collections.abc import Iterator, Sequence
from pathlib import Path

from scripts.locked import read, select

OUT = Path(__file__).resolve().parent.parent / "build/sbom"
# By image, its sets of the lock, as deploy/docker/Dockerfile takes them.
IMAGES = {
    "gateway": ("base", "gateway", "otel"),
    "thinker-cpu": ("base", "thinker-cpu", "otel", "torch-cpu"),
    "thinker-cuda": ("base", "thinker-cuda", "otel", "cuda"),
    **{f"{stage}-cpu": ("base", stage, "otel", "torch-cpu") for stage in ("talker", "code2wav", "dit")},
    **{f"{stage}-cuda": ("base", stage, "otel", "cuda") for stage in ("talker", "code2wav", "dit")},
}


def sbom(image: str, requirements: Path) -> Sequence[str]:
    """The command that writes an image's list of packages."""
    OUT.mkdir(parents=True, exist_ok=True)
    form = ["--output-reproducible", "--no-validate", "--of", "JSON", "--output-file", str(OUT / f"{image}.json")]
    return [_tool("cyclonedx-py"), "requirements", *form, str(requirements)]


def audit(image: str, requirements: Path) -> Sequence[str]:
    """The command that fails if a package of an image has a known fault."""
    return [_tool("pip-audit"), "--disable-pip", "--require-hashes", "--requirement", str(requirements)]


def _tool(name: str) -> str:
    return str(Path(sys.executable).with_name(name))


def _requirements(folder: Path) -> Iterator[tuple[str, Path]]:
    """Each image's name and a file of its packages with their hashes."""
    packages = read()
    for image, sets in IMAGES.items():
        file = folder / f"{image}.txt"
        file.write_text("".join(each.lines for each in select(packages, sets)))
        yield image, file


def main() -> None:
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("sbom", "audit"))
    command = {"sbom": sbom, "audit": audit}[parser.parse_args().what]
    with tempfile.TemporaryDirectory() as folder:
        failed = [
            image
            for image, file in _requirements(Path(folder))
            if subprocess.run(command(image, file), check=False).returncode
        ]
    if failed:
        sys.exit(f"failed for the images of {', '.join(failed)}")


if __name__ == "__main__":
    main()
