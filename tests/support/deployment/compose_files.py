"""docker-compose.yaml and the files beside it, as `docker compose config` reads them, where there is no docker."""

import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[3]
BASE = "docker-compose.yaml"
_RESET = object()  # `!reset` takes away what the files before have


class _Loader(yaml.SafeLoader):
    """With compose's own tag."""


_Loader.add_constructor("!reset", lambda *_: _RESET)
_VARIABLE = re.compile(r"\$(?:(\$)|(\w+)|\{(\w+)(:?-)?)")


def rendered(variables: Mapping[str, str], *files: str) -> dict[str, Any]:
    """The base and `files`, names in deploy/docker such as "gpu", with `variables` set in .env.

    Environments are mappings: a name without a value has that of `variables`, or is absent.
    """
    result: dict[str, Any] = {}
    for file in (BASE, *(f"deploy/docker/{name}.yaml" for name in files)):
        result = _merged(result, _read(ROOT / file, variables))
    return result


def at(config: dict[str, Any], path: str) -> str:
    """What is at a path like "services.talker.environment", as text; nothing where there is none."""
    found: Any = config
    for key in path.split("."):
        found = found.get(key, {})
    return str(found)


def interpolated(text: str, variables: Mapping[str, str]) -> str:
    """`text` with its `${NAME}`, `${NAME-DEFAULT}` and `${NAME:-DEFAULT}`, whose defaults may have variables again."""
    result, position = "", 0
    while found := _VARIABLE.search(text, position):
        result += text[position : found.start()]
        position = found.end()
        dollar, plain, name, operator = found.groups()
        if dollar:
            result += "$"
        elif plain:
            result += variables.get(plain, "")
        else:
            end = _closing(text, position)
            value = variables.get(name)
            if value is None or (operator == ":-" and not value):
                value = interpolated(text[position:end], variables) if operator else ""
            result += value
            position = end + 1
    return result + text[position:]


def _closing(text: str, position: int) -> int:
    """Where the brace closes that is open at `position`."""
    depth = 1
    while True:
        depth += {"{": 1, "}": -1}.get(text[position], 0)
        if not depth:
            return position
        position += 1


def _read(file: Path, variables: Mapping[str, str]) -> dict[str, Any]:
    content = _filled(_loaded(file), variables)
    services: dict[str, Any] = content.get("services", {})
    for name, service in services.items():
        if found := service.get("environment"):
            service["environment"] = _environment(found, variables)
        if base := service.pop("extends", None):
            extended = _read(file.parent / base["file"], variables)["services"][base["service"]]
            services[name] = _merged(extended, service)
    return content


@cache
def _loaded(file: Path) -> dict[str, Any]:
    return yaml.load(file.read_text(), _Loader)


def _filled(node: Any, variables: Mapping[str, str]) -> Any:
    match node:
        case dict():
            return {key: _filled(value, variables) for key, value in node.items()}
        case list():
            return [_filled(each, variables) for each in node]
        case str():
            return interpolated(node, variables)
    return node


def _environment(given: dict[str, Any] | list[str], variables: Mapping[str, str]) -> dict[str, str]:
    if isinstance(given, list):
        given = {name: value if is_set else None for name, is_set, value in (each.partition("=") for each in given)}
    values = {name: variables.get(name) if value is None else str(value) for name, value in given.items()}
    return {name: value for name, value in values.items() if value is not None}


def _merged(ours: Any, theirs: Any, key: str = "") -> Any:
    """`theirs` over `ours`: mappings are joined, and lists, but that a mount takes the place of one at its target."""
    if isinstance(ours, dict) and isinstance(theirs, dict):
        merged = {**ours, **{name: _merged(ours.get(name), value, name) for name, value in theirs.items()}}
        return {name: value for name, value in merged.items() if value is not _RESET}
    if isinstance(ours, list) and isinstance(theirs, list) and key != "command":
        if key == "volumes":
            targets = {_target(mount) for mount in theirs}
            ours = [mount for mount in ours if _target(mount) not in targets]
        return [*ours, *(each for each in theirs if each not in ours)]
    return theirs


def _target(mount: str) -> str:
    return mount.removesuffix(":ro").rpartition(":")[2]
