"""deploy/k8s: every overlay is valid by the API's schemas and its objects fit each other, the code and the images."""

import copy
import ipaddress
import re
from itertools import filterfalse
from pathlib import Path
from typing import Any

import pytest
import yaml

from cli.budget import MIB, Demand, Gpus, share_out
from cli.budget_report import GPUS
from gateway.media.fetch import _EMBEDDED_IPV4, _SPECIAL, is_public
from services.families.qwen3_omni.budget import PUBLISHED
from tests.support.k8s.breaks import BREAKS, POOL_BREAKS, break_it
from tests.support.k8s.checks import problems
from tests.support.k8s.kustomize import WITH_TLS, build, copy_deployment, with_components
from tests.support.k8s.objects import OF_ITSELF, PORTS, ROOT, Cluster, Object, pod_of, stages_of
from tests.support.k8s.pool import pool_problems, split
from tests.support.k8s.resources import amount

K8S = ROOT / "deploy/k8s"
OVERLAYS = ("cpu-demo", "single-gpu", "speech", "scaled")


@pytest.fixture(scope="session")
def rendered() -> dict[str, list[Object]]:
    return {name: build(K8S / "overlays" / name) for name in OVERLAYS}


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_objects_fit_each_other(rendered, overlay):
    assert problems(rendered[overlay]) == []


def test_a_gateway_reaches_no_address_that_it_refuses(rendered):
    """Those of its own list, and the networks that embed IPv4 addresses."""
    rules = Cluster(rendered["single-gpu"]).get("NetworkPolicy", "gateway")["spec"]["egress"]
    blocks = [to["ipBlock"] for rule in rules for to in rule.get("to", ()) if "ipBlock" in to]
    assert [block["cidr"] for block in blocks] == ["0.0.0.0/0", "::/0"]
    closed = [ipaddress.ip_network(each) for block in blocks for each in block["except"]]
    assert all(not is_public(str(network[0])) for network in closed)
    routed: list[Any] = [*_SPECIAL, *(embedded for embedded, _ in _EMBEDDED_IPV4[2:])]

    def is_closed(network: Any) -> bool:
        return any(network.version == each.version and network.subnet_of(each) for each in closed)

    assert list(filterfalse(is_closed, routed)) == []


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_objects_are_valid_by_the_schemas(rendered, overlay):
    validate = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is not installed")
    for each in rendered[overlay]:
        validate.validate(each, "1.32", strict=True)  # raises; for a kind that it does not know, too


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_ucx_is_added_to_an_overlay(tmp_path, overlay):
    objects = build(with_components(tmp_path, overlay, ["ucx"]))
    assert problems(objects) == []
    cluster = Cluster(objects)
    (policy,) = [each for each in cluster.of("NetworkPolicy") if each["metadata"]["name"] == "ucx"]
    (ports,) = {(rule["ports"][0]["port"], rule["ports"][0]["endPort"]) for rule in policy["spec"]["ingress"]}
    stages = [stage for stage in stages_of(cluster) if stage != "dit"]
    assert stages == [*(["thinker"] if overlay != "speech" else []), "talker", "code2wav"]
    for stage in stages:
        assert cluster.settings(stage).transports == ["inline", "ucx"]
        (container,) = pod_of(cluster.get("Deployment", stage))["containers"]
        (port_range,) = [each["value"] for each in container["env"] if each["name"] == "UCX_TCP_PORT_RANGE"]
        assert port_range == f"{ports[0]}-{ports[1]}"
    validate = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is not installed")
    for each in objects:
        validate.validate(each, "1.32", strict=True)


def test_stages_read_the_hubs_token_from_a_file():
    found = Cluster(build(K8S / "overlays" / "scaled")).of("Deployment")
    stages = [each for each in found if each["metadata"]["name"] != "gateway"]
    assert len(stages) == 4
    for each in stages:
        (container,) = pod_of(each)["containers"]
        variables = {variable["name"]: variable.get("value") for variable in container["env"]}
        (mount,) = [mount for mount in container["volumeMounts"] if mount["name"] == "hugging-face"]
        assert (variables["HF_TOKEN_PATH"], "HF_TOKEN" in variables) == (f"{mount['mountPath']}/token", False)


@pytest.mark.parametrize(("overlay", "components"), WITH_TLS)
def test_mutual_tls_is_added_to_an_overlay(tmp_path, overlay, components):
    objects = build(with_components(tmp_path, overlay, components))
    assert problems(objects) == []
    cluster, secrets = Cluster(objects), []
    for each in cluster.of("Deployment"):
        name = each["metadata"]["name"]
        assert cluster.settings(name).tls_cert is not None
        mounted = [volume["secret"] for volume in pod_of(each)["volumes"] if "secret" in volume]
        secrets += [secret["secretName"] for secret in mounted if not secret.get("optional")]
    more = {"scaled": ["thinker", "dit"], "speech": []}.get(overlay, ["thinker"])
    names = ["gateway", "talker", "code2wav", *more]
    more_secrets = ["gateway-signing-key"] if overlay == "scaled" else []
    assert sorted(secrets) == sorted(["gateway-keys", *more_secrets, *(f"{name}-tls" for name in names)])
    validate = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is not installed")
    for each in objects:
        validate.validate(each, "1.32", strict=True)


@pytest.mark.parametrize("components", [["dit"], ["dit", "gpu"], ["gpu", "dit"]])
def test_a_dit_that_is_added_has_a_gpu(tmp_path, components):
    objects = build(with_components(tmp_path, "single-gpu", components))
    assert problems(objects) == []
    (container,) = pod_of(Cluster(objects).get("Deployment", "dit"))["containers"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == 1
    assert container["image"].endswith("-cuda")


@pytest.mark.parametrize(("overlay", "gpus"), [("cpu-demo", None), ("speech", 1)])
def test_a_speech_server_has_no_thinker(tmp_path, rendered, overlay, gpus):
    objects = rendered["speech"] if overlay == "speech" else build(with_components(tmp_path, overlay, ["speech"]))
    assert problems(objects) == []
    cluster = Cluster(objects)
    assert sorted(stages_of(cluster)) == ["code2wav", "talker"]
    assert {each["metadata"]["name"] for each in objects if "thinker" in each["metadata"]["name"]} == set()
    assert cluster.pipeline()["outputs"] == {"speech": "code2wav"}
    for stage in stages_of(cluster):
        (container,) = pod_of(cluster.get("Deployment", stage))["containers"]
        assert container["resources"]["limits"].get("nvidia.com/gpu") == gpus


@pytest.mark.parametrize(("overlay", "more", "gpus"), [("cpu-demo", [], None), ("single-gpu", ["keys", "tls"], 1)])
def test_a_server_of_text_has_the_thinker_alone(tmp_path, overlay, more, gpus):
    objects = build(with_components(tmp_path, overlay, [*more, "text"]))
    assert problems(objects) == []
    cluster = Cluster(objects)
    assert stages_of(cluster) == ["thinker"]
    names = {each["metadata"]["name"] for each in objects}
    assert not [name for name in names if "talker" in name or "code2wav" in name]
    assert cluster.pipeline()["outputs"] == {"text": "thinker"}
    (container,) = pod_of(cluster.get("Deployment", "thinker"))["containers"]
    assert container["resources"]["limits"].get("nvidia.com/gpu") == gpus


def test_a_voice_of_another_model_reads_the_thinkers_text(tmp_path):
    models = ["QUARTET_THINKER_MODEL=a/llm", "QUARTET_TALKER_MODEL=a/tts", "QUARTET_CODE2WAV_MODEL=a/tts"]
    own = [{"name": "model", "behavior": "merge", "literals": models}]
    objects = build(with_components(tmp_path, "single-gpu", ["llm-tts"], configMapGenerator=own))
    assert problems(objects) == []
    cluster = Cluster(objects)
    assert stages_of(cluster) == ["thinker", "talker", "code2wav"]
    assert cluster.pipeline()["stages"]["talker"]["reads"] == "text"
    assert [cluster.settings(stage).model for stage in stages_of(cluster)] == ["a/llm", "a/tts", "a/tts"]


@pytest.mark.parametrize("more", [[], ["tls"]])
def test_one_checkpoint_understands_and_makes_pictures(tmp_path, more):
    models = ["QUARTET_THINKER_MODEL=a/cosmos", "QUARTET_DIT_MODEL=a/cosmos", "QUARTET_DIT_MAX_RUNNING_OUTPUTS=2"]
    own = [{"name": "model", "behavior": "merge", "literals": models}]
    objects = build(with_components(tmp_path, "single-gpu", ["text-dit", *more], configMapGenerator=own))
    assert problems(objects) == []
    cluster = Cluster(objects)
    assert stages_of(cluster) == ["thinker", "dit"]
    assert [cluster.settings(stage).model for stage in stages_of(cluster)] == ["a/cosmos", "a/cosmos"]
    assert cluster.settings("dit").max_running_outputs == 2
    assert cluster.pipeline()["outputs"] == {"text": "thinker", "image": "dit", "video": "dit", "audio": "dit"}
    names = {each["metadata"]["name"] for each in objects}
    assert not [name for name in names if "talker" in name or "code2wav" in name]


def test_ears_beside_it_have_a_model_and_settings_of_their_own(tmp_path):
    models = ["QUARTET_THINKER_MODEL=a/llm", "QUARTET_TALKER_MODEL=a/tts", "QUARTET_CODE2WAV_MODEL=a/tts"]
    ears = ["QUARTET_ASR_MODEL=an/asr", "QUARTET_ASR_MAX_CONTEXT_TOKENS=4096"]
    own = [{"name": "model", "behavior": "merge", "literals": [*models, *ears]}]
    objects = build(with_components(tmp_path, "single-gpu", ["asr-llm-tts", "tls"], configMapGenerator=own))
    assert problems(objects) == []
    cluster = Cluster(objects)
    stages = ["thinker", "talker", "code2wav", "asr"]
    assert stages_of(cluster) == stages
    assert [cluster.settings(stage).model for stage in stages] == ["a/llm", "a/tts", "a/tts", "an/asr"]
    thinker, asr = cluster.settings("thinker"), cluster.settings("asr")
    assert (thinker.max_context_tokens, asr.max_context_tokens) == (32_768, 4096)
    assert (asr.gpu_memory_utilization, asr.shared_memory_mib) == (0.046, 0)
    assert cluster.pipeline()["outputs"] == {"text": "thinker", "speech": "code2wav", "transcript": "asr"}
    (container,) = pod_of(cluster.get("Deployment", "asr"))["containers"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == 1
    validate = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is not installed")
    for each in objects:
        validate.validate(each, "1.32", strict=True)


POOL_KINDS = ("InferencePool", "HTTPRoute")  # of definitions that a cluster has to install


@pytest.fixture(scope="session")
def pooled(tmp_path_factory) -> dict[str, list[Object]]:
    folders = {name: with_components(tmp_path_factory.mktemp(name), name, ["inference-pool"]) for name in OVERLAYS}
    return {name: build(folder) for name, folder in folders.items()}


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_an_inference_pool_is_added_to_an_overlay(pooled, overlay):
    own, added = split(pooled[overlay])
    assert problems(own) == []
    assert pool_problems(pooled[overlay]) == []
    kinds = [each["kind"] for each in added]
    assert sorted(kinds) == sorted(
        [*POOL_KINDS, "ConfigMap", "Deployment", "NetworkPolicy", "Role", "RoleBinding", "Service", "ServiceAccount"]
    )
    validate = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is not installed")
    for each in added:
        if each["kind"] not in POOL_KINDS:
            validate.validate(each, "1.32", strict=True)


@pytest.mark.parametrize("what", POOL_BREAKS)
def test_what_is_broken_in_a_pool_is_found(pooled, what):
    objects = copy.deepcopy(pooled["scaled"])
    break_it(objects, *POOL_BREAKS[what])
    assert pool_problems(objects) != []


def test_what_is_reached_from_outside_asks_for_keys(rendered):
    for name, objects in rendered.items():
        cluster = Cluster(objects)
        gateway = cluster.settings("gateway")
        assert (gateway.api_keys_file is None) == (not cluster.of("Ingress")), name
        assert gateway.allow_anonymous == (not cluster.of("Ingress")), name


def test_each_overlay_has_what_it_is_for(rendered):
    kinds = {name: {each["kind"] for each in objects} for name, objects in rendered.items()}
    assert {"HorizontalPodAutoscaler", "PersistentVolumeClaim", "Ingress"} <= kinds["scaled"]
    assert "gateway-database" in str(rendered["scaled"])
    assert {"PersistentVolumeClaim", "Ingress"} <= kinds["single-gpu"] & kinds["speech"]
    # neither a volume, an Ingress controller nor a GPU: any cluster will do
    assert not {"HorizontalPodAutoscaler", "PersistentVolumeClaim", "Ingress"} & kinds["cpu-demo"]
    assert "nvidia.com/gpu" not in str(rendered["cpu-demo"])
    for name in ("single-gpu", "speech", "scaled"):
        for each in Cluster(rendered[name]).of("Deployment"):
            limits = pod_of(each)["containers"][0]["resources"]["limits"]
            assert limits.get("nvidia.com/gpu") == (None if each["metadata"]["name"] == "gateway" else 1)
    assert Cluster(rendered["scaled"]).get("PersistentVolumeClaim", "models")["spec"]["accessModes"] == [
        "ReadWriteMany"
    ]


def test_one_gpu_counts_as_many_as_stages_want(rendered):
    plugin = yaml.safe_load((K8S / "overlays/single-gpu/device-plugin.yaml").read_text())
    [resource] = plugin["sharing"]["timeSlicing"]["resources"]
    wanted = [
        pod_of(each)["containers"][0]["resources"]["limits"]
        for each in Cluster(rendered["single-gpu"]).of("Deployment")
    ]
    assert resource["replicas"] == sum(limits.get(resource["name"], 0) for limits in wanted)


def test_mps_of_the_plugin_is_for_stages_that_fit_an_equal_part(rendered):
    """It limits each pod to its part of the memory: so for talker and code2wav on 32 GB, and not for a thinker."""
    plugin = yaml.safe_load((K8S / "overlays/speech/device-plugin-mps.yaml").read_text())
    [resource] = plugin["sharing"]["mps"]["resources"]
    cluster = Cluster(rendered["speech"])
    stages = stages_of(cluster)
    assert resource == {"name": "nvidia.com/gpu", "replicas": len(stages)}
    talker = cluster.settings("talker")
    load = Demand(talker.max_running_requests, talker_positions=talker.max_context_positions)
    shares = share_out(PUBLISHED.of(stages), Gpus.alike(32_607 * MIB), load).shares  # an RTX 5090's, as nvidia-smi says
    assert max(share.total for share in shares) <= 32_607 * MIB // len(stages)
    assert PUBLISHED.weights["thinker"] > max(GPUS.values()) * MIB // 3
    assert "timeSlicing" in (K8S / "overlays/single-gpu/device-plugin.yaml").read_text()


def test_every_process_rolls_when_its_settings_change(rendered, tmp_path):
    copy_deployment(tmp_path)
    file = tmp_path / "gateway/pipelines/qwen3-omni.yaml"
    file.write_text(file.read_text() + "\n# changed\n")
    changed = Cluster(build(tmp_path / "deploy/k8s/overlays/cpu-demo"))
    for name in ("gateway", "thinker"):
        is_same = changed.get("Deployment", name) == Cluster(rendered["cpu-demo"]).get("Deployment", name)
        assert is_same == (name != "gateway")


@pytest.mark.parametrize("overlay", ["cpu-demo", "single-gpu"])
def test_a_database_is_added_to_an_overlay(tmp_path, overlay):
    objects = build(with_components(tmp_path, overlay, ["database"]))
    assert problems(objects) == []
    cluster = Cluster(objects)
    assert cluster.settings("gateway").signing_key_file is not None
    url = {"QUARTET_GATEWAY_DATABASE_URL": ("gateway-database", "url")}
    assert cluster.from_secrets("gateway") == url
    assert cluster.get("Deployment", "gateway")["spec"]["strategy"]["type"] == "RollingUpdate"
    (policy,) = [each for each in cluster.of("NetworkPolicy") if each["metadata"]["name"] == "gateway-to-database"]
    assert cluster.selected_by(policy["spec"]["podSelector"]) == ["gateway"]
    assert policy["spec"]["egress"] == [{"ports": [{"protocol": "TCP", "port": 5432}]}]
    assert cluster.settings("gateway").own_url == f"http://{OF_ITSELF['status.podIP']}:8000"
    for ingress in cluster.of("Ingress"):
        assert not [name for name in ingress["metadata"]["annotations"] if name.endswith("/affinity")]
    assert f"{url['QUARTET_GATEWAY_DATABASE_URL'][0]} --from-literal=url=" in (K8S / "README.md").read_text()


def test_service_monitors_find_the_services(tmp_path):
    monitors = build(K8S / "monitoring")
    scaled = Cluster(build(with_components(tmp_path, "scaled", ["aligner", "webrtc"])))
    found: dict[str, list[str]] = {}
    for monitor in monitors:
        assert (monitor["apiVersion"], monitor["kind"]) == ("monitoring.coreos.com/v1", "ServiceMonitor")
        assert set(monitor["spec"]) == {"selector", "endpoints"}
        [endpoint] = monitor["spec"]["endpoints"]
        assert set(endpoint) <= {"port", "path", "interval", "scrapeTimeout"}
        for service in scaled.of("Service"):
            assert service["metadata"]["namespace"] == monitor["metadata"]["namespace"]
            if _selects(monitor["spec"]["selector"], service["metadata"]["labels"]):
                assert endpoint["port"] in [port["name"] for port in service["spec"]["ports"]]
                found.setdefault(service["metadata"]["name"], []).append(endpoint.get("path", "/metrics"))
    assert found == {name: ["/metrics"] for name in PORTS if name not in ("asr", "embedder")}


def _selects(selector: Object, labels: dict[str, str]) -> bool:
    expressions = selector.get("matchExpressions", [])
    return selector["matchLabels"].items() <= labels.items() and all(
        labels.get(each["key"]) in each["values"] for each in expressions
    )


def test_quantities():
    assert (amount("500m"), amount("4"), amount(1), amount("2Gi")) == (0.5, 4, 1, 2 * 2**30)
    for wrong in ("2GB", "1 Gi", "4cores", "", "-1"):
        with pytest.raises(ValueError, match="no quantity"):
            amount(wrong)


@pytest.mark.parametrize("what", BREAKS)
def test_what_is_broken_is_found(rendered, what):
    objects = copy.deepcopy(rendered["scaled"])
    break_it(objects, *BREAKS[what])
    assert problems(objects) != []


def test_the_renderer_refuses_what_it_does_not_know(tmp_path: Path):
    (tmp_path / "kustomization.yaml").write_text("namePrefix: x-\n")
    with pytest.raises(ValueError, match="namePrefix"):
        build(tmp_path)


def test_one_gpu_is_shared_as_in_compose(rendered):
    compose = dict(
        re.findall(r"(QUARTET_\w+): \$\{\1:-\$\{\w+:-([^}]+)\}\}", (ROOT / "deploy/docker/gpu.yaml").read_text())
    )
    cluster = Cluster(rendered["single-gpu"])
    here = {**cluster.environment("thinker"), **cluster.environment("talker"), **cluster.environment("code2wav")}
    assert compose
    assert {name: here.get(name) for name in compose} == compose


def test_the_metrics_that_the_sizing_page_names_exist():
    named = set(re.findall(r"quartet_[a-z0-9_]+", (ROOT / "docs/scaling.md").read_text()))
    source = "".join(file.read_text() for file in ROOT.glob("services/**/*.py"))
    assert named
    assert {name for name in named if f'"{name}"' not in source} == set()
