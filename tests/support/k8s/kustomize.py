"""A small `kubectl kustomize`: what deploy/k8s needs of it, for machines without kubectl.

Where kubectl is there, tests/stage/test_kubectl.py compares the two. What it does not know it refuses.
"""

import copy
import hashlib
import json
import os
import re
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import yaml

Object = dict[str, Any]
ROOT = Path(__file__).parents[3]
LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
FILE_NAMES = ("kustomization.yaml", "Kustomization")
KNOWN = {"apiVersion", "kind", "namespace", "resources", "components", "images", "configMapGenerator", "patches"}
CLUSTER_WIDE = ("Namespace",)
LOCAL = "config.kubernetes.io/local-config"
# Lists that are maps: what names an element. All other lists are replaced as a whole.
MERGE_KEYS = {
    "containers": "name",
    "initContainers": "name",
    "env": "name",
    "volumes": "name",
    "volumeMounts": "mountPath",
}


def build(directory: Path) -> list[Object]:
    """The objects of the kustomization in `directory`; names of generated ConfigMaps end in a hash of their content.

    Raises:
        ValueError: it uses a feature that is not known here, or names what is not there.
    """
    objects = _accumulate(directory.resolve(), [])
    objects = [each for each in objects if LOCAL not in each["metadata"].get("annotations", {})]
    renamed = {}
    for each in objects:
        if each.pop("generated", False):
            name, content = each["metadata"]["name"], json.dumps(each["data"], sort_keys=True)
            renamed[name] = f"{name}-{hashlib.sha256(content.encode()).hexdigest()[:10]}"
            each["metadata"]["name"] = renamed[name]
    for each in objects:
        _rename_references(each, renamed)
    return objects


def _accumulate(directory: Path, objects: list[Object]) -> list[Object]:
    """`objects`, and what the kustomization in `directory` makes of them and its own."""
    file = next((directory / name for name in FILE_NAMES if (directory / name).is_file()), None)
    if file is None:
        raise ValueError(f"{directory} has no kustomization")
    spec = json.loads(_parsed(file.read_text())[0])
    if unknown := set(spec) - KNOWN:
        raise ValueError(f"{file}: {sorted(unknown)} is not known to tests/support/k8s/kustomize.py")
    for name in spec.get("resources", []):
        path = directory / name
        objects = objects + (_accumulate(path, []) if path.is_dir() else _documents(path))
    names = [(each["kind"], each["metadata"]["name"]) for each in objects]
    if twice := {name for name in names if names.count(name) > 1}:
        raise ValueError(f"{directory}: there twice: {sorted(twice)}")
    for generator in spec.get("configMapGenerator", []):
        _generate(directory, generator, objects)
    for name in spec.get("components", []):
        objects = _accumulate(directory / name, objects)
    for patch in spec.get("patches", []):
        _patch(directory, patch, objects)
    for image in spec.get("images", []):
        _set_tag(objects, image["name"], image["newTag"])
    for each in objects:
        if "namespace" in spec:
            each["metadata"]["name" if each["kind"] in CLUSTER_WIDE else "namespace"] = spec["namespace"]
            for subject in each.get("subjects", []):
                subject["namespace"] = spec["namespace"]
    return objects


def _documents(path: Path) -> list[Object]:
    # by way of JSON, so that what anchors share is shared no more
    return [json.loads(each) for each in _parsed(path.read_text())]


@cache
def _parsed(text: str) -> list[str]:
    return [json.dumps(each) for each in yaml.load_all(text, LOADER) if each]


def _generate(directory: Path, generator: Object, objects: list[Object]) -> None:
    data = {name: (directory / name).read_text() for name in generator.get("files", [])}
    data |= dict(literal.split("=", 1) for literal in generator.get("literals", []))
    found = [each for each in objects if (each["kind"], each["metadata"]["name"]) == ("ConfigMap", generator["name"])]
    if generator.get("behavior") == "merge":
        found[0]["data"] |= data
    elif found:
        raise ValueError(f"{directory}: ConfigMap {generator['name']} is there twice")
    else:
        metadata = {"name": generator["name"]}
        objects.append({"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": data, "generated": True})


def _patch(directory: Path, entry: Object, objects: list[Object]) -> None:
    text = (directory / entry["path"]).read_text() if "path" in entry else entry["patch"]
    for patch in map(json.loads, _parsed(text)):
        if "target" in entry:
            kind, name = entry["target"]["kind"], entry["target"]["name"]
        else:
            kind, name = patch["kind"], re.escape(patch["metadata"]["name"])
        targets = [each for each in objects if each["kind"] == kind and re.fullmatch(name, each["metadata"]["name"])]
        if not targets and "target" not in entry:
            raise ValueError(f"{directory}: no {kind} {name} to patch")
        for target in targets:
            if isinstance(patch, list):
                _apply_operations(target, copy.deepcopy(patch))
            elif patch.get("$patch") == "delete":
                objects.remove(target)
            else:
                content = {key: value for key, value in patch.items() if key not in ("kind", "apiVersion", "metadata")}
                merged = _merge(target, copy.deepcopy(content), "")
                target.update(merged)


def _apply_operations(target: Object, operations: list[Object]) -> None:
    """JSON patch: `add`, `replace` and `remove` of members of mappings, `add` to the end of a list."""
    for operation in operations:
        *path, last = [part.replace("~1", "/") for part in operation["path"].split("/")[1:]]
        place: Any = target
        for part in path:
            place = place[int(part)] if isinstance(place, list) else place[part]
        match operation["op"]:
            case "add" if last == "-":
                place.append(operation["value"])
            case "remove" if last in place:
                del place[last]
            case "add" | "replace" if operation["op"] == "add" or last in place:
                place[last] = operation["value"]
            case _:
                raise ValueError(f"{operation}: cannot be done")


def _merge(old: Any, new: Any, key: str) -> Any:
    """Strategic merge: mappings are merged, null removes, lists are merged by the name of their elements."""
    if isinstance(old, dict) and isinstance(new, dict):
        merged = {name: value for name, value in old.items() if name not in new}
        for name, value in new.items():
            if value is not None:
                merged[name] = _merge(old.get(name), value, name)
        return merged
    if isinstance(new, list) and key in MERGE_KEYS:
        by = MERGE_KEYS[key]
        before = {element[by]: element for element in old or []}
        changed = [_merge(before.pop(element[by], {}), element, "") for element in new]
        return changed + list(before.values())
    return _merge({}, new, "") if isinstance(new, dict) else new


def _set_tag(objects: list[Object], image: str, tag: str) -> None:
    for each in objects:
        pod = each.get("spec", {}).get("template", {}).get("spec", {})
        for container in pod.get("containers", []) + pod.get("initContainers", []):
            if container["image"].split(":")[0] == image:
                container["image"] = f"{image}:{tag}"


def _rename_references(value: Any, renamed: dict[str, str]) -> None:
    if isinstance(value, list):
        for element in value:
            _rename_references(element, renamed)
    elif isinstance(value, dict):
        for key, member in value.items():
            if key in ("configMap", "configMapRef", "configMapKeyRef") and member.get("name") in renamed:
                member["name"] = renamed[member["name"]]
            _rename_references(member, renamed)


WITH_TLS = [("cpu-demo", ["keys", "tls"]), ("single-gpu", ["tls"]), ("speech", ["tls"]), ("scaled", ["tls"])]
"""(overlay, components) of a user that adds mutual TLS."""


def copy_deployment(root: Path) -> None:
    """What the overlays are made of."""
    for folder in ("deploy", "gateway/pipelines"):
        shutil.copytree(ROOT / folder, root / folder)


def with_components(tmp_path: Path, overlay: str, components: list[str], **more: Any) -> Path:
    """An overlay of a user's own: `overlay`, and `components` added to it; `more` beside them."""
    k8s = os.path.relpath(ROOT / "deploy/k8s", tmp_path.resolve())
    added = [f"{k8s}/components/{name}" for name in components]
    kustomization = {"resources": [f"{k8s}/overlays/{overlay}"], "components": added, **more}
    (tmp_path / "kustomization.yaml").write_text(yaml.safe_dump(kustomization))
    return tmp_path
