"""kubectl renders deploy/k8s as the tests' own renderer does."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from tests.support.documents import Command, commands
from tests.support.k8s_objects import ROOT, Object
from tests.support.kustomize import WITH_TLS, build, with_components

pytestmark = pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed")
DIRECTORIES = ("overlays/cpu-demo", "overlays/single-gpu", "overlays/speech", "overlays/scaled", "monitoring")

OTHERS = [("cpu-demo", ["speech"]), ("speech", ["ucx"]), ("scaled", ["inference-pool"])]


def _by_name(objects: list[Object]) -> dict[tuple[str, str], Object]:
    """By kind and name, without the hashes in the names of generated ConfigMaps, which the two compute differently."""
    text = yaml.safe_dump(objects, default_flow_style=False, width=10_000)
    for each in objects:
        if each["kind"] == "ConfigMap":
            text = text.replace(each["metadata"]["name"], each["metadata"]["name"].rsplit("-", 1)[0])
    return {(each["kind"], each["metadata"]["name"]): each for each in yaml.safe_load(text)}


def rendered_alike(directory: Path) -> bool:
    command = ["kubectl", "kustomize", str(directory)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return _by_name(build(directory)) == _by_name(list(yaml.safe_load_all(done.stdout)))


@pytest.mark.parametrize("directory", DIRECTORIES)
def test_kubectl_renders_the_same(directory):
    assert rendered_alike(ROOT / "deploy/k8s" / directory)


@pytest.mark.parametrize(("overlay", "components"), [*WITH_TLS, *OTHERS])
def test_kubectl_renders_the_same_with_components(tmp_path, overlay, components):
    assert rendered_alike(with_components(tmp_path, overlay, components))


@pytest.mark.parametrize("command", [each for each in commands() if each.words[0] == "kubectl"], ids=str)
def test_kubectl_knows_what_documents_tell_it(command: Command) -> None:
    """What it does not know it says before it looks for a cluster, and here is none."""
    done = subprocess.run(
        [*command.words, "--server=http://127.0.0.1:1", "--request-timeout=1s"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert not re.search("unknown|error: (?!.*refused)|[Uu]sage", done.stderr), done.stderr
    assert done.returncode == 0 or "refused" in done.stderr, done.stderr
