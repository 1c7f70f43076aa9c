"""Pipeline files."""

from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Annotated, Literal, get_args

from pydantic import Field

from gateway.pipeline.addresses import Addresses
from gateway.pipeline.kinds import KINDS, Output, maker
from gateway.pipeline.sampling import TalkerSampling, ThinkerSampling
from gateway.validation import Strict
from gateway.yaml_source import YamlError, YamlSource, read_yaml

OUTPUTS: tuple[Output, ...] = get_args(Output)
ALIGNER = "aligner"  # the kind, and the name of one that is added to a file's stages
_NO_SOURCE = "missing; name the stage that this one reads from, e.g. source: thinker"


class _Stage(Strict):
    address: Addresses


class ThinkerStage(_Stage):
    """Reads the conversation, writes text."""

    kind: Literal["thinker"]
    sampling: ThinkerSampling = ThinkerSampling()


class TalkerStage(_Stage):
    """Turns text into codec frames."""

    kind: Literal["talker"]
    source: str | None = Field(None, description="the thinker whose text it speaks; none: the text of each request")
    reads: Literal["states", "text"] = Field(
        default="states",
        description="of its source: token ids and states, of the same checkpoint; or the text, of any other",
    )
    sampling: TalkerSampling = TalkerSampling()


class Code2WavStage(_Stage):
    """Turns a talker's codec frames into samples."""

    kind: Literal["code2wav"]
    source: str


class DitStage(_Stage):
    """Makes images, videos or audio from a prompt."""

    kind: Literal["dit"]
    source: str | None = Field(None, description="the encoder that reads its prompts; none: it has its own encoders")


class EncoderStage(_Stage):
    """Reads prompts for a dit that has no encoders of its own."""

    kind: Literal["encoder"]


class EmbedderStage(_Stage):
    """Makes embeddings of texts, or scores pairs of texts."""

    kind: Literal["embedder"]


class AlignerStage(_Stage):
    """Says when each word of a text is spoken in a sound."""

    kind: Literal["aligner"]


StageConfig = Annotated[
    ThinkerStage | TalkerStage | Code2WavStage | DitStage | EncoderStage | EmbedderStage | AlignerStage,
    Field(discriminator="kind"),
]


class Outputs(Strict):
    """The stage that each output comes from. `speech` is spoken text; `audio` is made from a prompt. `transcript` is
    what is said in a sound: without it, the stage of `text` writes that down, if its model hears. `scores` say how well
    documents fit a query; `words` are the times of the words of a transcript."""

    text: str | None = None
    speech: str | None = None
    transcript: str | None = None
    image: str | None = None
    video: str | None = None
    audio: str | None = None
    embedding: str | None = None
    scores: str | None = None
    words: str | None = None


class PipelineConfig(Strict):
    model: str | None = Field(default=None, min_length=1, description="name clients ask for; default: the main stage's")
    stages: dict[str, StageConfig] = Field(min_length=1)
    outputs: Outputs

    def sources(self, name: str) -> list[str]:
        named = getattr(self.stages[name], "source", None)
        return [named] if isinstance(named, str) else list(named or ())

    def streams(self, name: str) -> list[str]:
        """The sources whose tensors the stage pulls. The text of others is brought by the gateway."""
        return [] if getattr(self.stages[name], "reads", None) == "text" else self.sources(name)

    def route(self, output: Output) -> list[str]:
        """Names of the stages that make `output`, sources first; maybe none."""
        name = getattr(self.outputs, output)
        return [] if name is None else self.chain(name)

    def chain(self, name: str) -> list[str]:
        """Names of a stage and all before it, sources first. The edges must be checked."""
        return self._chain(name, self.sources)

    def _chain(self, name: str, sources: Callable[[str], list[str]]) -> list[str]:
        before = [found for source in sources(name) for found in self._chain(source, sources)]
        return [*dict.fromkeys(before), name]

    def model_stage(self, output: Output) -> str:
        """Name of the stage whose model makes `output`, or of the last one if clients name none. The pipeline must make
        it."""
        chain = self._chain(getattr(self.outputs, output), self.streams)
        return next((name for name in chain if KINDS[self.stages[name].kind].is_model), chain[-1])

    @property
    def listener(self) -> str | None:
        """Name of a stage that only writes down speech, beside one that answers."""
        name = self.outputs.transcript
        return None if self.outputs.text is None or name in self.answer else name

    @property
    def made(self) -> list[Output]:
        return [output for output in OUTPUTS if getattr(self.outputs, output) is not None]

    @property
    def answer(self) -> list[str]:
        """Names of the stages of an answer, written and spoken, sources first."""
        routes = [self.route(output) for output in ("text", "speech") if getattr(self.outputs, output) is not None]
        return list(dict.fromkeys(name for route in routes for name in route))

    @cached_property
    def thinker(self) -> ThinkerStage | None:
        return next((stage for name in self.answer if isinstance(stage := self.stages[name], ThinkerStage)), None)

    @cached_property
    def talker(self) -> TalkerStage | None:
        return next((stage for name in self.answer if isinstance(stage := self.stages[name], TalkerStage)), None)

    @property
    def speaks_text(self) -> bool:
        """Whether the talker speaks the text of a thinker, of which it knows nothing else."""
        return self.talker is not None and self.talker.reads == "text"


def load_pipeline(
    file: Path, addresses: Mapping[str, str | list[str]] | None = None, aligner: str | None = None
) -> PipelineConfig:
    """Reads and checks a pipeline file.

    Args:
        addresses: by name of stage, instead of the file's.
        aligner: address of an aligner that is added to the file's stages.

    Raises:
        YamlError: the file is at fault, or has an aligner already.
    """
    source = read_yaml(file, "keys stages and outputs")
    if aligner is not None:
        _add_aligner(source, aligner)
    _override_addresses(source, addresses or {})
    config = source.parse(PipelineConfig, _explain)
    _check_edges(source, config)
    _check_outputs(source, config)
    return config


def _override_addresses(source: YamlSource, addresses: Mapping[str, str | list[str]]) -> None:
    stages = source.data.get("stages")
    known = stages if isinstance(stages, dict) else {}
    for name, address in addresses.items():
        if not isinstance(known.get(name), dict):
            has = ", ".join(map(str, known)) or "none"
            raise YamlError(f"--stage {name}={address}: {source.file} has no such stage; it has: {has}")
        known[name]["address"] = address


def _add_aligner(source: YamlSource, address: str) -> None:
    stages, outputs = source.data.get("stages"), source.data.get("outputs")
    if not isinstance(stages, dict) or not isinstance(outputs, dict):
        return  # the file is refused for it
    if outputs.get("words") is not None or ALIGNER in stages:
        raise YamlError(f"--aligner={address}: {source.file} has an aligner; give its address by --stage, or remove it")
    stages[ALIGNER] = {"kind": ALIGNER, "address": address}
    outputs["words"] = ALIGNER


def _explain(error) -> str:
    path, kind = ".".join(str(part) for part in _without_tags(error["loc"])), error["type"]
    key = error["loc"][-1] if error["loc"] else ""
    if kind == "extra_forbidden":
        return f"{path}: unknown key; check its spelling or remove it"
    if kind == "missing" and key == "source":
        return f"{path}: {_NO_SOURCE}"
    if kind == "missing":
        return f"{path}: missing; add it"
    if kind == "union_tag_invalid":
        return f"{path}.kind: unknown stage kind {error['ctx']['tag']!r}; use one of {', '.join(KINDS)}"
    if kind == "union_tag_not_found":
        return f"{path}.kind: missing; use one of {', '.join(KINDS)}"
    return f"{path}: {error['msg']}"


def _without_tags(loc) -> list[str | int]:
    return [part for i, part in enumerate(loc) if not (i == 2 and loc[0] == "stages")]


def _check_edges(source: YamlSource, config: PipelineConfig) -> None:
    kinds = {stage.kind for stage in config.stages.values()}
    for name, stage in config.stages.items():
        path, reads, sources = ("stages", name, "source"), KINDS[stage.kind].reads, config.sources(name)
        # a talker may begin a pipeline, but not beside the thinker that it was to read from
        if not sources and stage.kind == "talker" and kinds.intersection(reads):
            raise source.error(path, f"stages.{name}.source: {_NO_SOURCE}")
        if not sources and stage.kind == "talker" and stage.reads == "text":
            where = ("stages", name, "reads")
            raise source.error(where, f"stages.{name}.reads: says what it takes of its source, and it has none")
        for read in sources:
            if (fault := _edge_fault(config, name, read)) is not None:
                raise source.error(path, f"stages.{name}.source: {fault}")


def _edge_fault(config: PipelineConfig, name: str, source: str) -> str | None:
    """Why the stage `name` cannot read from `source`."""
    if source not in config.stages:
        return f"no stage {source!r}; the stages are: {', '.join(config.stages)}"
    if cycle := _cycle(config, [name, source]):
        return f"a cycle ({' -> '.join(cycle)}): a stage cannot read from itself"
    reader, read = config.stages[name].kind, config.stages[source].kind
    if read not in KINDS[reader].reads:
        wanted = " or ".join(map(_article, KINDS[reader].reads))
        return f"{_article(reader)} reads from {wanted}, but {source!r} is {_article(read)}"
    return None


def _cycle(config: PipelineConfig, path: list[str]) -> list[str]:
    """A cycle that `path`, from reader to source, runs into; maybe empty."""
    if (last := path[-1]) in path[:-1]:
        return path[path.index(last) :]
    following = config.sources(last) if last in config.stages else ()
    return next(filter(None, (_cycle(config, [*path, name]) for name in following)), [])


def _article(kind: str) -> str:
    return f"an {kind}" if kind[0] in "aeiou" else f"a {kind}"


def _check_outputs(source: YamlSource, config: PipelineConfig) -> None:
    if not config.made:
        raise source.error(("outputs",), f"outputs: name at least one of {', '.join(OUTPUTS)}")
    for output in config.made:
        name, path, wanted = getattr(config.outputs, output), ("outputs", output), maker(output).name
        if name not in config.stages:
            raise source.error(path, f"outputs.{output}: no stage {name!r}; the stages are: {', '.join(config.stages)}")
        if config.stages[name].kind != wanted:
            found = _article(config.stages[name].kind)
            raise source.error(path, f"outputs.{output}: comes from a {wanted}, but {name!r} is {found}")
    _check_spoken_text(source, config)
    used = {name for output in config.made for name in config.route(output)}
    for name in config.stages:
        if name not in used:
            raise source.error(("stages", name), f"stages.{name}: no output needs this stage; remove it")


def _check_spoken_text(source: YamlSource, config: PipelineConfig) -> None:
    path, text = ("outputs", "speech"), maker("text").name
    writers = [name for name in config.route("speech") if config.stages[name].kind == text]
    if writers and config.outputs.text is None:
        raise source.error(path, "outputs.speech: needs outputs.text, the text that is spoken; add it")
    if config.outputs.speech is not None and config.outputs.text not in (*writers, None):
        raise source.error(path, "outputs.speech: must speak the text of outputs.text")
