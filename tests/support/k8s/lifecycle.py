"""How pods start and end: probes, and how long who waits for whom."""

from collections.abc import Iterator
from typing import Any

from tests.support.k8s.objects import PORTS, SERVICES, Cluster, Object, pod_of

LONGEST_LOAD_S = 7000  # 70 GB at 10 MB/s
NODE_AND_IMAGE_S = 1800  # before a container starts: its node comes up, and pulls its image of 10 GB
AUTOSCALER_WAITS_S = 600  # the cluster autoscaler's default max-graceful-termination-sec


def lifecycle_problems(cluster: Cluster) -> Iterator[str]:
    """What is wrong, a line each."""
    for check in (_probes, _starts, _ends, _exclusive):
        yield from check(cluster)


def _probes(cluster: Cluster) -> Iterator[str]:
    for each in cluster.of("Deployment"):
        name, container = each["metadata"]["name"], pod_of(each)["containers"][0]
        probes = {kind: container.get(f"{kind}Probe", {}) for kind in ("startup", "readiness", "liveness")}
        if name == "gateway":
            found = {kind: probe.get("httpGet") for kind, probe in probes.items()}
            paths = {"startup": "/ready?partly=true", "readiness": "/health", "liveness": "/health"}
            wanted: dict[str, Any] = {kind: {"port": "http", "path": path} for kind, path in paths.items()}
        else:
            names = {"startup": SERVICES[name], "readiness": SERVICES[name], "liveness": ""}
            wanted = {kind: {"port": PORTS[name], "service": service} for kind, service in names.items()}
            found = {kind: probe.get("grpc") for kind, probe in probes.items()}
            if cluster.settings(name).tls_cert is not None:  # kubelet's gRPC probes cannot do TLS
                paths = {"startup": "/ready", "readiness": "/ready", "liveness": "/health"}
                wanted = {kind: {"port": "metrics", "path": path} for kind, path in paths.items()}
                found = {kind: None if "grpc" in probe else probe.get("httpGet") for kind, probe in probes.items()}
        if found != wanted:
            yield f"Deployment {name}: probes {found} instead of {wanted}"


def _starts(cluster: Cluster) -> Iterator[str]:
    longest_s = max(_start_s(each) for each in cluster.of("Deployment"))
    for each in cluster.of("Deployment"):
        name, start_s = each["metadata"]["name"], _start_s(each)
        if start_s < LONGEST_LOAD_S:
            yield f"Deployment {name}: is killed after {start_s} s, before 70 GB of weights are loaded"
        if name == "gateway" and start_s < longest_s:
            yield f"Deployment gateway: is killed after {start_s} s, while stages may take {longest_s} s"
        if each["spec"].get("progressDeadlineSeconds", 600) < start_s + NODE_AND_IMAGE_S:
            yield f"Deployment {name}: a start may take {start_s} s, and is a failed rollout before"


def _start_s(deployment: Object) -> int:
    """How long the startup probe lets it start, in seconds."""
    probe = pod_of(deployment)["containers"][0].get("startupProbe", {})
    return probe.get("periodSeconds", 10) * probe.get("failureThreshold", 3)


def _ends(cluster: Cluster) -> Iterator[str]:
    gateway = cluster.settings("gateway")
    videos = "video" in cluster.pipeline().get("outputs", {})
    longest_s = max(gateway.request_timeout_s, gateway.video_timeout_s if videos else 0)
    for each in cluster.of("Deployment"):
        name, pod = each["metadata"]["name"], pod_of(each)
        drain_s = cluster.settings(name).drain_timeout_s
        stop_s = pod["containers"][0].get("lifecycle", {}).get("preStop", {}).get("sleep", {}).get("seconds", 0)
        if drain_s <= longest_s:
            yield f"Deployment {name}: drains for {drain_s} s, but a request may take {longest_s} s"
        grace_s = pod.get("terminationGracePeriodSeconds", 30)
        if grace_s > AUTOSCALER_WAITS_S:
            yield f"Deployment {name}: terminationGracePeriodSeconds {grace_s}: the autoscaler kills before"
        if grace_s < stop_s + drain_s + 10:
            yield f"Deployment {name}: terminationGracePeriodSeconds cuts its drain of {stop_s} + {drain_s} s short"
        if stop_s < 5:
            yield f"Deployment {name}: no preStop of 5 s, in which the gateway would see its successor"
        strategy = each["spec"].get("strategy", {})
        if strategy.get("type") == "RollingUpdate" and strategy["rollingUpdate"]["maxUnavailable"] != 0:
            yield f"Deployment {name}: a rollout stops pods before others are ready"


def _exclusive(cluster: Cluster) -> Iterator[str]:
    """What one process has, another one cannot have before it is gone: a gateway's claim, whose files are of one machine."""
    gateway = cluster.get("Deployment", "gateway")
    if any("persistentVolumeClaim" in volume for volume in pod_of(gateway)["volumes"]):
        if gateway["spec"]["strategy"] != {"type": "Recreate"}:
            yield "Deployment gateway: a rollout waits for a new pod, and the new pod for the old one's claim"
        if gateway["spec"].get("replicas") != 1 or cluster.named("HorizontalPodAutoscaler", "gateway"):
            yield "Deployment gateway: several would share a claim"
