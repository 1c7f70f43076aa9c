"""Which model family a checkpoint is of, and what serves it. Knows no engine.

Other packages add a `Family` by an entry point of the group `quartet.families`:

    [project.entry-points."quartet.families"]
    mine = "my_models.mine:FAMILY"  # FAMILY = Family("mine", ("my_omni",), package="my_models.mine")
"""

import importlib
import importlib.util
import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType
from typing import Any, cast

ENTRY_POINTS = "quartet.families"
STAGES = ("thinker", "talker", "code2wav")
TEXT_PIPELINE = "text.yaml"  # of checkpoints that have a thinker alone
TRANSCRIPTION_PIPELINE = "transcription.yaml"  # of a thinker that writes down speech, and answers nothing
ALIGNER = "aligner"
EMBEDDER = "embedder"
EMBEDDING_PIPELINE = "embeddings.yaml"  # of a model that makes embeddings
EMBEDDING_FILE = "modules.json"  # of sentence-transformers: how embeddings are made of a model's states
RERANK_PIPELINE = "rerank.yaml"  # of a model that scores pairs of texts
_FOLDER = "services.families"


@dataclass(frozen=True)
class Family:
    """A row of the table.

    Attributes:
        name: its folder in services/families.
        model_types: values of `model_type` in config.json.
        pipeline: a file of gateway/pipelines that serves it.
        package: of its modules, if not its folder.
        architectures: of config.json, where other families have its `model_types` too; (): any.
    """

    name: str
    model_types: tuple[str, ...]
    pipeline: str | None = None
    package: str = ""
    architectures: tuple[str, ...] = ()

    def has_checkpoint(self, config: Mapping[str, Any]) -> bool:
        """Whether a checkpoint with this config.json is of it."""
        if config.get("model_type") not in self.model_types:
            return False
        return not self.architectures or any(name in self.architectures for name in config.get("architectures") or ())

    def check(self, config: Mapping[str, Any]) -> None:
        """Raises ValueError: its package knows that no stage serves a checkpoint with this config.json."""
        if check := getattr(importlib.import_module(self._module()), "check", None):
            check(config)

    def has(self, part: str) -> bool:
        return importlib.util.find_spec(self._module(part)) is not None

    def part(self, part: str, config: Mapping[str, Any] | None = None) -> ModuleType:
        """Its module `part`. Raises ValueError: it has none, or the checkpoint with this config.json has none."""
        if config is not None and self.has(part) and part not in self.stages(config):
            raise ValueError(f"the checkpoint has no {part} (model type {config.get('model_type')})")
        if not self.has(part):
            served = f": give --pipeline {Path(self.pipeline).stem} to quartet up" if self.pipeline else ""
            raise ValueError(f"{self.name} models have no {part}{served if part in STAGES else ''}")
        return importlib.import_module(self._module(part))

    def stages(self, config: Mapping[str, Any]) -> list[str]:
        """The stages that serve a checkpoint with this config.json."""
        only = getattr(importlib.import_module(self._module()), "only_stages", None)
        if only is not None and (found := only(config)):
            return list(found)
        has_speech = getattr(importlib.import_module(self._module()), "has_speech", None)
        is_silent = has_speech is not None and not has_speech(config)
        return [stage for stage in STAGES if self.has(stage) and (stage == STAGES[0] or not is_silent)]

    def pipeline_of(self, config: Mapping[str, Any]) -> str | None:
        """As `pipeline`, for a checkpoint with this config.json."""
        if EMBEDDER in self.stages(config):
            return RERANK_PIPELINE if scores_pairs(config) else EMBEDDING_PIPELINE
        if self.only_transcribes(config):
            return TRANSCRIPTION_PIPELINE
        return TEXT_PIPELINE if self.pipeline and self.stages(config) == [STAGES[0]] else self.pipeline

    def only_transcribes(self, config: Mapping[str, Any]) -> bool:
        """Whether the thinker of a checkpoint with this config.json writes down speech, and answers nothing."""
        found = getattr(importlib.import_module(self._module()), "only_transcribes", None)
        return found is not None and found(config)

    def may_hear(self, config: Mapping[str, Any]) -> bool:
        """Whether the thinker of a checkpoint with this config.json takes sounds, as far as that tells."""
        found = getattr(importlib.import_module(self._module()), "may_hear", None)
        return found is None or found(config)

    def _module(self, *part: str) -> str:
        """Name of the module `part`; without one, of the package."""
        return ".".join([self.package or f"{_FOLDER}.{self.name}", *part])


FAMILIES = (
    Family("qwen3_omni", ("qwen3_omni_moe",), "qwen3-omni.yaml"),
    Family("qwen2_5_omni", ("qwen2_5_omni",), "qwen2.5-omni.yaml"),
    Family("qwen3_tts", ("qwen3_tts",), "speech.yaml"),
    Family("bagel", ("bagel",), "dit.yaml"),
    Family("qwen3_aligner", ("qwen3_asr",), architectures=("Qwen3ASRForTokenClassification",)),
    Family("ctc_aligner", ("quartet_ctc_aligner",)),
)
ANY_MODEL = Family("any_model", (), TEXT_PIPELINE)
"""Of a checkpoint that no row is about: what it is, is found by looking."""


def families() -> tuple[Family, ...]:
    """FAMILIES, then those of installed packages."""
    return FAMILIES + tuple(point.load() for point in entry_points(group=ENTRY_POINTS))


def scores_pairs(config: Mapping[str, Any]) -> bool:
    """Whether a model with this config.json sorts texts into classes; of an embedder, whether it scores pairs."""
    return any("SequenceClassification" in name or "ForRanking" in name for name in config.get("architectures") or ())


class ConfigSection(dict[str, Any]):
    """An object of a checkpoint's config.json. A missing key raises ValueError, which names its place in the file."""

    def __init__(self, members: Mapping[str, Any], place: str) -> None:
        self._place = place
        for name, value in members.items():
            if value is None and name.endswith("_config"):
                continue  # a part that the model has not
            if isinstance(value, dict):
                value = ConfigSection(cast("dict[str, Any]", value), f"{place}{name}.")
            self[name] = value

    def __missing__(self, name: str) -> Any:
        raise ValueError(f"{self._place}{name} is missing")


def read_config(folder: Path) -> ConfigSection:
    """A checkpoint's config.json. Raises ValueError: there is none, or it is not an object."""
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
    return ConfigSection(cast("dict[str, Any]", config), f"{folder / 'config.json'}: ")


def family_of(config: Mapping[str, Any]) -> Family:
    """The family of a checkpoint, by its config.json: that with its `model_type` (and architecture), else `ANY_MODEL`.

    Raises ValueError: no family has its `model_type`, and no engine runs its architecture.
    """
    known = families()
    for family in known:
        if family.has_checkpoint(config):
            return family
    if config.get("architectures"):
        ANY_MODEL.check(config)
        return ANY_MODEL
    model_type, have = config.get("model_type"), ", ".join(name for family in known for name in family.model_types)
    raise ValueError(f"config.json's model_type is {model_type!r}: no family of stages has it ({have})")


def embedder_pipeline(folder: Path, config: Mapping[str, Any]) -> str | None:
    """The file of gateway/pipelines that serves the checkpoint in `folder` as an embedder; None: it is none. A model
    that else writes text is one if it has an `EMBEDDING_FILE`.

    Raises ValueError: as `family_of`.
    """
    family = family_of(config)
    if EMBEDDER in family.stages(config):
        return family.pipeline_of(config)
    return EMBEDDING_PIPELINE if family is ANY_MODEL and (folder / EMBEDDING_FILE).is_file() else None


def has_speech(config: Mapping[str, Any]) -> bool:
    """Whether an omni checkpoint with this config.json speaks. For packages of families, whose `has_speech` this is."""
    return config.get("enable_audio_output", True) and config.get("talker_config") is not None
