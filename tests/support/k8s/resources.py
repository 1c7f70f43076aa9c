"""What pods request: cores, memory and GPUs, and the images for them."""

import re
from collections.abc import Iterator
from typing import Any

from tests.support.k8s.objects import IMAGES, Cluster, containers, pod_of, stages_of

QUANTITY = re.compile(r"[0-9]+(\.[0-9]+)?(m|k|M|G|T|Ki|Mi|Gi|Ti)?")
SCALE = {"": 1.0, "m": 1e-3, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
SCALE |= {"Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40}
GPU = "nvidia.com/gpu"
RANK_BYTES = 2**30  # of /dev/shm: NCCL's, and vLLM's queue to its ranks


def amount(quantity: Any) -> float:
    """A Kubernetes quantity as a number.

    Raises:
        ValueError: it is none.
    """
    if not (match := QUANTITY.fullmatch(str(quantity))):
        raise ValueError(f"{quantity!r} is no quantity")
    return float(str(quantity).removesuffix(match[2] or "")) * SCALE[match[2] or ""]


def resource_problems(cluster: Cluster) -> Iterator[str]:
    """What is wrong, a line each."""
    yield from _sizes(cluster)
    yield from _ranks(cluster)


def _ranks(cluster: Cluster) -> Iterator[str]:
    """A GPU and shared memory for each process that a stage's model is split over."""
    for name in stages_of(cluster):
        pod = pod_of(cluster.get("Deployment", name))
        container = pod["containers"][0]
        ranks = getattr(cluster.settings(name), "tensor_parallel_size", 1)
        shared = [mount["name"] for mount in container["volumeMounts"] if mount["mountPath"] == "/dev/shm"]
        empty = [volume.get("emptyDir", {}) for volume in pod["volumes"] if volume["name"] in shared]
        sizes = [amount(each.get("sizeLimit", 0)) for each in empty if each.get("medium") == "Memory"]
        if sum(sizes) < ranks * RANK_BYTES:
            yield f"Deployment {name}: /dev/shm is memory of {sum(sizes) / 2**30} GiB, for {ranks} ranks"
        gpus = container["resources"]["limits"].get(GPU)
        if gpus not in (None, ranks):
            yield f"Deployment {name}: {gpus} GPUs for {ranks} ranks"
        if gpus and GPU not in [each["key"] for each in pod.get("tolerations", [])]:
            yield f"Deployment {name}: nodes with GPUs keep it away"


def _sizes(cluster: Cluster) -> Iterator[str]:
    version = cluster.version
    for each in cluster.of("Deployment"):
        name = each["metadata"]["name"]
        for container in containers(pod_of(each)):
            where = f"Deployment {name}, container {container['name']}"
            image, _, tag = container["image"].partition(":")
            variant = "" if image == "quartet-gateway" else f"-{'cuda' if 'nvidia.com/gpu' in str(each) else 'cpu'}"
            if tag != version + variant or image not in IMAGES.values():
                yield f"{where}: image {container['image']}, not of version {version}{variant}"
            if container in pod_of(each)["containers"] and image != IMAGES[name]:
                yield f"{where}: runs {image}"
            if {"cpu", "memory"} - set(container["resources"]["requests"]) or "memory" not in container["resources"][
                "limits"
            ]:
                yield f"{where}: resources are incomplete"
    for path, quantity in _quantities(cluster.objects):
        try:
            amount(quantity)
        except ValueError as error:
            yield f"{path}: {error}"
    for each in cluster.of("Deployment"):
        for container in containers(pod_of(each)):
            for what, limit in container["resources"]["limits"].items():
                request = container["resources"]["requests"].get(what, limit)
                if (
                    QUANTITY.fullmatch(str(limit))
                    and QUANTITY.fullmatch(str(request))
                    and amount(request) > amount(limit)
                ):
                    yield f"Deployment {each['metadata']['name']}: requests {request} of {what}, limit {limit}"
    stages = [stage for stage in stages_of(cluster) if stage != "aligner"]  # which is on either
    gpus = [stage for stage in stages if "nvidia.com/gpu" in str(cluster.get("Deployment", stage))]
    if gpus not in ([], stages):
        yield f"only {gpus} have GPUs"


def _quantities(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, list):
        for element in value:
            yield from _quantities(element, path)
    elif isinstance(value, dict):
        for key, member in value.items():
            if key in ("requests", "limits"):
                yield from ((f"{path}.{key}.{what}", quantity) for what, quantity in member.items())
            elif key in ("sizeLimit", "averageValue"):
                yield f"{path}.{key}", member
            else:
                yield from _quantities(member, f"{path}.{key}")
