"""The model families that are made of stages: one folder and one row each.

A folder has a module for each part that the family has: `thinker`, `talker`, `code2wav` (what the stage of that name
asks of a family: its `family.py`), `tiny` (small random checkpoints: its `ARCHS` has by name what writes one into a
folder, of a size) and `budget` (what a checkpoint needs of a GPU). A part that a family lacks has no module. Modules
are imported when they are asked for, so that a stage imports no other stage's libraries.
`services/diffusion/families.py` is the table of diffusion pipelines.

A package of somebody else adds a row by an entry point of the group `quartet.families` that is a `Family`:

    [project.entry-points."quartet.families"]
    mine = "my_models.mine:FAMILY"  # FAMILY = Family("mine", ("my_omni",), package="my_models.mine")
"""

import importlib
import importlib.util
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType
from typing import Any, cast

ENTRY_POINTS = "quartet.families"
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
STAGES = ("thinker", "talker", "code2wav")


@dataclass(frozen=True)
class Family:
    """A row of the table.

    Attributes:
        name: its folder here.
        model_types: values of `model_type` in a checkpoint's config.json.
        pipeline: the file of gateway/pipelines that serves it; None: none that comes with Quartet.
        package: what has its modules, if that is not its folder here.
    """

    name: str
    model_types: tuple[str, ...]
    pipeline: str | None = None
    package: str = ""

    def has(self, part: str) -> bool:
        """Whether it has `part`."""
        return importlib.util.find_spec(self._module(part)) is not None

    def part(self, part: str) -> ModuleType:
        """Its module `part`.

        Raises:
            ValueError: the family has no such part.
        """
        if not self.has(part):
            served = f": give --pipeline {Path(self.pipeline).stem} to quartet up" if self.pipeline else ""
            raise ValueError(f"{self.name} models have no {part}{served if part in STAGES else ''}")
        return importlib.import_module(self._module(part))

    def _module(self, part: str) -> str:
        return f"{self.package or f'{__name__}.{self.name}'}.{part}"


FAMILIES = (
    Family("qwen3_omni", ("qwen3_omni_moe",), "qwen3-omni.yaml"),
    Family("qwen3_tts", ("qwen3_tts",), "speech.yaml"),
)


def families() -> tuple[Family, ...]:
    """All rows: those here, then those of installed packages."""
    return FAMILIES + tuple(point.load() for point in entry_points(group=ENTRY_POINTS))


def read_config(folder: Path) -> dict[str, Any]:
    """A checkpoint's config.json.

    Raises:
        ValueError: there is none, or it is not an object.
    """
    try:
        config = json.loads((folder / "config.json").read_text())
    except FileNotFoundError:
        raise ValueError(
            f"{folder} has no config.json: it is no checkpoint of a family of stages, or not whole"
        ) from None
    except ValueError as error:
        raise ValueError(f"{folder / 'config.json'} is not JSON: {error}") from None
    if not isinstance(config, dict):
        raise ValueError(f"{folder / 'config.json'} is not an object")
    return cast("dict[str, Any]", config)


def family_of(config: Mapping[str, Any]) -> Family:
    """The family of a checkpoint, by its config.json.

    Raises:
        ValueError: no family has its `model_type`.
    """
    known = families()
    for family in known:
        if config.get("model_type") in family.model_types:
            return family
    model_type, have = config.get("model_type"), ", ".join(name for family in known for name in family.model_types)
    raise ValueError(f"config.json's model_type is {model_type!r}: no family of stages has it ({have})")


@dataclass(frozen=True)
class Sizes:
    """What the stages of a checkpoint need of a GPU, as a family's `budget` reads it from config and tensors. Bytes,
    where nothing else is said.

    Attributes:
        weights: of each stage.
        unsplit: those of the thinker's weights that tensor parallelism may leave whole on every GPU.
        text_table: the thinker's embeddings of all text tokens as the talker projects them once, when it loads.
        heads, kv_heads: number of heads of the thinker's attention.
        kv_per_token: key-value memory of a token of the thinker's context, of all heads.
        states_per_token: what the thinker keeps besides of each token of its key-value cache.
        talker_kv_per_position: key-value memory of a prompt position or frame of the talker.
    """

    weights: Mapping[str, int]
    unsplit: int
    text_table: int
    heads: int
    kv_heads: int
    kv_per_token: int
    states_per_token: int
    talker_kv_per_position: int


def weights_dtype(*configs: Mapping[str, Any]) -> str:
    """The dtype of a checkpoint's weights by its config.json, or by the first of these parts of it that states one;
    "bfloat16" where none does."""
    stated = (config.get(key) for config in configs for key in ("dtype", "torch_dtype"))
    return next((dtype for dtype in stated if dtype), "bfloat16")


def weight_bytes(tensors: Iterable[tuple[str, int]], prefix: str) -> int:
    """Bytes of those of (name, bytes) whose names begin with `prefix`."""
    return sum(size for name, size in tensors if name.startswith(prefix))


def kv_bytes(config: Mapping[str, Any], element_bytes: int) -> int:
    """Key-value memory of a position of the transformer that `config` describes, all layers and heads."""
    head = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    return 2 * config["num_hidden_layers"] * config["num_key_value_heads"] * head * element_bytes
