"""Finds mistakes of `quartet up` before a process starts or a stage's library is imported."""

import contextlib
import errno
import io
import re
import socket
import sys
import tempfile
from collections.abc import Iterable, Sequence
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from cli.budget import GIB
from cli.checkpoints import check_hub, no_permission
from cli.doctor.system import SHARED_MEMORY, memory_bytes
from cli.plan import (
    DIFFUSION,
    DIFFUSION_INDEXES,
    GATEWAY,
    LaunchError,
    LaunchOptions,
    PlannedStage,
    UsageError,
    is_diffusion,
)
from cli.ports import holder
from cli.sizes import read_header
from gateway.access.api_keys import read_key_file
from gateway.settings import GatewaySettings
from gateway.yaml_source import YamlError
from services.common.rpc import tls
from services.common.rpc.settings import Settings
from services.demo_models import OMNI, resolve
from services.registry import ALIGNER, EMBEDDER, embedder_pipeline, family_of, read_config
from services.thinker import cpu
from services.thinker.architectures import TRANSCRIBES

LEAST_SHARED_MEMORY_BYTES = 64 * 1024
HOST_BYTES = 2 * GIB  # without GPUs: the processes themselves, and the thinker's KV cache
KFD = Path("/dev/kfd")  # AMD's driver for computing
_HUB_ID = re.compile(r"(?![^@]{97})[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(@[A-Za-z0-9][\w./-]*)?")


def check(options: LaunchOptions, stages: Sequence[PlannedStage], *, starts: bool = True) -> None:
    """Checks all that the flags name; the port only if the system `starts`. Raises LaunchError."""
    for kind in {stage.kind for stage in stages}:
        check_machine(kind)
    for stage in stages:
        check_model(*options.model_of(stage.part), stage.kind, answers=stage.answers, hears=stage.is_asr)
    _check_settings(options, stages)
    _check_files(options)
    if options.has_gateway and starts:
        _check_port(options.host, options.port)
    if not has_gpu():
        _check_memory({stage.model for stage in stages})


def check_model(flag: str, model: str, kind: str, *, answers: bool = True, hears: bool = False) -> None:
    """Raises UsageError; LaunchError: the disk is full. `answers`, `hears`: whether a thinker has to."""
    folder = Path(resolve(model))
    try:
        if folder.is_dir():
            _check_config(model, kind, folder, answers, hears)
            for file in sorted(folder.rglob("*.safetensors")):
                read_header(file)
        elif _HUB_ID.fullmatch(model):
            config = _hub_index(flag, model) if kind in DIFFUSION else check_hub(flag, model, "config.json")
            if config is not None and kind not in DIFFUSION:
                _check_config(model, kind, config.parent, answers, hears)
        else:
            raise ValueError(f"there is no such directory, and a hub id is NAMESPACE/NAME; with Quartet comes {OMNI}")
    except OSError as error:
        raise UsageError(f"{flag} {model}: {no_permission(folder, error)}") from None
    except ValueError as error:
        raise UsageError(f"{flag} {model}: {error}") from None


def _hub_index(flag: str, model: str) -> Path | None:
    """As `check_hub`, of a checkpoint of a dit, which has one of several indexes."""
    first, *others = DIFFUSION_INDEXES
    try:
        return check_hub(flag, model, first)
    except ValueError:
        for other in others:
            with contextlib.suppress(ValueError):
                return check_hub(flag, model, other)
        raise


def _check_config(model: str, kind: str, folder: Path, answers: bool, hears: bool) -> None:
    """Raises OSError, ValueError."""
    if kind in DIFFUSION:
        if not is_diffusion(model):
            raise ValueError(f"has no {' and no '.join(DIFFUSION_INDEXES)}: it is no checkpoint of a dit")
        return
    config = read_config(folder)
    family = family_of(config)
    if kind == EMBEDDER and embedder_pipeline(folder, config) is not None:
        return
    if kind not in family.stages(config):
        served = f": give --pipeline {Path(pipeline).stem}" if (pipeline := family.pipeline_of(config)) else ""
        if kind == ALIGNER:
            served = "; give Qwen/Qwen3-ForcedAligner-0.6B-hf, say, which transformers reads, or quartet-demo-aligner"
        elif family.stages(config) == [ALIGNER]:
            served = ": it gives words their times; name it by --aligner-model, beside a --model that writes them down"
        raise ValueError(f"this checkpoint has no {kind}{served}")
    if kind == "thinker" and answers and family.only_transcribes(config):
        does = f"config.json's architecture is {config['architectures'][0]}, which {TRANSCRIBES}"
        others = "--pipeline, --asr-model and --talker-model"
        raise ValueError(f"{does}; leave out {others}, or give a model that answers in text")
    if hears and not family.may_hear(config):
        does = f"config.json's architecture is {config['architectures'][0]}, which reads texts alone"
        raise ValueError(f"{does}; give a model that writes down speech, such as Whisper")


def check_machine(kind: str) -> None:
    """Checks for what a stage needs beside memory. Raises LaunchError."""
    if kind in ("thinker", EMBEDDER) and not has_gpu() and (lacks := cpu.lacks()):
        raise LaunchError(f"{kind}: {lacks}")
    if sys.platform == "linux":
        try:
            with tempfile.TemporaryFile(dir=SHARED_MEMORY) as file:
                file.write(bytes(LEAST_SHARED_MEMORY_BYTES))
        except OSError as error:
            raise LaunchError(
                f"{SHARED_MEMORY}: {error.strerror}: processes share memory there, so mount it with 64 MiB or more "
                f"(docker: --shm-size=1g; else mount -t tmpfs tmpfs {SHARED_MEMORY})"
            ) from None


def stage_settings(kind: str, model: str, flags: Sequence[str]) -> Any:
    """Reads a stage's settings without its engine. Raises ValueError."""
    settings = getattr(import_module(f"services.{kind}.config"), f"{kind.title()}Settings")  # e.g. Code2WavSettings
    return _load(settings, ["--model", model, *flags])


def _load(cls: type[Settings], flags: Sequence[str]) -> Settings:
    try:
        with contextlib.redirect_stderr(io.StringIO()) as output:
            return cls.load(list(flags))
    except SystemExit as error:
        if not error.code:  # --help, which has been printed
            raise
        if isinstance(error.code, str):
            raise ValueError(error.code.replace("\n", ": ", 1).replace("\n", "; ")) from None
        fault = output.getvalue().rpartition("error: ")[2].strip()
        raise ValueError(fault.replace("unrecognized arguments", "no such flag")) from None


def _check_settings(options: LaunchOptions, stages: Sequence[PlannedStage]) -> None:
    name = GATEWAY
    try:
        if options.has_gateway:
            _load(GatewaySettings, options.gateway_flags)
        for stage in stages:
            name = stage.name
            stage_settings(stage.kind, stage.model, stage.flags)
    except ValueError as error:
        raise UsageError(f"{name}: {error}") from None


def _check_files(options: LaunchOptions) -> None:
    try:
        tls.load(options.tls)
        if options.api_keys_file is not None:
            read_key_file(options.api_keys_file)
    except SystemExit as error:
        raise UsageError(str(error)) from None
    except YamlError as error:
        raise UsageError(f"--api-keys-file: {error}") from None


def _check_port(host: str, port: int) -> None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            by = f" by {found}" if error.errno == errno.EADDRINUSE and (found := holder(port)) else ""
            raise LaunchError(f"--port {port}: {error.strerror}{by}; name a free one") from None


def _check_memory(models: Iterable[str]) -> None:
    """Directories only: the sizes on the hub are unknown."""
    files = (file for model in models for file in Path(resolve(model)).rglob("*.safetensors"))
    needed = HOST_BYTES + sum(file.stat().st_size for file in files)
    if needed > memory_bytes():
        raise LaunchError(too_large(needed, memory_bytes()))


def too_large(
    needed: int, there: int, where: str = "this machine", remedy: str = "take a larger one, or a smaller model"
) -> str:
    return f"the model needs {needed / GIB:.1f} GiB, {where} has {there / GIB:.1f}: {remedy}"


def has_gpu() -> bool:
    """Whether a driver is there that torch is built for: NVIDIA's, or AMD's."""
    if Path("/dev/nvidiactl").exists():
        return True
    with contextlib.suppress(PackageNotFoundError):
        return KFD.exists() and "+rocm" in version("torch")
    return False
