"""One settings class per process: every setting is a flag, an environment variable and a YAML key of one name."""

import argparse
import os
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self, cast

import pydantic_settings
from pydantic import BeforeValidator, Field, ValidationError, ValidationInfo, field_validator, model_validator

from services.common.revisions import parted, pinned
from services.demo_models import is_shipped, resolve

Transport = Literal["inline", "shared_memory", "ucx"]


def words(value: Any) -> Any:
    """Splits the value of a flag or variable at its commas."""
    return [word.strip() for word in value.split(",")] if isinstance(value, str) else value


class Settings(pydantic_settings.BaseSettings):
    """`max_frames` is `--max-frames`, `<PREFIX>MAX_FRAMES` and `max_frames:` in the YAML file that `--config` names;
    flags win over the environment, that over the file. Unknown keys, flags and variables with the prefix are errors.

    Attributes:
        for_others: variables with the prefix that other processes read.
        for_every_process: settings that QUARTET_<NAME> sets, too, unless the process's own variable does.
    """

    for_others: ClassVar[tuple[str, ...]] = ()
    for_every_process: ClassVar[tuple[str, ...]] = ()

    model_config = pydantic_settings.SettingsConfigDict(
        extra="forbid", cli_kebab_case=True, cli_avoid_json=True, cli_hide_none_type=True, protected_namespaces=()
    )

    @classmethod
    def load(cls, arguments: list[str] | None = None) -> Self:
        """Reads flags (`arguments`; None: this process's), environment and YAML.

        Raises:
            SystemExit: with one line for each setting at fault, or after printing `--help`.
        """
        config = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
        config.add_argument("--config", type=Path)
        known, flags = config.parse_known_args(arguments)
        if known.config and not known.config.is_file():
            raise SystemExit(f"--config: {known.config} is not a file")
        variables = {name: os.environ.get(f"QUARTET_{name.upper()}") for name in cls.for_every_process}
        shared = {name: value for name, value in variables.items() if value}

        class Loaded(cls):  # the same settings with the sources of this call
            @classmethod
            def settings_customise_sources(
                cls, settings_cls: type[pydantic_settings.BaseSettings], *_: Any, **sources: Any
            ) -> tuple[pydantic_settings.PydanticBaseSettingsSource, ...]:
                return (
                    pydantic_settings.CliSettingsSource[Any](settings_cls, cli_parse_args=flags),
                    sources["env_settings"],
                    pydantic_settings.InitSettingsSource(settings_cls, init_kwargs=shared),
                    pydantic_settings.YamlConfigSettingsSource(settings_cls, yaml_file=known.config),
                )

        Loaded.__name__, Loaded.__qualname__, Loaded.__doc__ = cls.__name__, cls.__qualname__, cls.__doc__
        faults = cls._unknown_variables()
        try:
            loaded = Loaded()
            if not faults:
                return cast("Self", loaded)
        except ValidationError as error:
            faults += [f"{'.'.join(map(str, e['loc'])) or cls.__name__}: {e['msg']}" for e in error.errors()]
        except pydantic_settings.SettingsError as error:  # a variable that is not even JSON where that is needed
            faults += [f"{error}: {error.__cause__}"]
        raise SystemExit("\n".join(["invalid settings", *faults]))

    @classmethod
    def _unknown_variables(cls) -> list[str]:
        """A line for each variable in the environment that has the prefix and is no setting."""
        prefix = cls.model_config.get("env_prefix", "")
        settings = [name.upper() for name in cls.model_fields]
        lines: list[str] = []
        for variable in sorted(os.environ):
            name = variable.upper().removeprefix(prefix)
            if name == variable.upper() or name in settings or variable in cls.for_others:
                continue
            nearest = get_close_matches(name, settings, n=1)
            lines.append(
                f"{variable}: no such setting; {f'is {prefix}{nearest[0]} meant?' if nearest else 'see --help'}"
            )
        return lines


class TlsSettings(Settings):
    """gRPC by mutual TLS if there are the three files, else in the clear."""

    for_every_process: ClassVar[tuple[str, ...]] = ("tls_cert", "tls_key", "tls_ca", "tls_server_name")

    tls_cert: Path | None = Field(default=None, description="PEM of this process's certificate, with its chain")
    tls_key: Path | None = Field(default=None, description="PEM of its private key")
    tls_ca: Path | None = Field(default=None, description="PEM of the CAs that sign the certificates of all processes")
    tls_server_name: str | None = Field(
        default=None, description="name in other processes' certificates; default: the host they are reached by"
    )

    @model_validator(mode="after")
    def _tls_is_complete(self) -> Self:
        files = {"--tls-cert": self.tls_cert, "--tls-key": self.tls_key, "--tls-ca": self.tls_ca}
        missing = [flag for flag, file in files.items() if file is None]
        if 0 < len(missing) < len(files):
            raise ValueError(f"TLS needs --tls-cert, --tls-key and --tls-ca; missing: {', '.join(missing)}")
        if missing and self.tls_server_name:
            raise ValueError("--tls-server-name is of no use without --tls-cert, --tls-key and --tls-ca")
        return self


class StageSettings(TlsSettings):
    """Settings of every stage. A stage's own class sets `env_prefix` and adds to these.

    Attributes:
        changes_outputs: settings, beside the facts of ServerInfo, that change outputs: all replicas need the same.
    """

    changes_outputs: ClassVar[tuple[str, ...]] = ()

    model: str = Field(
        min_length=1, description="checkpoint directory, hub id, or the name of a model that comes with Quartet"
    )
    revision: str | None = Field(
        default=None, description="commit, branch or tag of a model of the hub; default: its newest commit"
    )
    served_model_name: str | None = Field(default=None, description="name of the model in ServerInfo; default: --model")
    host: str = Field(default="127.0.0.1", description="address to listen on")
    port: int = Field(default=0, ge=0, le=65535, description="port to listen on; 0 takes a free one")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(default="auto", description="auto: the model's")
    device: str = Field(default="auto", description="torch device; auto: cuda if there is one, else cpu")
    max_running_requests: int = Field(default=32, ge=1, description="requests the engine works on at a time")
    max_queued_requests: int = Field(default=128, ge=0, description="requests that may wait; more are refused")
    transports: Annotated[list[Transport], pydantic_settings.NoDecode, BeforeValidator(words)] = Field(
        default=["inline", "shared_memory"],
        description="how tensors may come and go; large ones by shared_memory or ucx where both ends can",
    )
    shared_memory_mib: int = Field(
        default=0, ge=0, description="memory for large tensors to consumers on this host, taken at start; 0: none"
    )
    shared_memory_dir: str = Field(default="/dev/shm", description="a directory in memory, the same for consumers")
    large_tensor_bytes: int | None = Field(
        default=None, ge=1, description="smaller tensors go inline; default: 65536 for shared_memory, 262144 for ucx"
    )
    drain_timeout_s: float = Field(default=60.0, gt=0, description="longest wait for requests in flight after SIGTERM")
    metrics_port: int | None = Field(default=None, ge=0, le=65535, description="Prometheus port; default: none")
    log_level: Literal["debug", "info", "warning", "error"] = Field(default="info", description="least level logged")

    @model_validator(mode="after")
    def _finds_the_model(self) -> Self:
        """Serves a model that comes with Quartet, whose directory differs from machine to machine, by its name, and one
        of the hub by the name that it has at any revision."""
        if is_shipped(self.model):
            self.served_model_name = self.served_model_name or self.model
            self.model = resolve(self.model)
        try:
            self.model = pinned(self.model, self.revision)
        except ValueError as error:
            raise ValueError(f"--revision: {error}") from None
        if not Path(self.model).is_dir() and (name := parted(self.model)[0]) != self.model:
            self.served_model_name = self.served_model_name or name
        return self

    @field_validator("transports")
    @classmethod
    def _can_be_used(cls, transports: list[Transport], others: ValidationInfo) -> list[Transport]:
        if "inline" not in transports:
            raise ValueError("must include inline, which carries what the others cannot")
        if "ucx" in transports and others.data.get("tls_cert"):
            raise ValueError("ucx neither encrypts nor knows certificates; leave it out, or TLS")
        return transports

    @property
    def model_name(self) -> str:
        """Name in ServerInfo."""
        return self.served_model_name or self.model


class CompileSettings(StageSettings):
    """Settings of a stage whose engine can compile its steps."""

    compile: Literal["auto", "on", "off"] = Field(
        default="auto",
        description="on: steps are compiled, which takes a minute and more at the start; off: every kernel is started "
        "by itself; auto: CUDA graphs on a GPU, off on a CPU",
    )
