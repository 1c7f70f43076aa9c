"""YAML files, whose errors name the file and the line."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from gateway.validation import Model, first_error

KeyPath = tuple[str | int, ...]


class YamlError(Exception):
    """The text is "FILE:LINE: fault and remedy"."""


@dataclass(frozen=True)
class YamlSource:
    """A parsed file. `lines`, from 1, are by path of keys and indices."""

    file: Path
    data: Any
    lines: dict[KeyPath, int]

    def parse(self, model: type[Model], explain: Callable[[Any], str]) -> Model:
        """Raises YamlError with what `explain` makes of pydantic's error."""
        try:
            return model.model_validate(self.data)
        except ValidationError as error:
            first = first_error(error)
            raise self.error(first["loc"], explain(first)) from None

    def error(self, path: Sequence[str | int], what: str) -> YamlError:
        """At the deepest key of `path` that is in the file."""
        found: KeyPath = ()
        for name in path:
            if (*found, name) in self.lines:
                found = (*found, name)
        return YamlError(f"{self.file}:{self.lines.get(found, 1)}: {what}")


def read_yaml(file: Path, keys: str) -> YamlSource:
    """A mapping; `keys` describe it in errors. Raises YamlError: unreadable, no mapping, or a key twice."""
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise YamlError(f"{file}:1: cannot be read: {error}") from None
    loader = yaml.SafeLoader(text)
    lines: dict[KeyPath, int] = {}
    try:
        node = loader.get_single_node()
        data = None if node is None else _construct(loader, node, (), lines, file)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise YamlError(f"{file}:{line}: not valid YAML: {error.problem}") from None
    finally:
        loader.dispose()
    source = YamlSource(file, data, lines)
    if not isinstance(data, dict):
        raise source.error((), f"must be a mapping with the {keys}")
    return source


def _construct(loader: yaml.SafeLoader, node: yaml.Node, path: KeyPath, lines: dict[KeyPath, int], file: Path) -> Any:
    if isinstance(node, yaml.MappingNode):
        mapping: dict[str, Any] = {}
        for key_node, value_node in node.value:
            key, line = str(key_node.value), key_node.start_mark.line + 1
            if key in mapping:
                raise YamlError(f"{file}:{line}: {key!r} is here twice (first on line {lines[*path, key]}): remove one")
            lines[*path, key] = line
            mapping[key] = _construct(loader, value_node, (*path, key), lines, file)
        return mapping
    if isinstance(node, yaml.SequenceNode):
        items = []
        for i, item in enumerate(node.value):
            lines[*path, i] = item.start_mark.line + 1
            items.append(_construct(loader, item, (*path, i), lines, file))
        return items
    return loader.construct_object(node)
