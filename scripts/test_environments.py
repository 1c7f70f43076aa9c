"""Runs the tests in environments beside .venv: `make test-pythons`, `make test-newest`, `make test-environments`.

pythons: tests/pure on each Python that is named and found, with the lock's versions. Engines are left out.
newest: tests/pure and tests/stage with the newest versions that pyproject.toml's ranges allow. vLLM is left out, as it
fixes the versions of others. Where this fails, a range has to end.
gate: tests/pure once on each Python and once with each set of versions, not on each Python with each set. Python 3.13
has the lock's versions, Python 3.12 the newest ones, both without engines. This Python has the newest ones with
engines: it runs tests/stage, and those modules of tests/pure that need an engine.
make: only installs what gate uses. It takes minutes in which a second core may do something else.
"""

import os
import shutil
import subprocess
import sys
import tomllib
from argparse import ArgumentParser
from collections.abc import Sequence
from pathlib import Path

from locked import read, select

ROOT = Path(__file__).resolve().parent.parent
NO_ENGINE = ("base", "build", "gateway", "webrtc", "otel", "onnx", "dev")
EXTRAS = ("gateway", "webrtc", "otel", "onnx", "dev")
ENGINES = ("talker", "code2wav", "dit", "docs")
LOCKED_PYTHON, NEWEST_PYTHON = "3.13", "3.12"  # of the gate
OF_THE_THINKER = ("torchvision", "msgspec", "pyzmq")  # which its tests need without vLLM, and tests' checkpoints
# They check the repository's files, with no package that differs between environments.
OF_FILES = (
    *("pure/test_k8s_combinations.py", "pure/test_lock.py", "pure/test_named_files.py", "pure/test_names.py"),
    *("pure/test_rooms.py", "stage/test_kubectl.py"),
)
SHOWN = ("torch", "transformers", "diffusers", "fastapi", "grpcio", "numpy", "pydantic")
LISTED = "import importlib.metadata as m; print(*(f'{d.name} {d.version}' for d in m.distributions() if d.name in %r))"


def find_python(version: str) -> str | None:
    """Returns the interpreter of a Python, e.g. "3.12", from the path or pyenv."""
    found = [shutil.which(f"python{version}") or ""]
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    found += sorted(map(str, pyenv.glob(f"versions/{version}.*/bin/python{version}")), reverse=True)
    for candidate in filter(None, found):
        if subprocess.run([candidate, "-c", ""], capture_output=True, check=False).returncode == 0:
            return candidate
    return None


def environment(name: str, python: str) -> str:
    """Makes an empty environment. Returns its Python."""
    folder = ROOT / name
    shutil.rmtree(folder, ignore_errors=True)
    subprocess.run([python, "-m", "venv", str(folder)], check=True)
    return _python_in(name)


def _python_in(name: str) -> str:
    return str(ROOT / name / "bin" / "python")


def pip(python: str, *arguments: str) -> None:
    """Installs quietly. Raises SystemExit."""
    # compiled when imported: most of what is installed is not
    command = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-compile", *arguments]
    if subprocess.run(command, cwd=ROOT, check=False).returncode:
        sys.exit(f"{' '.join(arguments)}: cannot be installed")


def locked(version: str, python: str) -> str:
    """Makes an environment with the lock's versions, without engines. Returns its Python."""
    own = environment(f".venv-{version}", python)
    lock = ROOT / f".venv-{version}" / "packages.lock"
    lock.write_text("".join(each.lines for each in select(read(), NO_ENGINE)))
    pip(own, "--no-deps", "--require-hashes", "--requirement", str(lock))
    return own


def newest(name: str, python: str, *engines: str) -> str:
    """Makes an environment with the newest versions. Returns its Python."""
    own = environment(name, python)
    if engines:
        torch = [sys.executable, str(ROOT / "scripts" / "torch_cpu.py"), "--python", own, "--quiet", "--no-compile"]
        subprocess.run(torch, check=True)
    required = tomllib.loads((ROOT / "pyproject.toml").read_text())
    extras = required["project"]["optional-dependencies"]
    ranges = [*required["build-system"]["requires"], *required["project"]["dependencies"]]
    ranges += [line for extra in (*EXTRAS, *engines) for line in extras[extra]]
    (ROOT / name / "ranges.txt").write_text("\n".join(ranges))
    pip(own, "--upgrade", "--requirement", str(ROOT / name / "ranges.txt"))
    if engines:
        pip(own, "--no-deps", *OF_THE_THINKER)
        subprocess.run([own, str(ROOT / "scripts" / "cpu_torch_env.py")], check=True)
        peers = ROOT / name / "peers.lock"
        peers.write_text("".join(each.lines for each in select(read(), ["peers"])))
        pip(own, "--no-deps", "--requirement", str(peers))
    return own


def run_tests(python: str, tests: Sequence[str], more: Sequence[str]) -> int:
    """Installs Quartet itself, which generates the stubs, and runs pytest without the tests of files."""
    pip(python, "--no-deps", "--no-build-isolation", "--editable", ".")
    found = (
        "import importlib.metadata as m; print(*(f'{d.name} {d.version}' for d in m.distributions() if d.name in %r))"
    )
    subprocess.run([python, "-c", found % (SHOWN,)], check=True)
    spread = ["-n", "2", "--dist", "loadscope", "--no-loadscope-reorder", "-q"]
    return subprocess.run([*_pytest(python), *spread, *tests, *more], cwd=ROOT, check=False).returncode


def _pytest(python: str) -> list[str]:
    left_out = [f"--ignore=tests/{file}" for file in OF_FILES]
    return [python, "-m", "pytest", "-m", "not long and not weekly", "--engines=optional", *left_out]


def needing_engines(python: str) -> list[str]:
    """Modules of tests/pure that cannot be imported in an environment without engines."""
    command = [*_pytest(python), "--collect-only", "-q", "tests/pure"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    without = {line.partition("::")[0] for line in listed.splitlines() if "::" in line}
    modules = sorted(f"tests/pure/{path.name}" for path in (ROOT / "tests" / "pure").glob("test_*.py"))
    return [module for module in modules if module not in without and module.removeprefix("tests/") not in OF_FILES]


def on_pythons(versions: Sequence[str], more: Sequence[str]) -> int:
    """Returns the sum of pytest's statuses."""
    status = 0
    for version in versions:
        if python := _found(version):
            status += run_tests(locked(version, python), ["tests/pure"], more)
    return status


def _found(version: str) -> str | None:
    python = find_python(version)
    print(f"Python {version}: {python or 'not found here; its tests are not run'}", flush=True)
    return python


def with_newest(more: Sequence[str]) -> int:
    """Returns pytest's status."""
    return run_tests(newest(".venv-newest", sys.executable, *ENGINES), ["tests/pure", "tests/stage"], more)


def make() -> None:
    """Makes the environments of the gate."""
    if python := _found(LOCKED_PYTHON):
        locked(LOCKED_PYTHON, python)
    if python := _found(NEWEST_PYTHON):
        newest(f".venv-{NEWEST_PYTHON}", python)
    newest(".venv-newest", sys.executable, *ENGINES)


def in_the_gate(more: Sequence[str]) -> int:
    """Runs the tests in what `make` has made. Returns the sum of pytest's statuses."""
    status, own = 0, _python_in(f".venv-{NEWEST_PYTHON}")
    without_engines = [each for each in (_python_in(f".venv-{LOCKED_PYTHON}"), own) if Path(each).exists()]
    for python in without_engines:
        status += run_tests(python, ["tests/pure"], more)
    pure = needing_engines(own) if own in without_engines else ["tests/pure"]
    return status + run_tests(_python_in(".venv-newest"), [*pure, "tests/stage"], more)


def main() -> None:
    parser = ArgumentParser(description="Runs the tests in environments beside .venv.")
    parser.add_argument("what", choices=("pythons", "newest", "make", "gate"))
    parser.add_argument("versions", nargs="*", help="of Python, for pythons")
    flags, more = parser.parse_known_args()
    if flags.what == "make":
        make()
        return
    runs = {"pythons": lambda: on_pythons(flags.versions, more), "newest": lambda: with_newest(more)}
    runs["gate"] = lambda: in_the_gate(more)
    sys.exit(min(1, runs[flags.what]()))


if __name__ == "__main__":
    main()
