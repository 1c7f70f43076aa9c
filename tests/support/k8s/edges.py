"""Who reaches whom, and who scales by what: pipeline, NetworkPolicies, Ingress and autoscalers of an overlay."""

import ipaddress
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import fastapi.routing

from gateway import metrics as gateway_metrics
from gateway.app import create_app
from gateway.pipeline.config import load_pipeline
from gateway.settings import GatewaySettings
from gateway.yaml_source import YamlError
from services.common.telemetry import metrics
from services.demo_models import ALIGNER, OMNI, PAINTER, resolve
from tests.support.k8s.objects import NO_STAGES, OF_ITS_NODE, OF_ITSELF, PORTS, ROOT, Cluster, Object, pod_of, stages_of

_LIMIT = "max_running_requests"
GATEWAY_LIMITS = {gateway_metrics.RUNNING: _LIMIT, gateway_metrics.REALTIME_SESSIONS: "max_realtime_sessions"}
METRICS_PORT = 9464
FIXED = {"aligner", "webrtc"}  # whose replicas are as many as somebody says
PIPELINE = ROOT / "gateway/pipelines/qwen3-omni-dit.yaml"
# What the gateway has for its own cluster: probes, metrics, profiles, the page, the reference.
INSIDE = {"/health", "/ready", "/metrics", "/version", "/load", "/start_profile", "/stop_profile", "/", "/page/{name}"}
INSIDE |= {"/docs", "/docs/oauth2-redirect", "/redoc", "/openapi.json"}


def routing_problems(cluster: Cluster) -> Iterator[str]:
    """What is wrong, a line each."""
    for check in (_pipeline, _models, _neighbours, _policies, _ingress, _autoscalers):
        yield from check(cluster)


def _pipeline(cluster: Cluster) -> Iterator[str]:
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "pipeline.yaml"
        file.write_text(cluster.pipeline_text())
        try:
            gateway = cluster.settings("gateway")
            config = load_pipeline(file, gateway.stage, gateway.aligner)
        except YamlError as error:
            yield f"the gateway refuses its pipeline: {error}"
            return
    if set(config.stages) != set(stages_of(cluster)):
        yield f"the pipeline has {sorted(config.stages)}, the cluster {stages_of(cluster)}"
    for name, stage in config.stages.items():
        service = cluster.named("Service", name)
        if stage.address != f"dns:///{name}:{PORTS[name]}":
            yield f"stage {name} is looked for at {stage.address}"
        if service is None or PORTS[name] not in [port["port"] for port in service["spec"]["ports"]]:
            yield f"stage {name}: no Service {name} with port {PORTS[name]}"


def _models(cluster: Cluster) -> Iterator[str]:
    reads_text = any(stage.get("reads") == "text" for stage in cluster.pipeline().get("stages", {}).values())
    apart = {"dit", "asr", "aligner", *(["thinker"] if reads_text else [])}
    answering = [stage for stage in stages_of(cluster) if stage not in apart]
    speaking = {cluster.settings(stage).model for stage in answering}
    if len(speaking) != 1:
        yield f"stages of one answer have different models: {sorted(speaking)}"
    for stage in stages_of(cluster):
        model = cluster.settings(stage).model
        if model.startswith("/") and model != resolve({"dit": PAINTER, "aligner": ALIGNER}.get(stage, OMNI)):
            yield f"Deployment {stage}: its model {model} is not in its image"


def _edges(cluster: Cluster) -> set[tuple[str, str]]:
    """(who connects, to whom)."""
    stages = cluster.pipeline().get("stages", {})
    edges = {("gateway", name) for name in stages_of(cluster)}
    if cluster.named("Deployment", "webrtc"):
        edges.add(("gateway", "webrtc"))
    return edges | {(name, stage["source"]) for name, stage in stages.items() if "source" in stage}


def _neighbours(cluster: Cluster) -> Iterator[str]:
    wanted = _edges(cluster)
    pods = [each["metadata"]["name"] for each in cluster.of("Deployment")]
    for peer in pods:
        for name in pods:
            expected = (peer, name) in wanted
            if name not in ("gateway", peer) and _allowed(cluster, peer, name, PORTS[name]) != (expected, expected):
                yield f"NetworkPolicies: {peer} to {name}:{PORTS[name]} shall {'' if expected else 'not '}be allowed"
    for name in pods:
        if not all(_restricted(cluster, name, direction) for direction in ("Ingress", "Egress")):
            yield f"NetworkPolicies: {name} may talk to everyone"
        if not any(_names_dns(rule) for rule in _rules(cluster, name, "egress")):
            yield f"NetworkPolicies: {name} cannot ask DNS"
        metrics_port = PORTS[name] if name in NO_STAGES else METRICS_PORT
        if name != "gateway" and not any(
            "namespaceSelector" in str(rule) and _has_port(rule, metrics_port)
            for rule in _rules(cluster, name, "ingress")
        ):
            yield f"NetworkPolicies: Prometheus does not reach {name}:{metrics_port}"
    if not any(
        "from" not in rule and _has_port(rule, PORTS["gateway"]) for rule in _rules(cluster, "gateway", "ingress")
    ):
        yield "NetworkPolicies: clients do not reach the gateway"
    own_url = cluster.settings("gateway").own_url
    if own_url not in (None, f"http://{OF_ITSELF['status.podIP']}:{PORTS['gateway']}"):
        yield f"gateways look for each other at {own_url}"
    if _allowed(cluster, "gateway", "gateway", PORTS["gateway"])[1] != (own_url is not None):
        yield f"NetworkPolicies: gateways shall {'' if own_url else 'not '}reach each other"
    if "webrtc" in pods:
        yield from _calls(cluster)


def _calls(cluster: Cluster) -> Iterator[str]:
    """The process of calls, the gateway that asks it for them, and the address that it tells clients."""
    calls, gateway = cluster.settings("webrtc"), cluster.settings("gateway")
    for what, url, name in (("the gateway", gateway.webrtc, "webrtc"), ("webrtc", calls.gateway, "gateway")):
        if url != f"http://{name}:{PORTS[name]}" or cluster.named("Service", name) is None:
            yield f"{what} looks for {name} at {url}"
    if _allowed(cluster, "webrtc", "gateway", PORTS["gateway"]) != (True, True):
        yield "NetworkPolicies: webrtc does not reach the gateway"
    rules = _rules(cluster, "webrtc", "ingress")
    if not any("from" not in rule and _has_port(rule, calls.udp_port, "UDP") for rule in rules):
        yield "NetworkPolicies: clients do not reach webrtc"
    if cluster.get("Deployment", "webrtc")["spec"].get("replicas") != 1:
        yield "Deployment webrtc: a call's packets reach another process than its own"
    (port,) = cluster.get("Service", "webrtc-calls")["spec"]["ports"]
    if port["port"] != calls.udp_port:
        yield f"Service webrtc-calls: {port}, but it listens on {calls.udp_port}"
    of_node = OF_ITS_NODE["status.hostIP"]
    told = [address for address in calls.addresses if address.startswith(of_node)]
    if told not in ([], [f"{of_node}:{port['nodePort']}"]) or not calls.addresses:
        yield f"webrtc tells clients {calls.addresses}, and nodes have its port at {port['nodePort']}"


def _rules(cluster: Cluster, pod: str, direction: str) -> list[Object]:
    found = []
    for each in cluster.of("NetworkPolicy"):
        if (
            pod in cluster.selected_by(each["spec"]["podSelector"])
            and direction.capitalize() in each["spec"]["policyTypes"]
        ):
            found += each["spec"].get(direction, [])
    return found


def _restricted(cluster: Cluster, pod: str, direction: str) -> bool:
    return any(
        pod in cluster.selected_by(each["spec"]["podSelector"]) and direction in each["spec"]["policyTypes"]
        for each in cluster.of("NetworkPolicy")
    )


def _has_port(rule: Object, port: int, protocol: str = "TCP") -> bool:
    return "ports" not in rule or {"protocol": protocol, "port": port} in rule["ports"]


def _names_dns(rule: Object) -> bool:
    return "kube-system" in str(rule) and _has_port(rule, 53, "UDP") and _has_port(rule, 53)


def _allowed(cluster: Cluster, peer: str, name: str, port: int) -> tuple[bool, bool]:
    """Whether `port` of the pods of `name` lets those of `peer` in, and whether those of `peer` may go out to it."""

    def matches(rule: Object, key: str, pod: str) -> bool:
        others = rule.get(key, [{"podSelector": {}}])
        return any(
            "podSelector" in other
            and "namespaceSelector" not in other
            and pod in cluster.selected_by(other["podSelector"])
            for other in others
        )

    comes_in = any(matches(rule, "from", peer) and _has_port(rule, port) for rule in _rules(cluster, name, "ingress"))
    goes_out = any(matches(rule, "to", name) and _has_port(rule, port) for rule in _rules(cluster, peer, "egress"))
    return comes_in, goes_out


def _policies(cluster: Cluster) -> Iterator[str]:
    for each in cluster.of("NetworkPolicy"):
        name, spec = each["metadata"]["name"], each["spec"]
        if not cluster.selected_by(spec["podSelector"]):
            yield f"NetworkPolicy {name} selects no pod"
        for rule in [*spec.get("ingress", []), *spec.get("egress", [])]:
            for other in [*rule.get("from", []), *rule.get("to", [])]:
                if "podSelector" in other and not cluster.selected_by(other["podSelector"]):
                    yield f"NetworkPolicy {name}: {other} is no pod here"
                block = other.get("ipBlock", {"cidr": "0.0.0.0/0"})
                whole = ipaddress.ip_network(block["cidr"])
                for part in block.get("except", []):
                    if not ipaddress.ip_network(part).subnet_of(whole):  # type: ignore[arg-type]
                        yield f"NetworkPolicy {name}: {part} is not in {whole}"


def _ingress(cluster: Cluster) -> Iterator[str]:
    for each in cluster.of("Ingress"):
        if not each["spec"].get("ingressClassName"):
            yield f"Ingress {each['metadata']['name']}: no ingressClassName: without a default class nobody serves it"
        for rule in each["spec"]["rules"]:
            for path in rule["http"]["paths"]:
                backend = path["backend"]["service"]
                service = cluster.named("Service", backend["name"])
                if service is None or backend["port"]["name"] not in [
                    port["name"] for port in service["spec"]["ports"]
                ]:
                    yield f"Ingress {each['metadata']['name']}: no Service {backend}"
            open_paths = [(path["path"], path["pathType"] == "Prefix") for path in rule["http"]["paths"]]
            yield from published_problems(f"Ingress {each['metadata']['name']}", open_paths)
        if cluster.settings("gateway").api_keys_file is None:
            yield f"Ingress {each['metadata']['name']}: without API keys"


def published_problems(what: str, open_paths: list[tuple[str, bool]]) -> Iterator[str]:
    """Which paths of the API (path, whether all below it) do not reach, and which of the inside they do."""
    for path in _gateway_paths():
        is_open = any(path == each or (below and path.startswith(f"{each}/")) for each, below in open_paths)
        if is_open == (path in INSIDE):
            yield f"{what}: {path} is {'for the inside' if is_open else 'not reached'}"
    for each, below in open_paths:
        if not any(path == each or (below and path.startswith(f"{each}/")) for path in _gateway_paths()):
            yield f"{what}: {each} is no path of the gateway"


@cache
def _gateway_paths() -> list[str]:
    app = create_app(GatewaySettings(pipeline=PIPELINE), load_pipeline(PIPELINE))
    flat = getattr(fastapi.routing, "iter_route_contexts", iter)  # newer ones keep the routes of a router in it
    return sorted({path for route in flat(app.routes) if (path := getattr(route, "path", None))})


def _autoscalers(cluster: Cluster) -> Iterator[str]:
    for each in cluster.of("HorizontalPodAutoscaler"):
        name, spec = each["metadata"]["name"], each["spec"]
        target = spec["scaleTargetRef"]
        deployment = cluster.named("Deployment", target["name"])
        if (target["kind"], target["apiVersion"]) != ("Deployment", "apps/v1") or deployment is None:
            yield f"HorizontalPodAutoscaler {name}: there is no {target}"
            continue
        if "replicas" in deployment["spec"]:
            yield f"Deployment {target['name']}: its replicas would undo those of its autoscaler"
        if not 1 <= spec["minReplicas"] <= spec["maxReplicas"]:
            yield f"HorizontalPodAutoscaler {name}: {spec['minReplicas']} to {spec['maxReplicas']} replicas"
        for metric in spec["metrics"]:
            yield from _metric(cluster, name, target["name"], metric)
    scaled = {each["metadata"]["name"] for each in cluster.of("HorizontalPodAutoscaler")}
    if scaled and scaled != {each["metadata"]["name"] for each in cluster.of("Deployment")} - FIXED:
        yield f"only {sorted(scaled)} are scaled"


def _metric(cluster: Cluster, name: str, deployment: str, metric: Object) -> Iterator[str]:
    where = f"HorizontalPodAutoscaler {name}"
    if metric["type"] == "Resource":
        resource = metric["resource"]["name"]
        if resource not in pod_of(cluster.get("Deployment", deployment))["containers"][0]["resources"]["requests"]:
            yield f"{where}: pods request no {resource}, of which it would take a share"
        if metric["resource"]["target"]["type"] != "Utilization":
            yield f"{where}: a share is a Utilization"
        return
    wanted, target = metric["pods"]["metric"]["name"], metric["pods"]["target"]
    limits = {family.name: _LIMIT for family in metrics.IN_FLIGHT.collect()}
    if deployment == "gateway":
        limits = {family.name: limit for gauge, limit in GATEWAY_LIMITS.items() for family in gauge.collect()}
    rules = (ROOT / "deploy/k8s/monitoring/prometheus-adapter.yaml").read_text()
    if wanted not in limits or f"seriesQuery: '{wanted}{{" not in rules or f"as: {wanted}" not in rules:
        yield f"{where}: nobody provides {wanted}"
    if target["type"] != "AverageValue":
        yield f"{where}: of pods only an AverageValue can be the target"
    elif (
        not 0 < float(target.get("averageValue", 0)) < getattr(cluster.settings(deployment), limits.get(wanted, _LIMIT))
    ):
        yield f"{where}: only acts once requests are refused, or never"
