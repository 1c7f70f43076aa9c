"""A pipeline: which stages there are, who reads from whom, and what comes out."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, ValidationError

from gateway.pipeline.addresses import Addresses
from gateway.pipeline.sampling import Strict, TalkerSampling, ThinkerSampling
from gateway.pipeline.yaml_source import YamlError, YamlSource, read_yaml


class ThinkerStage(Strict):
    """Reads the conversation, writes text."""

    kind: Literal["thinker"]
    address: Addresses
    sampling: ThinkerSampling = ThinkerSampling()


class TalkerStage(Strict):
    """Turns what a thinker writes into codec frames."""

    kind: Literal["talker"]
    address: Addresses
    source: str
    sampling: TalkerSampling = TalkerSampling()


class Code2WavStage(Strict):
    """Turns a talker's codec frames into samples."""

    kind: Literal["code2wav"]
    address: Addresses
    source: str


class DitStage(Strict):
    """Makes pictures, videos or sound of a prompt; which of these, its model says."""

    kind: Literal["dit"]
    address: Addresses
    source: str | None = Field(None, description="the encoder that reads its prompts; none: it has its own encoders")


class EncoderStage(Strict):
    """Reads prompts for a dit that has no encoders of its own."""

    kind: Literal["encoder"]
    address: Addresses


StageConfig = Annotated[
    ThinkerStage | TalkerStage | Code2WavStage | DitStage | EncoderStage, Field(discriminator="kind")
]
Output = Literal["text", "audio", "image", "video", "sound"]
KINDS = "thinker, talker, code2wav, dit, encoder"
SOURCE_KIND = {"talker": "thinker", "code2wav": "talker", "dit": "encoder"}
OUTPUT_KIND = {
    "text": "thinker",
    "audio": "code2wav",
    "image": "dit",
    "video": "dit",
    "sound": "dit",
}


class Outputs(Strict):
    """Which stage each output comes from, at least one. `audio` is the text spoken; `sound` is made of a prompt."""

    text: str | None = None
    audio: str | None = None
    image: str | None = None
    video: str | None = None
    sound: str | None = None


class PipelineConfig(Strict):
    """A whole pipeline file."""

    model: str | None = Field(default=None, min_length=1, description="name clients ask for; default: the main stage's")
    stages: dict[str, StageConfig] = Field(min_length=1)
    outputs: Outputs

    @property
    def main_name(self) -> str:
        """Name of the stage that `model` names: that of the text, else that of the first other output."""
        return next(name for _, name in self.outputs if name is not None)

    @property
    def thinker(self) -> ThinkerStage | None:
        """The stage the text comes from, if there is a text output."""
        if self.outputs.text is None:
            return None
        stage = self.stages[self.outputs.text]
        assert isinstance(stage, ThinkerStage)
        return stage

    @property
    def talker_name(self) -> str | None:
        """Name of the stage that speaks, if there is an audio output."""
        return None if self.outputs.audio is None else getattr(self.stages[self.outputs.audio], "source")  # noqa: B009

    @property
    def talker(self) -> TalkerStage | None:
        """The stage that speaks, if there is an audio output."""
        if self.talker_name is None:
            return None
        stage = self.stages[self.talker_name]
        assert isinstance(stage, TalkerStage)
        return stage


def load_pipeline(file: Path, addresses: Mapping[str, str | list[str]] | None = None) -> PipelineConfig:
    """Reads and checks a pipeline file.

    Args:
        file: the YAML.
        addresses: "host:port" or "dns:///name:port" by stage name, instead of the file's.

    Raises:
        YamlError: "FILE:LINE: what is wrong and how to fix it".
    """
    source = read_yaml(file)
    if not isinstance(source.data, dict):
        raise source.error((), "must be a mapping with the keys stages and outputs")
    _override_addresses(source, addresses or {})
    try:
        config = PipelineConfig.model_validate(source.data)
    except ValidationError as error:
        # a misspelt key is also a missing one: name the spelling first
        first = min(error.errors(), key=lambda e: e["type"] != "extra_forbidden")
        raise source.error(first["loc"], _explain(first)) from None
    _check_edges(source, config)
    _check_outputs(source, config)
    return config


def _override_addresses(source: YamlSource, addresses: Mapping[str, str | list[str]]) -> None:
    stages = source.data.get("stages")
    for name, address in addresses.items():
        if not isinstance(stages, dict) or not isinstance(stages.get(name), dict):
            known = ", ".join(map(str, stages)) if isinstance(stages, dict) else "none"
            raise YamlError(f"--stage {name}={address}: {source.file} has no such stage; it has: {known}")
        stages[name]["address"] = address


def _explain(error) -> str:
    path, kind = ".".join(str(part) for part in _without_tags(error["loc"])), error["type"]
    key = error["loc"][-1] if error["loc"] else ""
    if kind == "extra_forbidden":
        return f"{path}: unknown key; check its spelling or remove it"
    if kind == "missing" and key == "source":
        return f"{path}: missing; name the stage that this one reads from, e.g. source: thinker"
    if kind == "missing":
        return f"{path}: missing; add it"
    if kind == "union_tag_invalid":
        return f"{path}.kind: unknown stage kind {error['input'].get('kind')!r}; use one of {KINDS}"
    if kind == "union_tag_not_found":
        return f"{path}.kind: missing; use one of {KINDS}"
    return f"{path}: {error['msg']}"


def _without_tags(loc) -> list[str | int]:
    """`loc` less the kind that pydantic puts after a stage's name."""
    return [part for i, part in enumerate(loc) if not (i == 2 and loc[0] == "stages")]


def _check_edges(source: YamlSource, config: PipelineConfig) -> None:
    for name, stage in config.stages.items():
        if isinstance(stage, ThinkerStage | EncoderStage) or stage.source is None:
            continue
        path, wanted = ("stages", name, "source"), SOURCE_KIND[stage.kind]
        if stage.source not in config.stages:
            known = ", ".join(config.stages)
            raise source.error(path, f"stages.{name}.source: no stage {stage.source!r}; the stages are: {known}")
        seen = [name]
        current: str | None = stage.source
        while current is not None and current in config.stages:
            if current in seen:
                loop = " -> ".join([*seen[seen.index(current) :], current])
                raise source.error(path, f"stages.{name}.source: a cycle ({loop}): a stage cannot read from itself")
            seen.append(current)
            current = getattr(config.stages[current], "source", None)
        if config.stages[stage.source].kind != wanted:
            raise source.error(
                path,
                f"stages.{name}.source: a {stage.kind} reads from {_article(wanted)}, "
                f"but {stage.source!r} is {_article(config.stages[stage.source].kind)}",
            )


def _article(kind: str) -> str:
    return f"an {kind}" if kind == "encoder" else f"a {kind}"


def _check_outputs(source: YamlSource, config: PipelineConfig) -> None:
    used: set[str] = set()
    if not any(name for _, name in config.outputs):
        raise source.error(("outputs",), f"outputs: name at least one of {', '.join(OUTPUT_KIND)}")
    for output, name in config.outputs.model_dump(exclude_none=True).items():
        path, wanted = ("outputs", output), OUTPUT_KIND[output]
        if name not in config.stages:
            raise source.error(path, f"outputs.{output}: no stage {name!r}; the stages are: {', '.join(config.stages)}")
        if config.stages[name].kind != wanted:
            kind = config.stages[name].kind
            raise source.error(path, f"outputs.{output}: comes from a {wanted}, but {name!r} is {_article(kind)}")
        current: str | None = name
        while current is not None:
            used.add(current)
            current = getattr(config.stages[current], "source", None)
    audio = ("outputs", "audio")
    if config.outputs.audio is not None and config.outputs.text is None:
        raise source.error(audio, "outputs.audio: needs outputs.text, the text that is spoken; add it")
    if config.outputs.audio is not None and config.outputs.text not in used_by(config, config.outputs.audio):
        raise source.error(audio, "outputs.audio: must speak the text of outputs.text")
    for name in config.stages:
        if name not in used:
            raise source.error(("stages", name), f"stages.{name}: no output needs this stage; remove it")


def used_by(config: PipelineConfig, name: str) -> list[str]:
    """The stage `name` and those it reads from, nearest first."""
    chain, current = [], name
    while current is not None:
        chain.append(current)
        current = getattr(config.stages[current], "source", None)
    return chain
