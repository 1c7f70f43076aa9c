"""Settings of the gateway."""

import ipaddress
import os
import re
from functools import partial
from pathlib import Path
from typing import Annotated, Literal, Self
from urllib.parse import urlsplit

from pydantic import AfterValidator, BeforeValidator, Field, SecretStr, model_validator
from pydantic_settings import NoDecode, SettingsConfigDict

from gateway.pipelines import pipeline_file
from services.common.rpc.settings import TlsSettings, words

MIB = 1024 * 1024


def _aliases(values: list[str]) -> list[str]:
    for value in values:
        if not all(value.partition("=")):
            raise ValueError(f"{value!r} is no alias: write it as GLOB=MODEL")
    return values


def _origins(values: list[str]) -> list[str]:
    for value in values:
        parts = urlsplit(value)
        if value not in ("*", "null") and (not parts.scheme or not parts.netloc or value.count("/") > 2):
            raise ValueError(f"{value!r} is no origin: write it as https://HOST or https://HOST:PORT, without a path")
    return [value.lower() for value in values]


def _hosts(values: list[str]) -> list[str]:
    for value in values:
        if not re.fullmatch(r"\*|(\*\.)?[A-Za-z0-9._-]+|\[?[0-9A-Fa-f:.]+\]?", value):
            raise ValueError(f"{value!r} is no name of a host: write it as HOST or *.HOST, without a scheme or port")
    return [value.lower().strip("[]") for value in values]


def _plain_url(value: str | None) -> str | None:
    if value is not None and not re.fullmatch(r"http://[^/?#\s]+/?", value):
        raise ValueError(f"{value!r} is no address of it: write it as http://HOST:PORT")
    return value


def _own_url(value: str | None) -> str | None:
    """With brackets around an IPv6 address: who puts it together knows only that it is an address."""
    if value is None:
        return None
    host, _, port = (_plain_url(value) or "").removeprefix("http://").rstrip("/").rpartition(":")
    if not host or not port.isdecimal():
        raise ValueError(f"{value!r} has no port: write it as http://HOST:PORT")
    return f"http://[{host}]:{port}" if ":" in host and not host.startswith("[") else f"http://{host}:{port}"


def _bucket(value: str | None) -> str | None:
    if value is not None and not re.fullmatch(r"s3://[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9._/-]*)?", value):
        raise ValueError(f"{value!r} is no bucket: write it as s3://BUCKET or s3://BUCKET/PREFIX")
    return value


def _networks(values: list[str]) -> list[str]:
    for value in values:
        ipaddress.ip_network(value)
    return values


def _state_dir(name: str) -> Path | None:
    """None: the user has no home."""
    try:
        base = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local/state"
    except RuntimeError:
        return None
    return Path(base) / "quartet" / name


class GatewaySettings(TlsSettings):
    """OpenAI-compatible gateway of a Quartet pipeline."""

    model_config = SettingsConfigDict(env_prefix="QUARTET_GATEWAY_")

    pipeline: Annotated[Path, AfterValidator(pipeline_file)] = Field(
        description="pipeline YAML: a file, or the name of one that comes with Quartet, e.g. qwen3-omni"
    )
    stage: dict[str, str] = Field(
        default={},
        description="NAME=HOST:PORT or NAME=dns:///NAME:PORT, instead of the pipeline's address; may be repeated",
    )
    aligner: str | None = Field(
        default=None,
        description="HOST:PORT or dns:///NAME:PORT of an aligner, for times of words; added to the pipeline's stages",
    )
    model_name: str | None = Field(
        default=None, description="name clients ask for; default: the pipeline's, else the main stage's"
    )
    model_alias: Annotated[list[str], NoDecode, BeforeValidator(words), AfterValidator(_aliases)] = Field(
        default=[],
        description="GLOB=MODEL: names that mean MODEL in requests, such as gpt-5*=quartet-demo; commas between them; "
        "the first that fits counts",
    )
    host: str = Field(default="127.0.0.1", description="address to listen on")
    port: int = Field(default=8000, ge=0, le=65535, description="port to listen on; 0 takes a free one")
    api_keys_file: Path | None = Field(
        default=None,
        description="YAML of API keys, as `quartet key` prints them; default: none is asked for, on loopback only",
    )
    signing_key_file: Path | None = Field(
        default=None,
        description="file of 32 random bytes or more, the same at every gateway: each then takes the client secrets "
        "that another one made; default: a key of this gateway, which ends with it",
    )
    allow_anonymous: bool = Field(
        default=False, description="listen on an address that others reach, without API keys; no effect with them"
    )
    anonymous_admin: bool = Field(
        default=False,
        description="without API keys: who reaches it may load adapters and take profiles; no effect with keys",
    )
    published_host: str | None = Field(
        default=None,
        description="address that clients reach, where it is not host: that of a container's published port",
    )
    allowed_origins: Annotated[list[str], NoDecode, BeforeValidator(words), AfterValidator(_origins)] = Field(
        default=[],
        description="sites whose pages may use this server from a browser (CORS), commas between them: "
        "https://chat.example.com, ...; * is all; default: none but its own page",
    )
    allowed_hosts: Annotated[list[str], NoDecode, BeforeValidator(words), AfterValidator(_hosts)] = Field(
        default=[],
        description="names by which clients reach this server, commas between them: chat.example.com, *.example.com; "
        "* is all; default: without API keys those that no foreign page can have, with them all",
    )
    page: bool = Field(default=True, description="a page at / to talk, write and make images, and to see the stages")
    log_level: Literal["debug", "info", "warning", "error"] = Field(default="info", description="least level logged")

    workers: int = Field(
        default=1,
        ge=1,
        le=256,
        description="processes that share the port's connections, for one core each; each takes its part of "
        "max_running_requests, max_realtime_sessions and media_cache_bytes",
    )
    max_running_requests: int = Field(default=256, ge=1, description="requests at a time; more get 429")
    max_choices: int = Field(default=8, ge=1, le=128, description="largest n of a request")
    request_timeout_s: float = Field(
        default=600.0, gt=0, description="longest a request may take, media fetching included"
    )
    keep_alive_s: int = Field(
        default=75, ge=5, description="how long an idle connection is kept; longer than a proxy before it keeps one"
    )
    head_timeout_s: float = Field(
        default=10.0, gt=0, description="longest that the headers of a request may take, from its first byte"
    )
    body_timeout_s: float = Field(
        default=30.0,
        gt=0,
        description="longest that a request's body may take, and 1 s more for each KiB of it that has arrived",
    )
    max_connections: int = Field(
        default=4096,
        ge=1,
        description="open connections; a new one closes the oldest that has no request, or is refused",
    )
    max_connections_of_address: int = Field(
        default=1024,
        ge=1,
        description="of them those of one client's address: of a proxy before the gateway, all of its clients'",
    )
    drain_timeout_s: float = Field(default=60.0, gt=0, description="longest wait for running requests at stop")
    max_speech_characters: int = Field(default=50_000, ge=1, description="longest text of a request to speak it")
    max_transcription_s: float = Field(
        default=14_400.0, gt=0, description="longest sound of a transcription; request_timeout_s holds, too"
    )
    webrtc: Annotated[str | None, AfterValidator(_plain_url)] = Field(
        default=None,
        description="URL of the process that has calls by WebRTC (`python -m gateway.webrtc`): http://HOST:PORT; "
        "default: there are no calls",
    )
    hosted_tools: Annotated[list[str], NoDecode, BeforeValidator(words)] = Field(
        default=[],
        description="tools that the gateway runs itself in chats and realtime sessions that ask for them, commas "
        "between them: image_generation, ...; /v1/responses has them without this",
    )
    max_realtime_sessions: int = Field(
        default=256,
        ge=0,
        description="realtime sessions and WebSockets of Responses at a time; each answer in one is a request beside",
    )
    realtime_session_s: float = Field(
        default=3600.0, gt=0, description="longest a realtime session, or a WebSocket of Responses, may last"
    )
    realtime_idle_s: float = Field(
        default=600.0,
        gt=0,
        description="longest that a realtime session, or a WebSocket of Responses, may last in which nothing comes",
    )
    max_realtime_bytes: int = Field(
        default=128 * MIB, ge=1024, description="largest conversation of a session, sound and images included"
    )
    realtime_speculation: bool = Field(
        default=True, description="begin an answer in a pause of the user, and drop it if the user goes on"
    )
    speech_detector: Path | None = Field(
        default=None,
        description="Silero's ONNX file, for realtime sessions, on onnxruntime: install quartet[onnx]; default: the "
        "model that comes with Quartet",
    )
    turn_model: Path | None = Field(
        default=None,
        description="ONNX file of a Smart Turn model (version 3), which says for semantic_vad whether a user has "
        "finished: install quartet[onnx]; default: semantic_vad goes by silence",
    )
    max_body_bytes: int = Field(
        default=256 * MIB,
        ge=1024,
        description="largest request body, and all bodies at a time but for the first 256 KiB of each; also all media "
        "files of a request together",
    )

    database_url: SecretStr | None = Field(
        default=None,
        description="postgresql://USER:PASSWORD@HOST/NAME of the PostgreSQL database that several gateways share; "
        "libpq's variables, e.g. PGPASSWORD, say what it does not; default: SQLite files in the directories below",
    )
    own_url: Annotated[str | None, AfterValidator(_own_url)] = Field(
        default=None,
        description="http://HOST:PORT at which the other gateways of the database reach this one: each then finds its "
        "calls and Live sessions; default: they are found here alone",
    )
    jobs_dir: Path | None = Field(
        default_factory=partial(_state_dir, "jobs"),
        description="directory of video jobs and their files, which gateways may share; with database_url or blobs_url "
        "finished videos are where uploaded files are; default: quartet/jobs in $XDG_STATE_HOME or ~/.local/state",
    )
    video_ttl_s: float = Field(
        default=86_400.0, gt=0, description="how long a video is kept after it was finished or failed"
    )
    video_timeout_s: float = Field(
        default=3600.0, gt=0, description="longest that a stage may take over a video, from when it takes it"
    )
    max_running_videos: int = Field(default=4, ge=1, description="videos made at a time")
    max_queued_videos: int = Field(default=32, ge=0, description="videos that may wait beyond those; more get 429")

    batch_requests: int = Field(
        default=4, ge=1, description="requests of batches at a time, which begin while nobody else is answered"
    )

    voices_dir: Path | None = Field(
        default_factory=partial(_state_dir, "voices"),
        description="directory of uploaded voices and their samples; with database_url or blobs_url samples are where "
        "uploaded files are; default: quartet/voices in $XDG_STATE_HOME or ~/.local/state",
    )
    max_voices: int = Field(default=1000, ge=0, description="most uploaded voices; one takes about 1 MB of disk")
    max_voices_per_key: int = Field(default=100, ge=0, description="most of them that were made with one API key")

    files_dir: Path | None = Field(
        default_factory=partial(_state_dir, "files"),
        description="directory of uploaded files, and with database_url of finished videos and voices' samples, which "
        "gateways may share; default: quartet/files in $XDG_STATE_HOME or ~/.local/state",
    )
    blobs_url: Annotated[str | None, AfterValidator(_bucket)] = Field(
        default=None,
        description="s3://BUCKET/PREFIX for the bytes of uploaded files, videos and voices' samples, which gateways of "
        "many machines reach; its server and credentials are in the environment: AWS_ENDPOINT_URL, AWS_ACCESS_KEY_ID, "
        "AWS_SECRET_ACCESS_KEY, AWS_REGION; default: files_dir has them",
    )
    max_file_bytes: int = Field(
        default=512 * MIB, ge=1, description="largest uploaded file, whatever max_body_bytes is"
    )
    max_files_bytes: int = Field(default=16 * 1024 * MIB, ge=1, description="most bytes of all uploaded files")
    max_files_per_key: int = Field(
        default=1000, ge=0, description="most uploaded files that were sent with one API key, or without any"
    )
    file_ttl_s: float = Field(
        default=2_592_000.0, gt=0, description="how long an uploaded file is kept that has no expires_after"
    )

    responses_dir: Path | None = Field(
        default=None,
        description="directory of responses and conversations that /v1/responses keeps; gateways of one machine may "
        "share it; default, without a database: memory, or with several workers a directory below TMPDIR, until the "
        "gateway ends",
    )
    response_ttl_s: float = Field(
        default=86_400.0, gt=0, description="how long a response or conversation is kept that nobody answers to"
    )
    max_response_bytes: int = Field(
        default=256 * MIB,
        ge=1024,
        description="all of them together; beyond, the longest unused of the key that has most goes first",
    )

    health_timeout_s: float = Field(default=1.0, gt=0, description="a health check that takes longer has failed")

    media_private_addresses: bool = Field(
        default=False, description="fetch media from private, loopback, link-local and reserved addresses too"
    )
    media_denied_networks: Annotated[list[str], NoDecode, BeforeValidator(words), AfterValidator(_networks)] = Field(
        default=[],
        description="further addresses that no media are fetched from, commas between them: 203.0.113.0/24, ...",
    )
    media_max_parts: int = Field(default=64, ge=1, description="most images, sounds and videos of a request")
    media_max_bytes: int = Field(default=128 * MIB, ge=1, description="largest media file")
    media_cache_bytes: int = Field(
        default=128 * MIB,
        ge=0,
        description="media kept in memory that requests gave a uuid, for requests that have the uuid alone; of one "
        "file at most a quarter; 0: none",
    )
    media_max_image_pixels: int = Field(
        default=64_000_000,
        ge=1,
        description="most pixels of one image or video frame; decoded, so many take 192 MB",
    )
    media_max_request_image_pixels: int = Field(
        default=64_000_000,
        ge=1,
        description="most pixels together of all images that a picture is made from: the dit holds them all, decoded",
    )
    decoding_memory_bytes: int = Field(
        default=1024 * MIB,
        ge=64 * MIB,
        description="memory that a process that reads media may take; a file that needs more is refused",
    )
    media_max_audio_s: float = Field(default=2400.0, gt=0, description="longest sound")
    media_max_video_s: float = Field(default=1800.0, gt=0, description="longest video")

    def of_one(self, workers: int, directory: Path) -> Self:
        """One worker's: its share of the limits, and `directory` for what a gateway of one process has in memory."""
        parts = ("max_running_requests", "max_realtime_sessions", "media_cache_bytes")
        changes: dict[str, object] = {name: -(-getattr(self, name) // workers) for name in parts}
        if self.database_url is None and self.responses_dir is None:
            changes["responses_dir"] = directory / "responses"
        return self.model_copy(update=changes)

    @model_validator(mode="after")
    def _has_keys_where_others_reach_it(self) -> Self:
        host = self.host if self.published_host is None else self.published_host
        if self.api_keys_file is None and not self.allow_anonymous and not is_loopback(host):
            raise ValueError(
                f"without API keys the gateway is for this machine alone, but {host or 'every address'} can be reached "
                "from others. Give it API keys (`quartet key NAME` makes them): --api-keys-file, in compose "
                ":deploy/docker/keys.yaml in COMPOSE_FILE; or keep it here: --host 127.0.0.1, in compose "
                "QUARTET_BIND=127.0.0.1; or let everyone in: --allow-anonymous=true, in compose "
                "QUARTET_ALLOW_ANONYMOUS=true"
            )
        return self


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"
