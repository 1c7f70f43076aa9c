"""Runs the tests in environments beside .venv: `make test-pythons`, `make test-newest`.

pythons: tests/pure on each Python that is named and found, with the lock's versions. Engines are left out.
newest: tests/pure and tests/stage with the newest versions that pyproject.toml's ranges allow. vLLM is left out, as it
fixes the versions of others. Where this fails, a range has to end.
"""

import os
import shutil
import subprocess
import sys
from argparse import ArgumentParser
from collections.abc import Sequence
from pathlib import Path

from locked import read, select

ROOT = Path(__file__).resolve().parent.parent
NO_ENGINE = ("base", "build", "gateway", "otel", "onnx", "dev")
NEWEST_EXTRAS = "gateway,talker,code2wav,dit,otel,onnx,docs,dev"
OF_THE_THINKER = ("torchvision", "msgspec", "pyzmq")  # which its tests need without vLLM, and tests' checkpoints
# They check the repository's files, with no package that differs between environments.
OF_FILES = (
    *("pure/test_k8s_combinations.py", "pure/test_lock.py", "pure/test_named_files.py", "pure/test_names.py"),
    *("pure/test_rooms.py", "pure/test_wrap_documents.py", "stage/test_kubectl.py"),
)
SHOWN = ("torch", "transformers", "diffusers", "fastapi", "grpcio", "numpy", "pydantic")


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
    """Makes an environment. Returns its Python."""
    folder = ROOT / name
    shutil.rmtree(folder, ignore_errors=True)
    subprocess.run([python, "-m", "venv", str(folder)], check=True)
    return str(folder / "bin" / "python")


def pip(python: str, *arguments: str) -> None:
    """Installs quietly. Raises SystemExit."""
    # compiled when imported: most of what is installed is not
    command = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-compile", *arguments]
    if subprocess.run(command, cwd=ROOT, check=False).returncode:
        sys.exit(f"{' '.join(arguments)}: cannot be installed")


def run_tests(python: str, folders: Sequence[str], more: Sequence[str]) -> int:
    """Runs pytest on some folders, without the tests of files."""
    spread = ["-n", "2", "--dist", "loadscope", "--no-loadscope-reorder", "-q"]
    left_out = [f"--ignore=tests/{file}" for file in OF_FILES]
    command = [python, "-m", "pytest", "-m", "not long", "--engines=optional", *left_out]
    return subprocess.run([*command, *spread, *folders, *more], cwd=ROOT, check=False).returncode


def on_pythons(versions: Sequence[str], more: Sequence[str]) -> int:
    """Returns the sum of pytest's statuses."""
    status = 0
    for version in versions:
        python = find_python(version)
        if python is None:
            print(f"Python {version}: not found here; its tests are not run", flush=True)
            continue
        print(f"Python {version}: {python}", flush=True)
        own = environment(f".venv-{version}", python)
        lock = ROOT / f".venv-{version}" / "packages.lock"
        lock.write_text("".join(each.lines for each in select(read(), NO_ENGINE)))
        pip(own, "--no-deps", "--require-hashes", "--requirement", str(lock))
        pip(own, "--no-deps", "--no-build-isolation", "--editable", ".")
        status += run_tests(own, ["tests/pure"], more)
    return status


def with_newest(more: Sequence[str]) -> int:
    """Returns pytest's status."""
    own = environment(".venv-newest", sys.executable)
    subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "torch_cpu.py"), "--python", own, "--quiet", "--no-compile"], check=True
    )
    pip(own, "--upgrade", "--editable", f".[{NEWEST_EXTRAS}]")
    pip(own, "--no-deps", *OF_THE_THINKER)
    subprocess.run([own, str(ROOT / "scripts" / "cpu_torch_env.py")], check=True)
    peers = [each.lines for each in select(read(), ["peers"])]
    (ROOT / ".venv-newest" / "peers.lock").write_text("".join(peers))
    pip(own, "--no-deps", "--requirement", str(ROOT / ".venv-newest" / "peers.lock"))
    listed = "import importlib.metadata as m; print(*(f'{n} {m.version(n)}' for n in %r), sep=', ')"
    subprocess.run([own, "-c", listed % (SHOWN,)], check=True)
    return run_tests(own, ["tests/pure", "tests/stage"], more)


def main() -> None:
    parser = ArgumentParser(description="Runs the tests in environments beside .venv.")
    parser.add_argument("what", choices=("pythons", "newest"))
    parser.add_argument("versions", nargs="*", help="of Python, for pythons")
    flags, more = parser.parse_known_args()
    sys.exit(min(1, on_pythons(flags.versions, more) if flags.what == "pythons" else with_newest(more)))


if __name__ == "__main__":
    main()
