"""The rendered objects of an overlay, and the questions that checks ask of them."""

import os
import re
import tomllib
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import yaml

from gateway.pipeline.kinds import KINDS
from gateway.settings import GatewaySettings
from gateway.webrtc.settings import WebRtcSettings
from services.aligner.config import AlignerSettings
from services.code2wav.config import Code2WavSettings
from services.common.rpc.settings import Settings
from services.dit.config import DitSettings
from services.embedder.config import EmbedderSettings
from services.talker.config import TalkerSettings
from services.thinker.config import ThinkerSettings

Object = dict[str, Any]
ROOT = Path(__file__).parents[3]
USER = 10001
PORTS = {
    "thinker": 50051,
    "talker": 50052,
    "code2wav": 50053,
    "dit": 50054,
    "asr": 50051,
    "embedder": 50057,
    "aligner": 50059,
    "gateway": 8000,
    "webrtc": 8090,
}
NO_STAGES = ("gateway", "webrtc")
IMAGES = {name: f"quartet-{name}" for name in PORTS} | {"asr": "quartet-thinker", "webrtc": "quartet-gateway"}
OF_ITS_NODE = {"status.hostIP": "192.0.2.7"}  # what a pod is told by a field
OF_ITSELF = {"status.podIP": "192.0.2.8"}
SERVICES = {kind.name: kind.service for kind in KINDS.values()}  # full names of the stages' gRPC services
SERVICES["asr"] = SERVICES["thinker"]


def settings_classes() -> dict[str, type[Settings]]:
    """The settings of each process."""
    return {
        "gateway": GatewaySettings,
        "thinker": ThinkerSettings,
        "talker": TalkerSettings,
        "code2wav": Code2WavSettings,
        "dit": DitSettings,
        "asr": ThinkerSettings,
        "embedder": EmbedderSettings,
        "aligner": AlignerSettings,
        "webrtc": WebRtcSettings,
    }


def pod_of(workload: Object) -> Object:
    """Its pods' spec."""
    return workload["spec"]["template"]["spec"]


def containers(pod: Object) -> list[Object]:
    """All containers of a pod."""
    return pod["containers"] + pod.get("initContainers", [])


class Cluster:
    """The objects of one overlay."""

    def __init__(self, objects: list[Object]) -> None:
        self.objects = objects
        self.version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]

    def of(self, kind: str) -> list[Object]:
        """All objects of a kind."""
        return [each for each in self.objects if each["kind"] == kind]

    def named(self, kind: str, name: str) -> Object | None:
        """The object of that name."""
        return next((each for each in self.of(kind) if each["metadata"]["name"] == name), None)

    def get(self, kind: str, name: str) -> Object:
        """The object of that name, which is there."""
        found = self.named(kind, name)
        assert found is not None, f"no {kind} {name}"
        return found

    def config(self, name: str) -> dict[str, str] | None:
        """What is in a ConfigMap."""
        found = self.named("ConfigMap", name)
        return None if found is None else found["data"]

    def selected(self, labels: dict[str, str]) -> list[str]:
        """Names of the Deployments whose pods have all `labels`."""
        pods = {
            each["metadata"]["name"]: each["spec"]["template"]["metadata"]["labels"] for each in self.of("Deployment")
        }
        return sorted(name for name, has in pods.items() if labels.items() <= has.items())

    def selected_by(self, selector: Object) -> list[str]:
        """The same for a selector that may have expressions (operator In)."""
        names = self.selected(selector.get("matchLabels", {}))
        for expression in selector.get("matchExpressions", []):
            assert expression["operator"] == "In"
            found = {name for value in expression["values"] for name in self.selected({expression["key"]: value})}
            names = [name for name in names if name in found]
        return names

    def environment(self, deployment: str) -> dict[str, str]:
        """Environment variables of its first container, those from Secrets left out."""
        container = pod_of(self.get("Deployment", deployment))["containers"][0]
        found: dict[str, str] = {}
        for source in container.get("envFrom", []):
            found |= self.config(source["configMapRef"]["name"]) or {}
        for each in container.get("env", []):
            if field := each.get("valueFrom", {}).get("fieldRef"):
                found[each["name"]] = (OF_ITS_NODE | OF_ITSELF)[field["fieldPath"]]
            elif "value" in each:  # $(NAME) is what was set before
                found[each["name"]] = re.sub(r"\$\((\w+)\)", lambda name: found[name[1]], each["value"])
        return found

    def from_secrets(self, deployment: str) -> dict[str, tuple[str, str]]:
        """(name, key) of the Secret that each further environment variable of its first container comes from."""
        container = pod_of(self.get("Deployment", deployment))["containers"][0]
        found = {each["name"]: each.get("valueFrom", {}).get("secretKeyRef") for each in container.get("env", [])}
        return {name: (secret["name"], secret["key"]) for name, secret in found.items() if secret}

    def settings(self, deployment: str) -> Any:
        """What its process makes of that environment.

        Raises:
            SystemExit: it refuses it, and says why.
        """
        return _load(deployment, tuple(sorted(self.environment(deployment).items())))

    def pipeline_text(self) -> str:
        """The pipeline file that the gateway finds at the path its settings name; "" if there is none."""
        pod = pod_of(self.get("Deployment", "gateway"))
        path = Path(self.environment("gateway")["QUARTET_GATEWAY_PIPELINE"])
        mounts = {mount["mountPath"]: mount["name"] for mount in pod["containers"][0]["volumeMounts"]}
        for volume in pod["volumes"]:
            if volume["name"] == mounts.get(str(path.parent)) and "configMap" in volume:
                keys = {item["path"]: item["key"] for item in volume["configMap"]["items"]}
                return (self.config(volume["configMap"]["name"]) or {}).get(keys.get(path.name, ""), "")
        return ""

    def pipeline(self) -> Object:
        """The same, parsed."""
        return yaml.safe_load(self.pipeline_text()) or {}


@cache
def _load(process: str, environment: tuple[tuple[str, str], ...]) -> Any:
    with patch.dict(os.environ, dict(environment), clear=True):
        return settings_classes()[process].load([])


def stages_of(cluster: Cluster) -> list[str]:
    """Names of the Deployments that are stages."""
    return [name for each in cluster.of("Deployment") if (name := each["metadata"]["name"]) not in NO_STAGES]
