"""kubectl renders deploy/k8s as the tests' own renderer does."""

import itertools
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from tests.support.documents import Command, commands
from tests.support.k8s.kustomize import LOADER, WITH_TLS, build, with_components
from tests.support.k8s.objects import ROOT, Object

pytestmark = pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed")
DIRECTORIES = ("overlays/cpu-demo", "overlays/single-gpu", "overlays/speech", "overlays/scaled", "monitoring")

OTHERS = [
    ("cpu-demo", ["speech"]),
    ("cpu-demo", ["gpu", "ingress", "text"]),
    ("single-gpu", ["dit", "inference-pool", "state", "tls"]),
    ("speech", ["ucx", "state"]),
    ("single-gpu", ["asr-llm-tts", "tls"]),
    ("single-gpu", ["text-dit", "tls"]),
    ("single-gpu", ["aligner", "webrtc", "tls"]),
    ("scaled", ["inference-pool"]),
    ("single-gpu", ["database", "tls"]),
    ("cpu-demo", ["database", "ingress"]),
]
# (overlay, components, what kubectl names): those that README's table does not offer
REFUSED = [
    ("cpu-demo", ["dit"], "PersistentVolumeClaim.v1.[noGrp]/models"),
    ("speech", ["dit"], "one-of-the-pipelines"),
    ("single-gpu", ["dit", "text"], "one-of-the-pipelines"),
    ("single-gpu", ["text", "dit"], "one-of-the-pipelines"),
    ("single-gpu", ["text-dit", "text"], "one-of-the-pipelines"),
    ("cpu-demo", ["speech", "text"], "one-of-the-pipelines"),
    ("scaled", ["speech"], "one-of-the-pipelines"),
    ("scaled", ["state"], "one-of-state-database"),
    ("cpu-demo", ["state", "database"], "one-of-state-database"),
    ("single-gpu", ["database", "state"], "one-of-state-database"),
    ("cpu-demo", ["tls", "ucx"], "one-of-tls-ucx"),
    ("single-gpu", ["tls", "dit"], "stages-before-tls"),
    ("single-gpu", ["tls", "asr-llm-tts"], "stages-before-tls"),
    ("single-gpu", ["tls", "aligner"], "stages-before-tls"),
    ("single-gpu", ["aligner", "embeddings"], "one-of-aligner-embeddings"),
    ("speech", ["webrtc"], "one-of-speech-embeddings-webrtc"),
]


def _by_name(objects: list[Object]) -> dict[tuple[str, str], Object]:
    """By kind and name, without the hashes in the names of generated ConfigMaps, which the two compute differently."""
    text = json.dumps(objects)
    for each in objects:
        if each["kind"] == "ConfigMap":
            text = text.replace(each["metadata"]["name"], each["metadata"]["name"].rsplit("-", 1)[0])
    return {(each["kind"], each["metadata"]["name"]): each for each in json.loads(text)}


def kustomize(directory: Path) -> subprocess.CompletedProcess[str]:
    """What kubectl makes of it."""
    return subprocess.run(["kubectl", "kustomize", str(directory)], capture_output=True, text=True, timeout=120)


def rendered_alike(directory: Path, ours: list[Object] | None = None) -> bool:
    done = kustomize(directory)
    assert done.returncode == 0, done.stderr
    return _by_name(ours or build(directory)) == _by_name(list(yaml.load_all(done.stdout, LOADER)))


@pytest.mark.parametrize("directory", DIRECTORIES)
def test_kubectl_renders_the_same(directory):
    assert rendered_alike(ROOT / "deploy/k8s" / directory)


@pytest.mark.parametrize(("overlay", "components"), [*WITH_TLS, *OTHERS])
def test_kubectl_renders_the_same_with_components(tmp_path, overlay, components):
    assert rendered_alike(with_components(tmp_path, overlay, components))


@pytest.mark.parametrize("namespace", [None, "elsewhere"])
def test_kubectl_puts_all_of_an_own_overlay_into_one_namespace(tmp_path, namespace):
    more = {} if namespace is None else {"namespace": namespace}
    folder = with_components(tmp_path, "single-gpu", ["dit", "inference-pool", "state", "ucx"], **more)
    assert rendered_alike(folder)


@pytest.mark.parametrize(("overlay", "components", "what"), REFUSED)
def test_kubectl_refuses_what_is_not_offered(tmp_path, overlay, components, what):
    folder = with_components(tmp_path, overlay, components)
    with pytest.raises(ValueError, match="to patch"):
        build(folder)
    done = kustomize(folder)
    assert (done.returncode, done.stdout) == (1, "")
    assert what in done.stderr


@pytest.mark.weekly  # 272 of them; the other overlays were compared once
def test_kubectl_renders_each_two_components_as_the_tests_do(tmp_path):
    components = sorted(each.name for each in (ROOT / "deploy/k8s/components").iterdir())
    for pair in itertools.permutations(components, 2):
        folder = with_components(tmp_path, "single-gpu", list(pair))
        try:
            ours = build(folder)
        except ValueError:
            assert kustomize(folder).returncode == 1, pair
        else:
            assert rendered_alike(folder, ours), pair


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
