"""The model families that are made of stages: one folder and one row each.

A folder has a module for each part that the family has: `thinker`, `talker`, `code2wav` (what the stage of that name
asks of a family: its `family.py`), `tiny` (a small random checkpoint) and `budget` (what a checkpoint needs of a GPU).
A part that a family lacks has no module. Modules are imported when they are asked for, so that a stage imports no
other stage's libraries. `services/dit/families.py` is the table of diffusion pipelines.
"""

import importlib
import importlib.util
import json
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType


@dataclass(frozen=True)
class Family:
    """A row of the table.

    Attributes:
        name: its folder here.
        model_types: values of `model_type` in a checkpoint's config.json.
        pipeline: the file of gateway/pipelines that serves it; None: none that comes with Quartet.
    """

    name: str
    model_types: tuple[str, ...]
    pipeline: str | None = None

    def has(self, part: str) -> bool:
        """Whether it has `part`."""
        return importlib.util.find_spec(f"{__name__}.{self.name}.{part}") is not None

    def part(self, part: str) -> ModuleType:
        """Its module `part`.

        Raises:
            ValueError: the family has no such part.
        """
        if not self.has(part):
            raise ValueError(f"{self.name} models have no {part}")
        return importlib.import_module(f"{__name__}.{self.name}.{part}")


FAMILIES = (Family("qwen3_omni", ("qwen3_omni_moe",), "qwen3-omni.yaml"),)


def read_config(folder: Path) -> dict:
    """A checkpoint's config.json.

    Raises:
        ValueError: there is none, or it is not an object.
    """
    try:
        config = json.loads((folder / "config.json").read_text())
    except FileNotFoundError:
        raise ValueError(f"{folder} has no config.json: it is not a checkpoint of a family of stages") from None
    except ValueError as error:
        raise ValueError(f"{folder / 'config.json'} is not JSON: {error}") from None
    if not isinstance(config, dict):
        raise ValueError(f"{folder / 'config.json'} is not an object")
    return config


def family_of(config: dict) -> Family:
    """The family of a checkpoint, by its config.json.

    Raises:
        ValueError: no family has its `model_type`.
    """
    for family in FAMILIES:
        if config.get("model_type") in family.model_types:
            return family
    known = ", ".join(model_type for family in FAMILIES for model_type in family.model_types)
    raise ValueError(f"config.json's model_type is {config.get('model_type')!r}: no family of stages has it ({known})")
