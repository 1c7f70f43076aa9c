"""The objects of components/inference-pool: who is chosen, who chooses, and who asks, against the other objects.

Facts of the kinds that no Kubernetes knows by itself are those of their own releases: InferencePool v1, and the
configuration of llm-d's router 0.10.0.
"""

from collections.abc import Iterator
from typing import Any

import yaml

from tests.support.k8s.edges import published_problems
from tests.support.k8s.objects import PORTS, Cluster, Object, containers, pod_of

PICKER = "endpoint-picker"
POOLS, ROUTES = "inference.networking.k8s.io", "gateway.networking.k8s.io"
POOL_FIELDS = {"selector", "targetPorts", "appProtocol", "endpointPickerRef"}
# What the picker's plugins read of a gateway's /metrics.
METRICS = {
    "vllm:num_requests_waiting",
    "vllm:num_requests_running",
    "vllm:kv_cache_usage_perc",
    "vllm:cache_config_info",
    "vllm:lora_requests_info",
}
# Ends of the paths whose bodies its parsers read; it refuses those of all others.
PARSED = {
    "openai-parser": ("/chat/completions", "/completions", "/responses", "/images/generations"),
    "vllmhttp-parser": ("/inference/v1/generate",),
}
KNOWN_PLUGINS = {
    *PARSED,
    "metrics-data-source",
    "core-metrics-extractor",
    "queue-scorer",
    "kv-cache-utilization-scorer",
    "prefix-cache-scorer",
    "lora-affinity-scorer",
    "session-affinity-scorer",
}
EXPERIMENTAL = {"session-affinity-scorer"}
WATCHED = {("", "pods"), (POOLS, "inferencepools")}


def split(objects: list[Object]) -> tuple[list[Object], list[Object]]:
    """(Quartet's own objects, those of the component)."""
    own = [each for each in objects if not _is_of_pool(each)]
    return own, [each for each in objects if _is_of_pool(each)]


def _is_of_pool(each: Object) -> bool:
    return (
        PICKER in each["metadata"]["name"]
        or each["kind"] in ("InferencePool", "HTTPRoute")
        or each["metadata"].get("labels", {}).get("app.kubernetes.io/name") == PICKER
    )


def pool_problems(objects: list[Object]) -> list[str]:
    """What is wrong with the component's objects, a line each."""
    cluster = Cluster(objects)
    checks = (_pool, _route, _picker, _service, _rights, _network)
    return [line for check in checks for line in check(cluster)]


def _only(cluster: Cluster, kind: str) -> Object:
    (found,) = cluster.of(kind)
    return found


def _pool(cluster: Cluster) -> Iterator[str]:
    pool = _only(cluster, "InferencePool")
    spec = pool["spec"]
    if pool["apiVersion"] != f"{POOLS}/v1" or set(spec) != POOL_FIELDS or set(spec["selector"]) != {"matchLabels"}:
        yield f"InferencePool: {pool['apiVersion']} {sorted(spec)}"
    if cluster.selected(spec["selector"]["matchLabels"]) != ["gateway"]:
        yield f"InferencePool: selects the pods of {cluster.selected(spec['selector']['matchLabels'])}"
    ports = {port["containerPort"] for port in pod_of(cluster.get("Deployment", "gateway"))["containers"][0]["ports"]}
    if [port["number"] for port in spec["targetPorts"]] != sorted(ports):
        yield f"InferencePool: ports {spec['targetPorts']}, the gateway's pods have {ports}"
    if spec["appProtocol"] not in ("http", "kubernetes.io/h2c"):
        yield f"InferencePool: appProtocol {spec['appProtocol']}"
    picker = spec["endpointPickerRef"]
    if picker["failureMode"] not in ("FailOpen", "FailClose") or set(picker) != {"name", "port", "failureMode"}:
        yield f"InferencePool: {picker}"
    service = cluster.named("Service", picker["name"])
    if service is None or picker["port"]["number"] not in [port["port"] for port in service["spec"]["ports"]]:
        yield f"InferencePool: no Service with the port of {picker}"


def _route(cluster: Cluster) -> Iterator[str]:
    route = _only(cluster, "HTTPRoute")
    if route["apiVersion"] != f"{ROUTES}/v1" or set(route["spec"]) != {"parentRefs", "rules"}:
        yield f"HTTPRoute: {route['apiVersion']} {sorted(route['spec'])}"
    if cluster.settings("gateway").api_keys_file is None:
        yield "HTTPRoute: without API keys"
    parsed = [
        end for parser in _configuration(cluster)["requestHandler"]["parsers"] for end in PARSED[parser["pluginRef"]]
    ]
    for rule in route["spec"]["rules"]:
        (backend,) = rule["backendRefs"]
        paths = [match["path"] for match in rule["matches"]]
        if backend.get("kind") == "InferencePool":
            if (backend["group"], cluster.named("InferencePool", backend["name"])) in (
                (POOLS, None),
            ) or "port" in backend:
                yield f"HTTPRoute: no pool {backend}"
            for match in rule["matches"]:
                if match["path"]["type"] != "Exact" or not match["path"]["value"].endswith(tuple(parsed)):
                    yield f"HTTPRoute: the picker refuses the bodies of {match['path']}"
                if match.get("method") != "POST":
                    yield f"HTTPRoute: {match} is of a method without a body"
        else:
            service = cluster.named("Service", backend["name"])
            if service is None or backend["port"] not in [port["port"] for port in service["spec"]["ports"]]:
                yield f"HTTPRoute: no Service {backend}"
        if backend.get("kind") != "InferencePool":
            open_paths = [(path["value"], path["type"] == "PathPrefix") for path in paths]
            yield from published_problems("HTTPRoute", open_paths)


def _configuration(cluster: Cluster) -> Any:
    (volume,) = [each for each in pod_of(cluster.get("Deployment", PICKER))["volumes"] if "configMap" in each]
    return yaml.safe_load((cluster.config(volume["configMap"]["name"]) or {})["plugins.yaml"])


def _picker(cluster: Cluster) -> Iterator[str]:
    deployment = cluster.get("Deployment", PICKER)
    pod, spec = pod_of(deployment), deployment["spec"]
    if cluster.selected(spec["selector"]["matchLabels"]) != [PICKER] or spec["replicas"] != 1:
        yield "the picker's selector is not its own, or there are several"
    context, (container,) = pod["securityContext"], containers(pod)
    if not context["runAsNonRoot"] or context["seccompProfile"] != {"type": "RuntimeDefault"}:
        yield "the picker's pod is not as the namespace wants it"
    if container["securityContext"] != {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }:
        yield "the picker's container is not as the namespace wants it"
    if container["image"].rpartition(":")[2] in ("", "latest", "main"):
        yield f"the picker's image {container['image']} is none that stays"
    options = dict(argument.removeprefix("--").split("=", 1) for argument in container["args"])
    if (options["pool-name"], options["pool-group"]) != (_only(cluster, "InferencePool")["metadata"]["name"], POOLS):
        yield f"the picker looks for the pool {options['pool-name']} of {options['pool-group']}"
    mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
    folder, _, file = options["config-file"].rpartition("/")
    volumes = {volume["name"]: volume["configMap"]["name"] for volume in pod["volumes"]}
    if file not in (cluster.config(volumes[mounts.get(folder, "")]) or {} if folder in mounts else {}):
        yield f"the picker finds no {options['config-file']}"
    named = {plugin["type"] for plugin in _configuration(cluster)["plugins"]}
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    for probe in ("readinessProbe", "livenessProbe"):
        if str(container[probe]["grpc"]["port"]) != options["grpc-health-port"] or ports["grpc-health"] != int(
            options["grpc-health-port"]
        ):
            yield f"the picker's {probe} asks a port that does not tell"
    if named & EXPERIMENTAL and options.get("allow-experimental-plugins") != "true":
        yield f"the picker refuses {sorted(named & EXPERIMENTAL)}, which are experimental"
    if {each["name"] for each in container["env"]} != {"NAMESPACE", "POD_NAME"}:
        yield "the picker does not know its namespace"
    profiles = _configuration(cluster)["schedulingProfiles"]
    used = {plugin["pluginRef"] for profile in profiles for plugin in profile["plugins"]}
    if named - KNOWN_PLUGINS or used - named:
        yield f"the picker has no {sorted((named - KNOWN_PLUGINS) | (used - named))}"


def _service(cluster: Cluster) -> Iterator[str]:
    service = cluster.get("Service", PICKER)
    if cluster.selected(service["spec"]["selector"]) != [PICKER]:
        yield f"Service {PICKER} selects {cluster.selected(service['spec']['selector'])}"
    (container,) = containers(pod_of(cluster.get("Deployment", PICKER)))
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    for port in service["spec"]["ports"]:
        if ports.get(port["targetPort"]) != port["port"]:
            yield f"Service {PICKER}: {port} leads nowhere"


def _rights(cluster: Cluster) -> Iterator[str]:
    account = pod_of(cluster.get("Deployment", PICKER))["serviceAccountName"]
    if cluster.named("ServiceAccount", account) is None:
        yield f"there is no ServiceAccount {account}"
    binding, role = _only(cluster, "RoleBinding"), _only(cluster, "Role")
    spaces = {each["metadata"]["namespace"] for each in (binding, role, _only(cluster, "InferencePool"))}
    if (
        binding["subjects"] != [{"kind": "ServiceAccount", "name": account, "namespace": next(iter(spaces))}]
        or len(spaces) > 1
    ):
        yield f"the RoleBinding is for {binding['subjects']}"
    wanted = {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": role["metadata"]["name"]}
    if binding["roleRef"] != wanted:
        yield f"the RoleBinding gives {binding['roleRef']}"
    may = {(group, what) for rule in role["rules"] for group in rule["apiGroups"] for what in rule["resources"]}
    if not may >= WATCHED or any(set(rule["verbs"]) != {"get", "watch", "list"} for rule in role["rules"]):
        yield f"the picker may not watch {sorted(WATCHED - may)}"


def _network(cluster: Cluster) -> Iterator[str]:
    policy = cluster.get("NetworkPolicy", PICKER)["spec"]
    if cluster.selected_by(policy["podSelector"]) != [PICKER] or set(policy["policyTypes"]) != {"Ingress", "Egress"}:
        yield f"NetworkPolicy {PICKER} is for {cluster.selected_by(policy['podSelector'])}"
    scraped = [
        rule
        for rule in policy["egress"]
        if any(
            cluster.selected_by(peer["podSelector"]) == ["gateway"]
            for peer in rule.get("to", [])
            if "podSelector" in peer
        )
        and {"protocol": "TCP", "port": PORTS["gateway"]} in rule["ports"]
    ]
    open_to_all = [rule for rule in cluster.get("NetworkPolicy", "gateway")["spec"]["ingress"] if "from" not in rule]
    if not scraped or not any({"protocol": "TCP", "port": PORTS["gateway"]} in rule["ports"] for rule in open_to_all):
        yield "the picker does not reach the gateways' /metrics"
    asked = [port["port"] for rule in policy["ingress"] if "from" not in rule for port in rule["ports"]]
    if asked != [_only(cluster, "InferencePool")["spec"]["endpointPickerRef"]["port"]["number"]]:
        yield f"proxies reach {asked} of the picker"
    if 443 not in [port["port"] for rule in policy["egress"] if "to" not in rule for port in rule["ports"]]:
        yield "the picker does not reach the API server"
