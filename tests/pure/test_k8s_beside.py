"""deploy/k8s: what is added beside a model's own stages, the aligner and the process of calls."""

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.k8s.breaks import CALLS_BREAKS, break_it
from tests.support.k8s.checks import problems
from tests.support.k8s.kustomize import build, copy_deployment, with_components
from tests.support.k8s.objects import OF_ITS_NODE, ROOT, Cluster, Object, pod_of, stages_of


def _validated(objects: list[Object]) -> None:
    validate = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is not installed")
    for each in objects:
        validate.validate(each, "1.32", strict=True)


def _built(tmp_path: Path, page: str) -> list[Object]:
    """The overlay that a page has as its example."""
    (example,) = re.findall(r"```yaml\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)
    copy_deployment(tmp_path)
    folder = tmp_path / "deploy/k8s/overlays/mine"
    folder.mkdir()
    (folder / "kustomization.yaml").write_text(example)
    objects = build(folder)
    assert problems(objects) == []
    _validated(objects)
    return objects


@pytest.mark.parametrize(
    ("overlay", "more", "model"),
    [("cpu-demo", [], "quartet-demo-aligner"), ("single-gpu", ["tls"], "Qwen/Qwen3-ForcedAligner-0.6B-hf")],
)
def test_an_aligner_is_added_that_the_gateway_knows(tmp_path, overlay: str, more: list[str], model: str) -> None:
    objects = build(with_components(tmp_path, overlay, ["aligner", *more]))
    assert problems(objects) == []
    _validated(objects)
    cluster = Cluster(objects)
    assert stages_of(cluster) == ["thinker", "talker", "code2wav", "aligner"]
    assert cluster.settings("gateway").aligner == "dns:///aligner:50059"
    assert cluster.settings("aligner").model.endswith(model)
    (container,) = pod_of(cluster.get("Deployment", "aligner"))["containers"]
    assert "nvidia.com/gpu" not in container["resources"]["limits"]
    assert (cluster.settings("aligner").tls_cert is not None) == ("tls" in more)


def test_an_aligners_model_is_chosen_as_the_others_are(tmp_path) -> None:
    own = [{"name": "model", "behavior": "merge", "literals": ["QUARTET_ALIGNER_MODEL=/models/own"]}]
    cluster = Cluster(build(with_components(tmp_path, "speech", ["aligner"], configMapGenerator=own)))
    assert cluster.settings("aligner").model == "/models/own"


def test_the_overlay_of_an_aligner_on_a_gpu_is_one(tmp_path) -> None:
    cluster = Cluster(_built(tmp_path, "docs/word-times.md"))
    aligner = cluster.get("Deployment", "aligner")
    (container,) = pod_of(aligner)["containers"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == 1
    assert container["image"].endswith("-cuda")
    assert aligner["spec"]["strategy"] == {"type": "Recreate"}
    (models,) = [volume for volume in pod_of(aligner)["volumes"] if volume["name"] == "models"]
    assert models == {"name": "models", "persistentVolumeClaim": {"claimName": "models"}}


@pytest.fixture(scope="session")
def with_calls(tmp_path_factory: pytest.TempPathFactory) -> list[Object]:
    return build(with_components(tmp_path_factory.mktemp("calls"), "scaled", ["webrtc"]))


def test_calls_are_reached_at_a_nodes_port(with_calls) -> None:
    assert problems(with_calls) == []
    _validated(with_calls)
    cluster = Cluster(with_calls)
    assert cluster.settings("webrtc").announced == [(OF_ITS_NODE["status.hostIP"], 30478)]
    services = {name: cluster.get("Service", name)["spec"] for name in ("webrtc", "webrtc-calls")}
    assert {name: spec["type"] for name, spec in services.items()} == {
        "webrtc": "ClusterIP",
        "webrtc-calls": "NodePort",
    }
    assert [port["protocol"] for port in services["webrtc-calls"]["ports"]] == ["UDP"]  # not the gateways' port


def test_calls_behind_a_load_balancer(tmp_path) -> None:
    cluster = Cluster(_built(tmp_path, "docs/webrtc.md"))
    assert cluster.settings("webrtc").announced == [("203.0.113.7", 0)]
    service = cluster.get("Service", "webrtc-calls")["spec"]
    assert (service["type"], service["ports"][0]["port"]) == ("LoadBalancer", cluster.settings("webrtc").udp_port)


@pytest.mark.parametrize("what", CALLS_BREAKS)
def test_what_is_broken_in_calls_is_found(with_calls, what: str) -> None:
    objects: list[Any] = copy.deepcopy(with_calls)
    break_it(objects, *CALLS_BREAKS[what])
    assert problems(objects) != []


def test_the_compose_file_has_the_same_process() -> None:
    compose = yaml.safe_load((ROOT / "deploy/docker/webrtc.yaml").read_text())["services"]
    settings = yaml.safe_load((ROOT / "deploy/k8s/components/webrtc/kustomization.yaml").read_text())
    here = dict(each.split("=", 1) for made in settings["configMapGenerator"] for each in made["literals"])
    there = compose["gateway"]["environment"] | compose["webrtc"]["environment"]
    shared = here.keys() & there.keys() - {"QUARTET_WEBRTC_UDP_PORT"}  # of a variable, there
    assert {name: here[name] for name in shared} == {name: str(there[name]) for name in shared}
    assert len(shared) == 4
