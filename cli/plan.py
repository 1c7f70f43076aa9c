"""What a `quartet up` starts: the stages of its pipeline file, each with its checkpoint."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cli import hub
from cli.terminal import CommandError
from gateway.pipeline.config import load_pipeline
from gateway.pipeline.kinds import KINDS
from gateway.pipelines import SHIPPED, pipeline_file
from gateway.strict import YamlError
from services.demo_models import OMNI, PAINTER, resolve
from services.families import family_of, read_config

PIPELINE = SHIPPED / "qwen3-omni.yaml"
DIT_PIPELINE = SHIPPED / "dit.yaml"
OMNI_DIT_PIPELINE = SHIPPED / "qwen3-omni-dit.yaml"
GATEWAY = "gateway"  # the process beside the stages
DIFFUSION = frozenset(name for name, kind in KINDS.items() if kind.is_diffusion)


class LaunchError(CommandError):
    """A process cannot start; the message says why, and what to do. `details`: the end of its log, where asked for."""


class UsageError(LaunchError):
    """A flag of `quartet up` is at fault; the message names it and what to give instead, in one line."""

    exit_status = 2


@dataclass
class Tls:
    """Files and name of the TLS settings that all processes get; see `services.common.rpc.settings.TlsSettings`."""

    tls_cert: Path | None = None
    tls_key: Path | None = None
    tls_ca: Path | None = None
    tls_server_name: str | None = None

    @property
    def files(self) -> list[Path]:
        """Those of the certificate, its key and the CA; none for connections in the clear."""
        return [file for file in (self.tls_cert, self.tls_key, self.tls_ca) if file is not None]

    @property
    def flags(self) -> list[str]:
        """As on a process's command line."""
        given = {name: value for name, value in vars(self).items() if value is not None}
        return [f"--{name.replace('_', '-')}={value}" for name, value in given.items()]


@dataclass
class LaunchOptions:
    """What to start.

    Attributes:
        model: every stage's checkpoint, a directory, a hub id, or the name of one that comes with Quartet; where a
            diffusion model's stages stand beside others, theirs is `dit_model`.
        host, port: of the HTTP API.
        pipeline: a file, or the name of a shipped one.
        run_directory: gets the logs and state.json; None: a temporary one, which goes when the system has stopped.
        stage_arguments: flags for the stage of that kind, or the gateway, after its others.
        has_gateway: whether the gateway is started; not where a program of the user's own asks the stages.
        temporary: a directory that goes when the system has stopped, however it did, with all temporary files of the
            processes; the run directory may lie in it.
        verbose: whether the error of a failed start has the end of a log.
    """

    model: str
    host: str = "127.0.0.1"
    port: int = 8000
    pipeline: Path = PIPELINE
    run_directory: Path | None = None
    stage_arguments: Mapping[str, Sequence[str]] = field(default_factory=dict)
    dit_model: str | None = None
    tls: Tls = field(default_factory=Tls)
    api_keys_file: Path | None = None
    has_gateway: bool = True
    temporary: Path | None = None
    verbose: bool = False

    def __post_init__(self) -> None:
        self.pipeline = pipeline_file(self.pipeline)

    @property
    def gateway_flags(self) -> list[str]:
        """The gateway's command line, without the addresses of the stages."""
        keys = [f"--api-keys-file={self.api_keys_file}"] if self.api_keys_file else []
        own = ["--host", self.host, "--port", str(self.port), "--pipeline", str(self.pipeline)]
        return [*own, *keys, *self.tls.flags, *self.stage_arguments.get(GATEWAY, ())]


def demo_options(pipeline: Path | None = None, dit_model: str | None = None, **others: Any) -> LaunchOptions:
    """What is started where no model is named: those that come with Quartet.

    Args:
        pipeline: that of both of them by default, or what is asked for of them.
        dit_model: instead of the painter.
        others: of `LaunchOptions`.
    """
    options = LaunchOptions(OMNI, pipeline=pipeline or OMNI_DIT_PIPELINE, **others)
    try:
        kinds = {stage.kind for stage in load_pipeline(options.pipeline).stages.values()}
    except YamlError as error:
        raise LaunchError(f"--pipeline: {error}") from None
    if not kinds - DIFFUSION:
        options.model = dit_model or PAINTER
    elif kinds & DIFFUSION:
        options.dit_model = dit_model or PAINTER
    return options


@dataclass(frozen=True)
class PlannedStage:
    """A stage to start: its name in the pipeline, its kind ("thinker", "dit", ...), its checkpoint, further flags."""

    name: str
    kind: str
    model: str
    flags: Sequence[str]


def is_diffusion(model: str) -> bool:
    """Whether `model` is the directory of a diffusers checkpoint, or comes with Quartet and is one."""
    return (Path(resolve(model)) / "model_index.json").is_file()


def pipeline_for(model: str) -> Path:
    """The pipeline file for a checkpoint directory or hub id; where config.json cannot be read, Qwen3-Omni's."""
    try:
        if is_diffusion(model):
            return DIT_PIPELINE
        config = read_config(_folder_of_config(model))
        return SHIPPED / (family_of(config).pipeline_of(config) or PIPELINE)
    except Exception:  # the hub's client and its HTTP library have errors of their own; `check` says what is wrong
        return PIPELINE


def _folder_of_config(model: str) -> Path:
    """Where the config.json of a checkpoint directory or hub id is; the latter's is fetched.

    Raises:
        OSError: it cannot be read.
        Exception: see `hub.fetched`.
    """
    folder = Path(resolve(model))
    if folder.is_dir():
        return folder
    return hub.fetched(model, "config.json").parent


def stages_to_start(options: LaunchOptions) -> list[PlannedStage]:
    """The stages of `options.pipeline`, in its order.

    Raises:
        LaunchError: the file is at fault, or the options do not fit it.
    """
    try:
        config = load_pipeline(options.pipeline)
    except YamlError as error:
        raise LaunchError(f"--pipeline: {error}") from None
    planned: dict[str, PlannedStage] = {}
    kinds = {stage.kind for stage in config.stages.values()}
    _check_options(options, kinds)
    for name, stage in config.stages.items():
        if name == GATEWAY or "/" in name:  # names are those of logs, too
            raise LaunchError(f"--pipeline: {options.pipeline}: stages.{name}: no name for a process; use another")
        if stage.kind in planned:
            raise LaunchError(
                f"--pipeline: {options.pipeline}: {planned[stage.kind].name} and {name} are both of kind {stage.kind}, "
                "but `quartet up` has one checkpoint for each kind; start the stages yourself, by "
                f"`python -m services.{stage.kind}`"
            )
        model = options.dit_model or options.model if stage.kind in DIFFUSION else options.model
        reads_encoder = stage.kind == "dit" and stage.source is not None
        encoders = ["--encoders", "stream"] if reads_encoder else []
        flags = [*options.tls.flags, *encoders, *options.stage_arguments.get(stage.kind, ())]
        planned[stage.kind] = PlannedStage(name, stage.kind, model, flags)
    return list(planned.values())


def _check_options(options: LaunchOptions, kinds: set[str]) -> None:
    diffusion, file = kinds & DIFFUSION, options.pipeline
    if options.dit_model is None and diffusion and kinds - DIFFUSION:
        raise LaunchError(f"--dit-model: missing; {file} has a dit beside the stages that --model is for")
    if options.dit_model is not None and not diffusion:
        raise LaunchError(f"--dit-model: {file} has no stage of kind dit; leave it out")
    if options.dit_model is not None and not kinds - DIFFUSION:
        raise LaunchError(f"--dit-model: {file} has no stages but the dit's; name its checkpoint by --model")
    for kind, arguments in options.stage_arguments.items():
        if arguments and kind not in kinds and kind != GATEWAY:
            raise LaunchError(f"--{kind}-arg: {file} has no stage of kind {kind}; leave it out")
