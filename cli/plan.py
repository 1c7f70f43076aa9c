"""Plans a `quartet up`: the stages of its pipeline file, each with its checkpoint."""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cli import hub
from cli.terminal import CommandError
from gateway.pipeline.config import AlignerStage, PipelineConfig, StageConfig, load_pipeline
from gateway.pipeline.kinds import KINDS
from gateway.pipelines import SHIPPED, pipeline_file
from gateway.settings import is_loopback
from gateway.yaml_source import YamlError
from services.demo_models import ALIGNER as ALIGNER_MODEL
from services.demo_models import OMNI, PAINTER, resolve
from services.registry import (
    ALIGNER,
    ANY_MODEL,
    EMBEDDING_FILE,
    TEXT_PIPELINE,
    TRANSCRIPTION_PIPELINE,
    embedder_pipeline,
    family_of,
    read_config,
)

PIPELINE = SHIPPED / "qwen3-omni.yaml"
DIT_PIPELINE = SHIPPED / "dit.yaml"
OMNI_DIT_PIPELINE = SHIPPED / "qwen3-omni-dit.yaml"
VOICED_PIPELINE = SHIPPED / "llm-tts.yaml"
ASR_PIPELINE = SHIPPED / "asr-llm.yaml"
ASR_VOICED_PIPELINE = SHIPPED / "asr-llm-tts.yaml"
_ANY_ADDRESS = "127.0.0.1:1"  # of a stage in no file: it gets a port of its own
GATEWAY = "gateway"  # the process beside the stages
WEBRTC = "webrtc"  # that of the gateway's calls
_EVERYWHERE = ("0.0.0.0", "::", "")
DIFFUSION = frozenset(name for name, kind in KINDS.items() if kind.is_diffusion)
DIFFUSION_INDEXES = ("model_index.json", "modular_model_index.json", "llm_config.json")
"""One of them is in each checkpoint of a dit: an index of diffusers, or a file that a class of ours knows it by."""
SPEECH = frozenset({"talker", "code2wav"})
ASR = "asr"  # the part of a thinker that only writes down speech, beside one that answers


class LaunchError(CommandError):
    """A process cannot start; `details` has the end of its log."""


class UsageError(LaunchError):
    """A flag of `quartet up` is at fault."""

    exit_status = 2


@dataclass
class Tls:
    """TLS settings of all processes."""

    tls_cert: Path | None = None
    tls_key: Path | None = None
    tls_ca: Path | None = None
    tls_server_name: str | None = None

    @property
    def files(self) -> list[Path]:
        return [file for file in (self.tls_cert, self.tls_key, self.tls_ca) if file is not None]

    @property
    def flags(self) -> list[str]:
        return [f"--{name.replace('_', '-')}={value}" for name, value in vars(self).items() if value is not None]


@dataclass
class LaunchOptions:
    """A system to start.

    Attributes:
        model: checkpoint of every stage: a directory, a hub id, or a shipped model's name.
        host, port: of the HTTP API.
        pipeline: a file, or the name of a shipped one.
        run_directory: gets the logs and state.json; None: a temporary one.
        stage_arguments: further flags by the part of a stage, or "gateway".
        dit_model: checkpoint of the diffusion stages beside others.
        asr_model: checkpoint of a thinker that writes down what the model of the answers hears.
        talker_model: checkpoint of talker and code2wav, which speak the text of another model.
        aligner_model: checkpoint of an aligner; the pipeline gets one if its file has none.
        temporary: gets temporary files and is removed however the system ends; may hold the run directory.
        webrtc: whether the gateway takes calls by WebRTC.
        verbose: adds the log's end to a failed start's error.
    """

    model: str
    host: str = "127.0.0.1"
    port: int = 8000
    pipeline: Path = PIPELINE
    run_directory: Path | None = None
    stage_arguments: Mapping[str, Sequence[str]] = field(default_factory=dict)
    dit_model: str | None = None
    asr_model: str | None = None
    talker_model: str | None = None
    aligner_model: str | None = None
    tls: Tls = field(default_factory=Tls)
    api_keys_file: Path | None = None
    has_gateway: bool = True
    webrtc: bool = False
    temporary: Path | None = None
    verbose: bool = False

    def __post_init__(self) -> None:
        self.pipeline = pipeline_file(self.pipeline)

    def model_of(self, part: str) -> tuple[str, str]:
        """(the option that names it, the checkpoint) of a stage that is this part."""
        if part in DIFFUSION and self.dit_model is not None:
            return "--dit-model", self.dit_model
        if part in SPEECH and self.talker_model is not None:
            return "--talker-model", self.talker_model
        if part == ASR and self.asr_model is not None:
            return "--asr-model", self.asr_model
        if part == ALIGNER and self.aligner_model is not None:
            return "--aligner-model", self.aligner_model
        return "--model", self.model

    @property
    def adds_aligner(self) -> bool:
        """Whether the pipeline gets an aligner that its file has not. Raises LaunchError: the file is at fault."""
        stages = _config_of(self.pipeline).stages.values()
        return self.aligner_model is not None and all(stage.kind != ALIGNER for stage in stages)

    def address_flags(self, addresses: Mapping[str, str]) -> list[str]:
        """The gateway's flags for the stages' `addresses`, by name."""
        added = ALIGNER if self.adds_aligner else None
        flags = (
            [f"--{ALIGNER}", at] if name == added else ["--stage", f"{name}={at}"] for name, at in addresses.items()
        )
        return [word for flag in flags for word in flag]

    @property
    def gateway_flags(self) -> list[str]:
        """Without the stages' addresses."""
        keys = [f"--api-keys-file={self.api_keys_file}"] if self.api_keys_file else []
        own = ["--host", self.host, "--port", str(self.port), "--pipeline", str(self.pipeline)]
        return [*own, *keys, *self.tls.flags, *self.stage_arguments.get(GATEWAY, ())]

    @property
    def webrtc_flags(self) -> list[str]:
        """Without the port on which the gateway reaches it. Who reaches the gateway reaches the calls."""
        gateway = f"http://{'127.0.0.1' if self.host in _EVERYWHERE else self.host}:{self.port}"
        host = "127.0.0.1" if is_loopback(self.host) else "0.0.0.0"
        return ["--gateway", gateway, "--udp-host", host, *self.stage_arguments.get(WEBRTC, ())]


def demo_options(pipeline: Path | None = None, dit_model: str | None = None, **others: Any) -> LaunchOptions:
    """Options of the shipped models; `dit_model` replaces the painter, `aligner_model` the aligner."""
    options = LaunchOptions(OMNI, pipeline=pipeline or OMNI_DIT_PIPELINE, **others)
    kinds = {stage.kind for stage in _config_of(options.pipeline).stages.values()}
    if not kinds - DIFFUSION:
        options.model = dit_model or PAINTER
    elif kinds & DIFFUSION:
        options.dit_model = dit_model or PAINTER
    if "thinker" in kinds and options.aligner_model is None:
        options.aligner_model = ALIGNER_MODEL
    return options


def _config_of(pipeline: Path) -> PipelineConfig:
    try:
        return load_pipeline(pipeline)
    except YamlError as error:
        raise LaunchError(f"--pipeline: {error}") from None


@dataclass(frozen=True)
class PlannedStage:
    """One to start.

    Attributes:
        flags: those beside model and ports.
        answers: whether a thinker has to.
        is_asr: whether it is a thinker that only writes down speech, beside one that answers.
    """

    name: str
    kind: str
    model: str
    flags: Sequence[str]
    answers: bool = True
    is_asr: bool = False

    @property
    def part(self) -> str:
        """By which options name it: ASR, or its kind."""
        return ASR if self.is_asr else self.kind


def is_diffusion(model: str) -> bool:
    """Returns whether `model` is a local or shipped diffusers checkpoint."""
    return any((Path(resolve(model)) / index).is_file() for index in DIFFUSION_INDEXES)


def pipeline_for(model: str, talker_model: str | None = None, asr_model: str | None = None) -> Path:
    """Returns a checkpoint's pipeline file; Qwen3-Omni's if config.json cannot be read. Raises LaunchError: the model
    speaks, and `asr_model` is given."""
    if talker_model is not None:
        return VOICED_PIPELINE if asr_model is None else ASR_VOICED_PIPELINE
    own = _own_pipeline(model)
    if asr_model is None:
        return own or PIPELINE
    if own is not None and own.name not in (TEXT_PIPELINE, TRANSCRIPTION_PIPELINE):
        reason = f"{model} is served by {own.stem}, where no model only writes down speech; leave it out, or give a"
        raise LaunchError(f"--asr-model: {reason} --pipeline whose outputs.transcript is a stage of its own")
    return ASR_PIPELINE


def _own_pipeline(model: str) -> Path | None:
    folder = Path(resolve(model))
    try:
        if is_diffusion(model):
            return DIT_PIPELINE
        is_local = folder.is_dir()
        folder = folder if is_local else hub.fetched(model, "config.json").parent
        family = family_of(config := read_config(folder))
        if family is ANY_MODEL and not is_local:
            with suppress(Exception):  # most have none
                hub.fetched(model, EMBEDDING_FILE)
        named = embedder_pipeline(folder, config) or family.pipeline_of(config)
        return SHIPPED / named if named else None
    except Exception:  # the hub's client and its HTTP library have errors of their own; `check` says what is wrong
        return None


def stages_to_start(options: LaunchOptions) -> list[PlannedStage]:
    """Raises LaunchError: the file is at fault, or the options do not fit it."""
    planned: dict[str, PlannedStage] = {}
    config = _config_of(options.pipeline)
    stages, answers = dict(config.stages), config.outputs.text is not None
    if options.adds_aligner:
        stages[ALIGNER] = AlignerStage(kind=ALIGNER, address=_ANY_ADDRESS)
    parts = {name: ASR if name == config.listener else stage.kind for name, stage in stages.items()}
    _check_options(options, set(parts.values()))
    _check_voice(options, stages.values())
    for name, stage in stages.items():
        if name in (GATEWAY, WEBRTC) or "/" in name:  # names are those of logs, too
            raise LaunchError(f"--pipeline: {options.pipeline}: stages.{name}: no name for a process; use another")
        if (part := parts[name]) in planned:
            raise LaunchError(
                f"--pipeline: {options.pipeline}: {planned[part].name} and {name} are both of kind {stage.kind}, "
                "but `quartet up` has one checkpoint for each kind; start the stages yourself, by "
                f"`python -m services.{stage.kind}`"
            )
        _, model = options.model_of(part)
        reads_encoder = stage.kind == "dit" and stage.source is not None
        encoders = ["--encoders", "stream"] if reads_encoder else []
        flags = [*options.tls.flags, *encoders, *options.stage_arguments.get(part, ())]
        is_asr = part == ASR
        planned[part] = PlannedStage(name, stage.kind, model, flags, answers and not is_asr, is_asr)
    return list(planned.values())


def _check_voice(options: LaunchOptions, stages: Iterable[StageConfig]) -> None:
    reads_text = any(stage.kind == "talker" and stage.reads == "text" for stage in stages)
    if reads_text and options.talker_model is None:
        reason = f"missing; {options.pipeline} has a talker of another checkpoint than --model"
        raise LaunchError(f"--talker-model: {reason}")
    if options.talker_model is not None and not reads_text:
        reason = "has no talker that reads text; leave it out, or leave out --pipeline"
        raise LaunchError(f"--talker-model: {options.pipeline} {reason}")


def _check_options(options: LaunchOptions, parts: set[str]) -> None:
    diffusion, file = parts & DIFFUSION, options.pipeline
    if options.asr_model is None and ASR in parts:
        reason = f"missing; {file} has a thinker for outputs.transcript beside that of outputs.text"
        raise LaunchError(f"--asr-model: {reason}")
    if options.asr_model is not None and ASR not in parts:
        reason = f"{file} has no thinker that only writes down speech; leave it out, or leave out --pipeline"
        raise LaunchError(f"--asr-model: {reason}")
    if options.aligner_model is None and ALIGNER in parts:
        raise LaunchError(
            f"--aligner-model: missing; {file} has an aligner, whose checkpoint is another than --model's"
        )
    if options.aligner_model is not None and not parts & {"thinker", ASR}:
        reason = "has no model that writes down speech, whose words it could give times; leave it out"
        raise LaunchError(f"--aligner-model: {file} {reason}")
    if options.dit_model is None and diffusion and parts - DIFFUSION:
        raise LaunchError(f"--dit-model: missing; {file} has a dit beside the stages that --model is for")
    if options.dit_model is not None and not diffusion:
        raise LaunchError(f"--dit-model: {file} has no stage of kind dit; leave it out")
    if options.dit_model is not None and not parts - DIFFUSION:
        raise LaunchError(f"--dit-model: {file} has no stages but the dit's; name its checkpoint by --model")
    if options.stage_arguments.get(WEBRTC) and not options.webrtc:
        raise LaunchError("--webrtc-arg: needs --webrtc, which starts the process of calls")
    for part, arguments in options.stage_arguments.items():
        if arguments and part not in parts and part not in (GATEWAY, WEBRTC):
            what = "thinker that only writes down speech" if part == ASR else f"stage of kind {part}"
            raise LaunchError(f"--{part}-arg: {file} has no {what}; leave it out")
