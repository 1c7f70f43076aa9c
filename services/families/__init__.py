"""The model families that are made of stages: one folder and one row each.

A folder has a module for each part that the family has: `thinker`, `talker`, `code2wav` (what the stage of that name
asks of a family: its `family.py`), `tiny` (small random checkpoints: its `ARCHS` has by name what writes one into a
folder, of a size) and `budget` (what a checkpoint needs of a GPU). A part that a family lacks has no module. Where some
checkpoints of a family lack talker and code2wav, its package says which, by a function `has_speech(config)`. Modules
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
TEXT_PIPELINE = "text.yaml"  # of checkpoints that have a thinker alone
STATE_LAYERS = 1  # that which a talker reads; --keep-embeddings would be another one
ROPE_BYTES = 3 * 4  # position of a token in time, height and width, int32
UNSPLIT = "thinker.audio_tower."  # Qwen3-Omni's 20 heads do not go into 8 parts; Qwen2.5-Omni's vLLM does not split


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

    def stages(self, config: Mapping[str, Any]) -> list[str]:
        """The stages that serve a checkpoint of it with this config.json."""
        has_speech = getattr(importlib.import_module(self._package), "has_speech", None)
        is_silent = has_speech is not None and not has_speech(config)
        return [stage for stage in STAGES if self.has(stage) and (stage == STAGES[0] or not is_silent)]

    def pipeline_of(self, config: Mapping[str, Any]) -> str | None:
        """The file of gateway/pipelines that serves a checkpoint of it with this config.json, as `pipeline`."""
        return TEXT_PIPELINE if self.pipeline and self.stages(config) == [STAGES[0]] else self.pipeline

    @property
    def _package(self) -> str:
        return self.package or f"{__name__}.{self.name}"

    def _module(self, part: str) -> str:
        return f"{self._package}.{part}"


FAMILIES = (
    Family("qwen3_omni", ("qwen3_omni_moe",), "qwen3-omni.yaml"),
    Family("qwen2_5_omni", ("qwen2_5_omni",), "qwen2.5-omni.yaml"),
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


def has_speech(config: Mapping[str, Any]) -> bool:
    """Whether a checkpoint of several stages with this config.json has those that speak, as transformers' configs of
    omni models say it. Not the file's, but that of a family whose package has this function."""
    return config.get("enable_audio_output", True) and config.get("talker_config") is not None


@dataclass(frozen=True)
class Sizes:
    """What the stages of a checkpoint need of a GPU, as a family's `budget` reads it from config and tensors. Bytes,
    where nothing else is said.

    Attributes:
        weights: of each stage that the checkpoint has.
        unsplit: those of the thinker's weights that tensor parallelism may leave whole on every GPU.
        text_table: the thinker's embeddings of all text tokens as the talker projects them once, when it loads; 0
            without a talker.
        heads, kv_heads: number of heads of the thinker's attention.
        kv_per_token: key-value memory of a token of the thinker's context, of all heads.
        states_per_token: what the thinker keeps besides of each token of its key-value cache.
        talker_kv_per_position: key-value memory of a prompt position or frame of the talker; 0 without one.
    """

    weights: Mapping[str, int]
    unsplit: int
    text_table: int
    heads: int
    kv_heads: int
    kv_per_token: int
    states_per_token: int
    talker_kv_per_position: int

    @property
    def has_speech(self) -> bool:
        """Whether there are talker and code2wav beside the thinker."""
        return "talker" in self.weights


def weights_dtype(*configs: Mapping[str, Any]) -> str:
    """The dtype of a checkpoint's weights by its config.json, or by the first of these parts of it that states one;
    "bfloat16" where none does."""
    stated = (config.get(key) for config in configs for key in ("dtype", "torch_dtype"))
    return next((dtype for dtype in stated if dtype), "bfloat16")


def weight_bytes(tensors: Iterable[tuple[str, int]], prefix: str) -> int:
    """Bytes of those of (name, bytes) whose names begin with `prefix`."""
    return sum(size for name, size in tensors if name.startswith(prefix))


def omni_sizes(
    config: Mapping[str, Any],
    talker: Mapping[str, Any] | None,
    tensors: Iterable[tuple[str, int]],
    prefixes: Mapping[str, str],
) -> Sizes:
    """Those of an omni model's checkpoint.

    Args:
        config: its config.json.
        talker: what of it describes the talker's layers; None: it has the thinker alone.
        tensors: (name, bytes) of each.
        prefixes: of the tensors' names, by stage.

    Raises:
        KeyError: a key is missing.
    """
    tensors, thinker = list(tensors), config["thinker_config"]["text_config"]
    element = DTYPE_BYTES[weights_dtype(config)]
    stages = prefixes if talker else STAGES[:1]
    return Sizes(
        weights={stage: weight_bytes(tensors, prefixes[stage]) for stage in stages},
        unsplit=weight_bytes(tensors, UNSPLIT),
        text_table=thinker["vocab_size"] * talker["hidden_size"] * element if talker else 0,
        heads=thinker["num_attention_heads"],
        kv_heads=thinker["num_key_value_heads"],
        kv_per_token=kv_bytes(thinker, element),
        states_per_token=(STATE_LAYERS * thinker["hidden_size"] * element if talker else 0) + ROPE_BYTES,
        talker_kv_per_position=kv_bytes(talker, element) if talker else 0,
    )


def kv_bytes(config: Mapping[str, Any], element_bytes: int) -> int:
    """Key-value memory of a position of the transformer that `config` describes, all layers and heads."""
    head = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    return 2 * config["num_hidden_layers"] * config["num_key_value_heads"] * head * element_bytes
