"""Ways to break an overlay, each of which a check must find."""

from typing import Any

from tests.support.k8s.objects import Object

ABBREVIATIONS = {
    "POD": ["spec", "template", "spec"],
    "FIRST": ["spec", "template", "spec", "containers", 0],
    "COMPONENT": ["app.kubernetes.io/component"],
}
# What is broken: (kind, beginning of the name and path of a value, separated by spaces; what it becomes, None: gone).
BREAKS: dict[str, tuple[str, Any]] = {
    "a selector that matches no label": ("Service talker spec selector COMPONENT", "speaker"),
    "a selector of another's pods": ("Service talker spec selector COMPONENT", "thinker"),
    "a deployment's own": ("Deployment talker spec selector matchLabels COMPONENT", "thinker"),
    "a spread": ("Deployment talker POD topologySpreadConstraints 0 labelSelector matchLabels COMPONENT", "x"),
    "a budget": ("PodDisruptionBudget dit spec selector matchLabels COMPONENT", "x"),
    "a Service's target": ("Service talker spec ports 0 targetPort", "http"),
    "a Service's port": ("Service talker spec ports 0 port", 50051),
    "a Service with one address": ("Service talker spec clusterIP", None),
    "a container port": ("Deployment talker FIRST ports 0 containerPort", 50053),
    "a probe's port": ("Deployment talker FIRST startupProbe grpc port", 50051),
    "a probe's service": ("Deployment talker FIRST readinessProbe grpc service", "quartet.v1.Talker"),
    "liveness by readiness": ("Deployment dit FIRST livenessProbe grpc service", "quartet.v1.DitService"),
    "a probe's path": ("Deployment gateway FIRST livenessProbe httpGet path", "/ready"),
    "a gateway that waits for all": ("Deployment gateway FIRST startupProbe httpGet path", "/ready"),
    "a start too short": ("Deployment thinker FIRST startupProbe failureThreshold", 30),
    "a gateway that does not wait for the stages": ("Deployment gateway FIRST startupProbe failureThreshold", 3500),
    "a start that is a failed rollout": ("Deployment thinker spec progressDeadlineSeconds", None),
    "a rollout's deadline": ("Deployment gateway spec progressDeadlineSeconds", 10800),
    "a mount": ("Deployment talker FIRST volumeMounts 0 name", "temporary"),
    "nowhere to write": ("Deployment talker FIRST volumeMounts 0 mountPath", "/scratch"),
    "a claim": ("Deployment talker POD volumes 2 persistentVolumeClaim claimName", "model"),
    "a ConfigMap": ("Deployment talker FIRST envFrom 1 configMapRef name", "talker-settings"),
    "a pipeline's key": ("Deployment gateway POD volumes 3 configMap items 0 key", "qwen.yaml"),
    "a pipeline's path": ("Deployment gateway FIRST volumeMounts 2 mountPath", "/etc/pipeline"),
    "another pipeline": ("Deployment gateway POD volumes 3 configMap items 0 key", "qwen3-omni.yaml"),
    "a setting's name": ("ConfigMap talker-settings data QUARTET_TALKER_MAX_REQUESTS", "3"),
    "a setting's value": ("ConfigMap talker-settings data QUARTET_TALKER_MAX_RUNNING_REQUESTS", "many"),
    "an address": ("ConfigMap gateway-settings data QUARTET_GATEWAY_STAGE", '{"talker": "dns:///talker:1"}'),
    "keys that nobody mounts": ("Deployment gateway FIRST volumeMounts 1 mountPath", "/keys"),
    "a signing key that nobody mounts": (
        "ConfigMap gateway-settings data QUARTET_GATEWAY_SIGNING_KEY_FILE",
        "/run/quartet/signing.key",
    ),
    "no keys": ("ConfigMap gateway-settings data QUARTET_GATEWAY_API_KEYS_FILE", None),
    "loopback": ("ConfigMap talker-settings data QUARTET_TALKER_HOST", "127.0.0.1"),
    "another model": ("ConfigMap model data QUARTET_TALKER_MODEL", "Qwen/Other"),
    "a model nobody makes": ("ConfigMap model data QUARTET_DIT_MODEL", "/models/dit"),
    "a drain too short": ("ConfigMap dit-settings data QUARTET_DIT_DRAIN_TIMEOUT_S", "60"),
    "a request too long": ("ConfigMap gateway-settings data QUARTET_GATEWAY_VIDEO_TIMEOUT_S", "3600"),
    "a grace too short": ("Deployment talker POD terminationGracePeriodSeconds", 60),
    "a grace too long": ("Deployment talker POD terminationGracePeriodSeconds", 630),
    "no preStop": ("Deployment talker FIRST lifecycle", None),
    "a rollout with a gap": ("Deployment talker spec strategy rollingUpdate maxUnavailable", 1),
    "root": ("Deployment talker POD securityContext runAsUser", 0),
    "a writable root": ("Deployment talker FIRST securityContext readOnlyRootFilesystem", False),
    "no seccomp": ("Deployment talker POD securityContext seccompProfile", None),
    "a capability": ("Deployment talker FIRST securityContext capabilities", {"add": ["SYS_ADMIN"]}),
    "an image": ("Deployment talker FIRST image", "quartet/talker:0.1.0"),
    "a tag": ("Deployment talker FIRST image", "quartet-talker:latest"),
    "a quantity": ("Deployment talker FIRST resources limits memory", "24GB"),
    "a request above its limit": ("Deployment talker FIRST resources requests memory", "48Gi"),
    "too little shared memory": ("Deployment talker POD volumes 1 emptyDir sizeLimit", "64Mi"),
    "shared memory on a disk": ("Deployment talker POD volumes 1 emptyDir medium", None),
    "shared memory elsewhere": ("Deployment talker FIRST volumeMounts 1 mountPath", "/shm"),
    "more ranks than GPUs": ("ConfigMap thinker-settings data QUARTET_THINKER_TENSOR_PARALLEL_SIZE", "2"),
    "more GPUs than ranks": ("Deployment thinker FIRST resources limits nvidia.com/gpu", 2),
    "a taint": ("Deployment talker POD tolerations", None),
    "a claim's quantity": ("PersistentVolumeClaim models spec resources requests storage", "200 Gi"),
    "an access mode": ("PersistentVolumeClaim models spec accessModes", ["ReadWriteAll"]),
    "a pull policy": ("Deployment talker FIRST imagePullPolicy", "IfAbsent"),
    "a spread's action": ("Deployment talker POD topologySpreadConstraints 0 whenUnsatisfiable", "Whatever"),
    "a strategy": ("Deployment talker spec strategy type", "Rolling"),
    "an Ingress of nobody": ("Ingress gateway spec ingressClassName", None),
    "a path type": ("Ingress gateway spec rules 0 http paths 0 pathType", "Begin"),
    "an Ingress's service": ("Ingress gateway spec rules 0 http paths 0 backend service name", "api"),
    "a path of the API that is not reached": ("Ingress gateway spec rules 0 http paths 3 path", "/tokens"),
    "all paths": ("Ingress gateway spec rules 0 http paths 0 path", "/"),
    "an autoscaler's target": ("HorizontalPodAutoscaler talker spec scaleTargetRef name", "speaker"),
    "its metric": ("HorizontalPodAutoscaler talker spec metrics 0 pods metric name", "quartet_queue"),
    "its metric's type": ("HorizontalPodAutoscaler talker spec metrics 0 pods target type", "Average"),
    "its value": ("HorizontalPodAutoscaler talker spec metrics 0 pods target averageValue", "64"),
    "a gateway's metric": (
        "HorizontalPodAutoscaler gateway spec metrics 1 pods metric name",
        "quartet_requests_in_flight",
    ),
    "a gateway's value": ("HorizontalPodAutoscaler gateway spec metrics 2 pods target averageValue", "256"),
    "a database's setting": ("Deployment gateway FIRST env 0 name", "QUARTET_GATEWAY_DATABASE"),
    "a gateway that says another port": ("Deployment gateway FIRST env 2 value", "http://$(POD_ADDRESS):80"),
    "a gateway that says nothing": ("Deployment gateway FIRST env 2 name", "QUARTET_GATEWAY_PUBLISHED_HOST"),
    "gateways out of reach": ("NetworkPolicy gateway-to-gateway spec egress 0 ports 0 port", 8001),
    "a claim of one node": ("PersistentVolumeClaim gateway-files spec accessModes", ["ReadWriteOnce"]),
    "a client's own gateway": ("Service gateway spec sessionAffinity", "ClientIP"),
    "its bounds": ("HorizontalPodAutoscaler talker spec minReplicas", 99),
    "replicas beside it": ("Deployment talker spec replicas", 3),
    "cpu that is not requested": ("Deployment gateway FIRST resources requests cpu", None),
    "a policy's pods": ("NetworkPolicy talker spec podSelector matchLabels COMPONENT", "speaker"),
    "a policy's peer": ("NetworkPolicy talker spec ingress 0 from 1 podSelector matchLabels COMPONENT", "dit"),
    "a policy's port": ("NetworkPolicy talker-to-thinker spec egress 0 ports 0 port", 50052),
    "a policy's protocol": ("NetworkPolicy talker spec ingress 0 ports 0 protocol", "HTTP"),
    "a policy for all": ("NetworkPolicy talker spec ingress 0", {}),
    "no DNS": ("NetworkPolicy dns spec egress", []),
    "a namespace": ("Service talker metadata namespace", "default"),
}

# The same of components/inference-pool.
POOL_BREAKS: dict[str, tuple[str, Any]] = {
    "a selector of another's pods": ("InferencePool quartet spec selector matchLabels COMPONENT", "thinker"),
    "a port of no pod": ("InferencePool quartet spec targetPorts 0 number", 8080),
    "a picker of another name": ("InferencePool quartet spec endpointPickerRef name", "epp"),
    "a picker's port": ("InferencePool quartet spec endpointPickerRef port number", 9003),
    "a failure mode": ("InferencePool quartet spec endpointPickerRef failureMode", "Open"),
    "a field of an older pool": ("InferencePool quartet spec targetPortNumber", 8000),
    "a pool of another name": ("HTTPRoute quartet spec rules 0 backendRefs 0 name", "pool"),
    "a path that the picker cannot read": ("HTTPRoute quartet spec rules 0 matches 0 path value", "/v1/audio/speech"),
    "a request without a body": ("HTTPRoute quartet spec rules 0 matches 0 method", "GET"),
    "a path for the inside": ("HTTPRoute quartet spec rules 1 matches 0 path value", "/"),
    "a Service's port": ("HTTPRoute quartet spec rules 1 backendRefs 0 port", 80),
    "a picker of another pool": ("Deployment endpoint-picker FIRST args 0", "--pool-name=other"),
    "a configuration elsewhere": ("Deployment endpoint-picker FIRST volumeMounts 0 mountPath", "/etc/config"),
    "a probe's port": ("Deployment endpoint-picker FIRST readinessProbe grpc port", 9002),
    "an image that changes": ("Deployment endpoint-picker FIRST image", "picker:main"),
    "an experiment that is refused": ("Deployment endpoint-picker FIRST args 3", "--allow-experimental-plugins=false"),
    "root": ("Deployment endpoint-picker POD securityContext runAsNonRoot", False),
    "a capability": ("Deployment endpoint-picker FIRST securityContext capabilities", {}),
    "a namespace that it does not know": ("Deployment endpoint-picker FIRST env", []),
    "an account that is not there": ("Deployment endpoint-picker POD serviceAccountName", "default"),
    "a Service's pods": ("Service endpoint-picker spec selector app.kubernetes.io/name", "quartet"),
    "a Service's target": ("Service endpoint-picker spec ports 0 targetPort", "http"),
    "a binding to nobody": ("RoleBinding endpoint-picker subjects 0 name", "picker"),
    "a binding in another namespace": ("RoleBinding endpoint-picker subjects 0 namespace", "default"),
    "a role that is not there": ("RoleBinding endpoint-picker roleRef name", "picker"),
    "pods that it may not watch": ("Role endpoint-picker rules 0 resources", ["services"]),
    "a right to write": ("Role endpoint-picker rules 0 verbs", ["get", "watch", "list", "delete"]),
    "a policy for others": ("NetworkPolicy endpoint-picker spec podSelector", {}),
    "metrics out of reach": ("NetworkPolicy endpoint-picker spec egress 0 ports 0 port", 9090),
    "an API server out of reach": ("NetworkPolicy endpoint-picker spec egress 1 ports 0 port", 80),
    "proxies that do not reach it": ("NetworkPolicy endpoint-picker spec ingress 0 ports 0 port", 9003),
}

# The same of components/webrtc.
CALLS_BREAKS: dict[str, tuple[str, Any]] = {
    "a second process": ("Deployment webrtc spec replicas", 2),
    "another port of the nodes": ("Service webrtc-calls spec ports 0 nodePort", 30479),
    "a port of another protocol": ("Service webrtc-calls spec ports 0 protocol", "TCP"),
    "a port that nobody listens on": ("Deployment webrtc FIRST ports 1 containerPort", 3479),
    "a Service's type": ("Service webrtc-calls spec type", "HostPort"),
    "UDP kept out": ("NetworkPolicy webrtc spec ingress 0 ports 0 protocol", "TCP"),
    "a gateway kept out": ("NetworkPolicy webrtc spec ingress 1 from 0 podSelector matchLabels COMPONENT", "thinker"),
    "Prometheus kept out": ("NetworkPolicy webrtc spec ingress 1 from 1 namespaceSelector", None),
    "sessions out of reach": ("NetworkPolicy webrtc spec egress 0 ports 0 port", 8001),
    "calls out of reach": ("NetworkPolicy gateway-to-webrtc spec egress 0 ports 0 port", 8091),
    "a gateway elsewhere": ("ConfigMap webrtc-settings data QUARTET_WEBRTC_GATEWAY", "http://gateway:80"),
    "a process elsewhere": ("ConfigMap gateway-settings data QUARTET_GATEWAY_WEBRTC", "http://webrtc:80"),
    "an address that is none": ("Deployment webrtc FIRST env 1 value", "node"),
    "loopback": ("ConfigMap webrtc-settings data QUARTET_WEBRTC_HOST", "127.0.0.1"),
    "a probe's path": ("Deployment webrtc FIRST livenessProbe httpGet path", "/"),
    "an image of a stage": ("Deployment webrtc FIRST image", "quartet-thinker:0.2.0-cuda"),
}


def break_it(objects: list[Object], where: str, to: Any) -> None:
    """Changes one value in `objects`."""
    kind, name, *parts = where.split()
    path: list[Any] = []
    for part in parts:
        path += ABBREVIATIONS.get(part, [int(part) if part.isdigit() else part])
    place: Any = next(each for each in objects if each["kind"] == kind and each["metadata"]["name"].startswith(name))
    for part in path[:-1]:
        place = place[part]
    if to is None:
        del place[path[-1]]
    else:
        place[path[-1]] = to
