"""Quartet as `pip install` of a built wheel brings it, in a directory that has folders named as its packages."""

import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

from tests.support.systems.stack import free_port

ROOT = Path(__file__).parents[2]
SOURCES = ("pyproject.toml", "setup.py", "README.md", "LICENSE", "protos", "services", "gateway", "cli", "quartet")
TIMEOUT_S = 240.0


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    source = tmp_path_factory.mktemp("source")
    for name in SOURCES:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, source / name)
    shutil.rmtree(source / "quartet" / "v1", ignore_errors=True)  # the build makes it
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", "dist", "."]
    subprocess.run(command, cwd=source, env=_outside(), check=True, timeout=TIMEOUT_S)
    [built] = (source / "dist").glob("*.whl")
    return built


@pytest.fixture(scope="module")
def quartet(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The command, in an environment of its own; what Quartet needs is that of the tests' environment."""
    environment = tmp_path_factory.mktemp("installed")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(environment)], check=True, timeout=TIMEOUT_S)
    python = str(environment / "bin" / "python")
    install = [sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", str(wheel)]
    subprocess.run(install, env=_outside(), check=True, timeout=TIMEOUT_S)
    [packages] = environment.glob("lib/python*/site-packages")
    dependencies = sysconfig.get_path("purelib")
    (packages / "dependencies.pth").write_text(f"import site; site.addsitedir({dependencies!r})\n")
    return environment / "bin" / "quartet"


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A user's, with packages of the same names."""
    for package in ("services", "gateway", "cli", "quartet"):
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").write_text("raise SystemExit('a package of the user')\n")
    return tmp_path


def _outside() -> dict[str, str]:
    """The environment, without this checkout."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


def _run(quartet: Path, directory: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [str(quartet), *arguments]
    return subprocess.run(
        command, cwd=directory, env=_outside(), capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )


@pytest.mark.long
def test_the_wheel_has_all_data_and_says_that_it_is_typed(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    packages = ("services", "gateway", "cli")
    data = (".yaml", ".json", ".jinja", ".safetensors", ".png", ".wav", ".html", ".css", ".js", ".svg")
    there = {str(file.relative_to(ROOT)) for name in packages for file in (ROOT / name).rglob("*")}
    assert {name for name in there if name.endswith(data)} <= names
    assert {f"{name}/py.typed" for name in (*packages, "quartet")} <= names


@pytest.mark.weekly
def test_the_checks_know_the_shipped_pipelines(quartet: Path, directory: Path) -> None:
    wrong = _run(quartet, directory, "up", "--model", "no/such/directory")
    assert (wrong.returncode, wrong.stderr.count("\n")) == (2, 1)
    assert "--model no/such/directory: there is no such directory" in wrong.stderr
    unfit = _run(quartet, directory, "up", "--model", "a/b", "--pipeline", "qwen3-omni-dit")
    assert unfit.returncode == 1
    assert "--dit-model: missing" in unfit.stderr
    assert str(quartet.parents[1]) in unfit.stderr  # the pipeline's file


@pytest.mark.weekly
def test_a_made_checkpoint_is_served(quartet: Path, directory: Path) -> None:
    for arch in ("qwen3-omni", "flux"):
        made = _run(quartet, directory, "tiny", "--arch", arch, "--out", arch)
        assert made.returncode == 0, made.stderr
    assert (directory / "qwen3-omni" / "chat_template.jinja").is_file()
    command = [str(quartet), "up", "--model", "flux", "--port", str(free_port()), "--gateway-arg=--jobs-dir=jobs"]
    process = subprocess.Popen(command, cwd=directory, env=_outside(), stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr
        lines = []
        while not (lines and "ready after" in lines[-1]):
            lines.append(process.stderr.readline())
            assert lines[-1], "".join(lines)  # it has ended
        process.terminate()
        assert process.wait(TIMEOUT_S) == 0
    finally:
        process.kill()
