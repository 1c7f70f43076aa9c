"""One settings class per process: every setting is a flag, an environment variable and a YAML key of one name."""

import argparse
import os
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self, cast

import pydantic_settings
from pydantic import BeforeValidator, Field, ValidationError, ValidationInfo, field_validator, model_validator

from services.demo_models import is_shipped, resolve

Transport = Literal["inline", "shared_memory", "ucx"]


def words(value: Any) -> Any:
    """The list that a flag or a variable has as words with commas between them."""
    return [word.strip() for word in value.split(",")] if isinstance(value, str) else value


class Settings(pydantic_settings.BaseSettings):
    """Settings of a process. `max_frames` is `--max-frames`, `<PREFIX>MAX_FRAMES` and `max_frames:` in the YAML file
    that `--config` names; flags win over the environment, that over the file. Unknown keys, flags and variables with
    the prefix are errors."""

    # Variables with the prefix that are for others than this process.
    for_others: ClassVar[tuple[str, ...]] = ()

    # Settings that QUARTET_<NAME> gives to every process, beside the process's own variable, which goes first.
    for_every_process: ClassVar[tuple[str, ...]] = ()

    model_config = pydantic_settings.SettingsConfigDict(
        extra="forbid", cli_kebab_case=True, cli_avoid_json=True, cli_hide_none_type=True, protected_namespaces=()
    )

    @classmethod
    def load(cls, arguments: list[str] | None = None) -> Self:
        """Reads flags (`arguments`, or those of this process), environment and YAML.

        Raises:
            SystemExit: with one line for each setting at fault, or after printing `--help`.
        """
        config = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
        config.add_argument("--config", type=_existing_file)
        known, flags = config.parse_known_args(arguments)
        variables = {name: os.environ.get(f"QUARTET_{name.upper()}") for name in cls.for_every_process}
        shared = {name: value for name, value in variables.items() if value}

        class Loaded(cls):  # the same settings with the sources of this call
            @classmethod
            def settings_customise_sources(
                cls,
                settings_cls: type[pydantic_settings.BaseSettings],
                init_settings: pydantic_settings.PydanticBaseSettingsSource,
                env_settings: pydantic_settings.PydanticBaseSettingsSource,
                dotenv_settings: pydantic_settings.PydanticBaseSettingsSource,
                file_secret_settings: pydantic_settings.PydanticBaseSettingsSource,
            ) -> tuple[pydantic_settings.PydanticBaseSettingsSource, ...]:
                return (
                    pydantic_settings.CliSettingsSource[Any](settings_cls, cli_parse_args=flags),
                    env_settings,
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


def _existing_file(name: str) -> Path:
    path = Path(name)
    if not path.is_file():
        raise SystemExit(f"--config: {name} is not a file")
    return path


class TlsSettings(Settings):
    """How a process's gRPC connections are made: by mutual TLS if it has the three files, else in the clear."""

    for_every_process: ClassVar[tuple[str, ...]] = ("tls_cert", "tls_key", "tls_ca", "tls_server_name")

    tls_cert: Path | None = Field(
        default=None, description="PEM of this process's certificate, shown to clients and servers"
    )
    tls_key: Path | None = Field(default=None, description="PEM of its private key")
    tls_ca: Path | None = Field(default=None, description="PEM of the CAs that sign the certificates of all processes")
    tls_server_name: str | None = Field(
        default=None,
        description="name that the certificates of other stages must have; default: the host they are reached by",
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
    """Settings that every stage has. A stage's own class sets `env_prefix` and adds to these.

    Attributes:
        changes_outputs: names of settings that change what the stage makes of a request, beside what its ServerInfo
            says: replicas must have them alike.
    """

    changes_outputs: ClassVar[tuple[str, ...]] = ()

    model: str = Field(description="checkpoint directory, hub id, or the name of a model that comes with Quartet")
    served_model_name: str | None = Field(default=None, description="name of the model in ServerInfo; default: --model")
    host: str = Field(default="127.0.0.1", description="address to listen on")
    port: int = Field(default=0, ge=0, le=65535, description="port to listen on; 0 takes a free one")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        default="auto", description="auto: the checkpoint's"
    )
    device: str = Field(default="auto", description="torch device; auto: cuda if there is one, else cpu")
    max_running_requests: int = Field(default=32, ge=1, description="requests the engine works on at a time")
    max_queued_requests: int = Field(default=128, ge=0, description="requests that may wait; more are refused")
    transports: Annotated[list[Transport], pydantic_settings.NoDecode, BeforeValidator(words)] = Field(
        default=["inline", "shared_memory"],
        description="how tensors may come and go: large ones by shared_memory if both ends see the same, else by ucx "
        "if both have it, else inline",
    )
    shared_memory_mib: int = Field(
        default=0,
        ge=0,
        description="memory for large tensors that consumers on this host read, taken at start; 0: none",
    )
    shared_memory_dir: str = Field(
        default="/dev/shm", description="where it is, a directory in memory; consumers need the same"
    )
    shared_memory_min_bytes: int = Field(default=65536, ge=1, description="least size of a tensor that goes there")
    ucx_min_bytes: int = Field(default=262144, ge=1, description="least size of a tensor that goes by ucx")
    drain_timeout_s: float = Field(default=60.0, gt=0, description="longest wait for requests in flight after SIGTERM")
    metrics_port: int | None = Field(
        default=None, ge=0, le=65535, description="Prometheus port; default: no metrics server"
    )
    profile_max_s: float = Field(
        default=60.0, ge=0, description="longest profile that operators may take; it slows the stage; 0: none"
    )
    profile_max_mib: int = Field(
        default=1024, ge=1, description="memory that a profile may take while it is recorded; then it ends"
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(default="info", description="least level logged")

    @model_validator(mode="after")
    def _finds_the_model(self) -> Self:
        """A model that comes with Quartet is served by its name, whose directory is elsewhere on each machine."""
        if is_shipped(self.model):
            self.served_model_name = self.served_model_name or self.model
            self.model = resolve(self.model)
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
        """Name the stage reports."""
        return self.served_model_name or self.model


class CompileSettings(StageSettings):
    """Settings of a stage whose engine can compile its steps."""

    compile: Literal["auto", "on", "off"] = Field(
        default="auto",
        description="on: steps are compiled, which takes a minute and more at the start; off: every kernel is started "
        "by itself; auto: CUDA graphs on a GPU, off on a CPU",
    )
