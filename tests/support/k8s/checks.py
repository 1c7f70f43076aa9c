"""What the objects of one rendered overlay must be to each other; schemas say nothing of that.

`problems(objects)` gives a line for each thing that is wrong.
"""

import re
from collections.abc import Iterator
from typing import Any

from tests.support.k8s.edges import routing_problems
from tests.support.k8s.lifecycle import lifecycle_problems
from tests.support.k8s.objects import USER, Cluster, Object, containers, pod_of, settings_classes
from tests.support.k8s.resources import resource_problems

# By "parent.key" or "key": the values the API server takes there, as far as these manifests use the key.
ENUMS = {
    "protocol": {"TCP", "UDP", "SCTP"},
    "imagePullPolicy": {"Always", "IfNotPresent", "Never"},
    "strategy.type": {"RollingUpdate", "Recreate"},
    "seccompProfile.type": {"RuntimeDefault"},
    "whenUnsatisfiable": {"DoNotSchedule", "ScheduleAnyway"},
    "topologyKey": {"kubernetes.io/hostname", "topology.kubernetes.io/zone"},
    "fsGroupChangePolicy": {"Always", "OnRootMismatch"},
    "unhealthyPodEvictionPolicy": {"AlwaysAllow", "IfHealthyBudget"},
    "policyTypes": {"Ingress", "Egress"},
    "accessModes": {"ReadWriteOnce", "ReadOnlyMany", "ReadWriteMany", "ReadWriteOncePod"},
    "pathType": {"Exact", "Prefix", "ImplementationSpecific"},
    "sessionAffinity": {"None", "ClientIP"},
    "medium": {"", "Memory"},
    "effect": {"NoSchedule", "PreferNoSchedule", "NoExecute"},
    "tolerations.operator": {"Exists", "Equal"},
    "matchExpressions.operator": {"In", "NotIn", "Exists", "DoesNotExist"},
    "metrics.type": {"Resource", "Pods", "ContainerResource", "External", "Object"},
    "target.type": {"Utilization", "Value", "AverageValue"},
    "policies.type": {"Pods", "Percent"},
    "drop": {"ALL"},
    "pod-security.kubernetes.io/enforce": {"restricted"},
}


def problems(objects: list[Object]) -> list[str]:
    """Everything wrong with the objects of one overlay."""
    cluster = Cluster(objects)
    checks = (
        _selectors,
        _security,
        _volumes,
        lifecycle_problems,
        _services,
        resource_problems,
        _enums,
        routing_problems,
    )
    found = [*_names(cluster), *_environment(cluster)]
    # without settings that load, the other checks have nothing to compare with
    return found or [line for check in checks for line in check(cluster)]


def _names(cluster: Cluster) -> Iterator[str]:
    spaces = {each["metadata"]["name"] for each in cluster.of("Namespace")}
    seen = set()
    for each in cluster.objects:
        name = (each["kind"], each["metadata"]["name"])
        if name in seen:
            yield f"{name} is there twice"
        seen.add(name)
        if not re.fullmatch(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?", name[1]):
            yield f"{name}: no DNS label"
        if each["kind"] != "Namespace" and each["metadata"].get("namespace") not in spaces:
            yield f"{name}: namespace {each['metadata'].get('namespace')} is not among the objects"


def _selectors(cluster: Cluster) -> Iterator[str]:
    for each in cluster.of("Deployment"):
        name = each["metadata"]["name"]
        for what, labels in [
            ("selector", each["spec"]["selector"]["matchLabels"]),
            *(("spread", s["labelSelector"]["matchLabels"]) for s in pod_of(each)["topologySpreadConstraints"]),
        ]:
            if cluster.selected(labels) != [name]:
                yield f"Deployment {name}: its {what} selects the pods of {cluster.selected(labels)}"
        if not cluster.named("PodDisruptionBudget", name):
            yield f"Deployment {name} has no PodDisruptionBudget"
        if {s["topologyKey"] for s in pod_of(each)["topologySpreadConstraints"]} != ENUMS["topologyKey"]:
            yield f"Deployment {name} is not spread over nodes and zones"
    for each in cluster.of("PodDisruptionBudget"):
        name = each["metadata"]["name"]
        if cluster.selected(each["spec"]["selector"]["matchLabels"]) != [name]:
            yield f"PodDisruptionBudget {name} selects {cluster.selected(each['spec']['selector']['matchLabels'])}"
        if each["spec"].get("maxUnavailable") != 1:
            yield f"PodDisruptionBudget {name}: a single replica could not be moved"


def _security(cluster: Cluster) -> Iterator[str]:
    for each in cluster.of("Deployment"):
        name, pod = each["metadata"]["name"], pod_of(each)
        wanted = {"runAsNonRoot": True, "runAsUser": USER, "runAsGroup": USER, "fsGroup": USER}
        context = pod.get("securityContext", {})
        if {key: context.get(key) for key in wanted} != wanted:
            yield f"Deployment {name}: securityContext is not that of user {USER}"
        if context.get("seccompProfile") != {"type": "RuntimeDefault"}:
            yield f"Deployment {name}: no seccomp profile"
        if pod.get("automountServiceAccountToken") is not False or pod.get("enableServiceLinks") is not False:
            yield f"Deployment {name}: a token or the services' addresses get into its pods"
        if {"hostNetwork", "hostPID", "hostIPC"} & set(pod):
            yield f"Deployment {name} shares a namespace with its node"
        for container in containers(pod):
            wanted = {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }
            if container.get("securityContext") != wanted:
                yield f"Deployment {name}, container {container['name']}: securityContext is not {wanted}"


def _volumes(cluster: Cluster) -> Iterator[str]:
    used_maps = set()
    for each in cluster.of("Deployment"):
        name, pod = each["metadata"]["name"], pod_of(each)
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        mounted = set()
        for container in containers(pod):
            where = f"Deployment {name}, container {container['name']}"
            paths = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
            mounted |= set(paths.values())
            if len(paths) < len(container["volumeMounts"]):
                yield f"{where}: two volumes at one path"
            for volume in set(paths.values()) - set(volumes):
                yield f"{where}: mounts {volume}, which is no volume"
            if "emptyDir" not in volumes.get(paths.get("/tmp"), {}):
                yield f"{where}: nothing to write at /tmp"
            if name != "gateway" and paths.get("/models") != "models":
                yield f"{where}: no models at /models"
        for volume in set(volumes) - mounted:
            yield f"Deployment {name}: nobody mounts {volume}"
        for volume in volumes.values():
            kinds = set(volume) - {"name"}
            if len(kinds) != 1 or not kinds < {"emptyDir", "configMap", "persistentVolumeClaim", "secret"} | {""}:
                yield f"Deployment {name}: volume {volume['name']} is {kinds}"
            claim = volume.get("persistentVolumeClaim", {}).get("claimName")
            if claim and not cluster.named("PersistentVolumeClaim", claim):
                yield f"Deployment {name}: there is no claim {claim}"
            if "configMap" in volume:
                used_maps.add(volume["configMap"]["name"])
                data = cluster.config(volume["configMap"]["name"])
                if data is None:
                    yield f"Deployment {name}: there is no ConfigMap {volume['configMap']['name']}"
                for item in volume["configMap"]["items"]:
                    if item["key"] not in (data or {}):
                        yield f"Deployment {name}: no {item['key']} in ConfigMap {volume['configMap']['name']}"
        for container in containers(pod):
            used_maps |= {source["configMapRef"]["name"] for source in container.get("envFrom", [])}
    for each in cluster.of("ConfigMap"):
        if each["metadata"]["name"] not in used_maps:
            yield f"nobody reads ConfigMap {each['metadata']['name']}"


def _environment(cluster: Cluster) -> Iterator[str]:
    classes = settings_classes()
    for each in cluster.of("Deployment"):
        name = each["metadata"]["name"]
        for container in containers(pod_of(each)):
            for source in container.get("envFrom", []):
                if cluster.config(source["configMapRef"]["name"]) is None:
                    yield f"Deployment {name}: there is no ConfigMap {source['configMapRef']['name']}"
        environment = cluster.environment(name)
        for variable in environment:
            if not variable.startswith("QUARTET_"):
                continue
            setting = variable.removeprefix("QUARTET_").lower()
            stage, _, own = setting.partition("_")
            is_own = stage in classes and own in classes[stage].model_fields
            if not is_own and setting not in classes[name].for_every_process:
                yield f"Deployment {name}: {variable} is no setting"
        try:
            settings = cluster.settings(name)
        except SystemExit as error:
            yield f"Deployment {name}: {error}"
            continue
        if settings.host != "0.0.0.0":
            yield f"Deployment {name} listens on {settings.host}: neither its probes nor its peers reach it"
        for setting in ("tls_cert", "tls_key", "tls_ca", "api_keys_file", "signing_key_file"):
            file = getattr(settings, setting, None)
            if file is not None and str(file.parent) not in _secret_mounts(pod_of(each)):
                yield f"Deployment {name}: no Secret is mounted at {file.parent}, for {setting}"
        ports = {port["containerPort"] for port in pod_of(each)["containers"][0]["ports"]}
        wanted = {settings.port} if name == "gateway" else {settings.port, settings.metrics_port}
        if ports != wanted:
            yield f"Deployment {name}: containerPorts {ports}, but it listens on {wanted}"


def _secret_mounts(pod: Object) -> dict[str, str]:
    """Names of the Secrets that the first container reads, by directory."""
    secrets = {volume["name"]: volume["secret"]["secretName"] for volume in pod["volumes"] if "secret" in volume}
    mounts = pod["containers"][0]["volumeMounts"]
    return {mount["mountPath"]: secrets[mount["name"]] for mount in mounts if mount["name"] in secrets}


def _services(cluster: Cluster) -> Iterator[str]:
    for each in cluster.of("Deployment"):
        if not cluster.named("Service", each["metadata"]["name"]):
            yield f"Deployment {each['metadata']['name']} has no Service"
    for each in cluster.of("Service"):
        name, spec = each["metadata"]["name"], each["spec"]
        if cluster.selected(spec["selector"]) != [name]:
            yield f"Service {name} selects the pods of {cluster.selected(spec['selector'])}"
            continue
        ports = {
            port["name"]: port["containerPort"]
            for port in pod_of(cluster.get("Deployment", name))["containers"][0]["ports"]
        }
        for port in spec["ports"]:
            target = port["targetPort"]
            if ports.get(target, target) != port["port"]:
                yield f"Service {name}: port {port['port']} leads to {ports.get(target)} ({target})"
            if port["name"] not in ports:
                yield f"Service {name}: its pods have no port {port['name']}"
        if name != "gateway" and (spec.get("clusterIP"), spec.get("publishNotReadyAddresses")) != ("None", True):
            yield f"Service {name}: the gateway does not see each of its replicas"


def _enums(cluster: Cluster) -> Iterator[str]:
    for each in cluster.objects:
        for path, value in _leaves(each):
            for allowed in (ENUMS.get(path.rpartition(".")[2]), ENUMS.get(".".join(path.split(".")[-2:]))):
                if allowed is not None and value not in allowed:
                    yield f"{each['kind']} {each['metadata']['name']}: {path} {value!r} is none of {sorted(allowed)}"


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, list):
        for element in value:
            yield from _leaves(element, path)
    elif isinstance(value, dict):
        for key, member in value.items():
            yield from _leaves(member, f"{path}.{key}" if "/" not in key else key)
    else:
        yield path, value
