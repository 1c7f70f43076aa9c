"""What the documents name as a variable arrives in the container that it is for, if .env has it.

`ARRIVES` and the settings of the processes say where; a name that is not there nor in `ELSEWHERE` fails until it is.
"""

import json
import os
import re
import shutil
import subprocess

import pytest

from tests.support.deployment.compose_files import ROOT, at, interpolated, rendered
from tests.support.documents import PAGES
from tests.support.settings_of_processes import PROCESSES

STAGES = ("thinker", "talker", "code2wav", "dit", "embedder", "aligner")
OURS = ("gateway", *STAGES)
OF_STAGES = (*STAGES, "asr")  # containers; asr runs a thinker
CONTAINERS = ("gateway", *OF_STAGES)
PREFIXES = "QUARTET|OTEL|UCX|GRPC|HF|OMP|COMPOSE|TORCH|WHEELS|PROMETHEUS|GRAFANA|GATEWAY|THINKER|TALKER|CODE2WAV|DIT"
PREFIXES += "|ASR|EMBEDDER|ALIGNER|PROXY|DATABASE|NGINX|POSTGRES"
NAME = re.compile(rf"(?<![A-Z0-9_])(?:{PREFIXES})_(?:[A-Z0-9_]|<[A-Z]+>)+")
VALUE = "4711"


def everywhere(part: str, services: tuple[str, ...] = CONTAINERS) -> list[str]:
    return [f"services.{service}.{part}" for service in services]


def variable_of(name: str, services: tuple[str, ...] = CONTAINERS) -> list[str]:
    return everywhere(f"environment.{name}", services)


# Variables that are not a process's own, and where they have to be. Names in brackets are files of deploy/docker.
ARRIVES = {
    "QUARTET_MODEL": [
        *(f"services.{stage}.environment.QUARTET_{stage.upper()}_MODEL" for stage in STAGES[:3]),
        "[text-dit] services.dit.environment.QUARTET_DIT_MODEL",
    ],
    "QUARTET_MODEL_NAME": [
        f"services.{stage}.environment.QUARTET_{stage.upper()}_SERVED_MODEL_NAME" for stage in STAGES[:3]
    ],
    "QUARTET_DIT_MODEL": [f"{file}services.dit.environment.QUARTET_DIT_MODEL" for file in ("", "[text-dit] ")],
    "QUARTET_DIT_MODEL_NAME": ["services.dit.environment.QUARTET_DIT_SERVED_MODEL_NAME"],
    "QUARTET_EMBEDDER_MODEL": ["services.embedder.environment.QUARTET_EMBEDDER_MODEL"],
    "QUARTET_EMBEDDER_MODEL_NAME": ["services.embedder.environment.QUARTET_EMBEDDER_SERVED_MODEL_NAME"],
    "QUARTET_ALIGNER_MODEL": ["services.aligner.environment.QUARTET_ALIGNER_MODEL"],
    "QUARTET_ALIGNER_MODEL_NAME": ["services.aligner.environment.QUARTET_ALIGNER_SERVED_MODEL_NAME"],
    "QUARTET_VOICE_MODEL": [
        f"[llm-tts] services.{stage}.environment.QUARTET_{stage.upper()}_MODEL" for stage in STAGES[1:3]
    ],
    "QUARTET_VOICE_MODEL_NAME": [
        f"[llm-tts] services.{stage}.environment.QUARTET_{stage.upper()}_SERVED_MODEL_NAME" for stage in STAGES[1:3]
    ],
    "QUARTET_ASR_MODEL": ["services.asr.environment.QUARTET_THINKER_MODEL"],
    "QUARTET_ASR_MODEL_NAME": ["services.asr.environment.QUARTET_THINKER_SERVED_MODEL_NAME"],
    "QUARTET_ASR_DRAIN_TIMEOUT_S": ["services.asr.environment.QUARTET_THINKER_DRAIN_TIMEOUT_S"],
    "QUARTET_ASR_MAX_RUNNING_REQUESTS": ["services.asr.environment.QUARTET_THINKER_MAX_RUNNING_REQUESTS"],
    "QUARTET_ASR_LOG_LEVEL": ["services.asr.environment.QUARTET_THINKER_LOG_LEVEL"],
    "ASR_MEMORY": ["services.asr.deploy.resources.limits.memory"],
    **{
        f"{prefix}ASR_{setting}": [f"[gpu] services.asr.environment.QUARTET_THINKER_{setting}"]
        for setting in ("GPU_MEMORY_UTILIZATION", "KV_CACHE_BYTES", "MAX_CONTEXT_TOKENS")
        for prefix in ("", "QUARTET_")
    },
    "QUARTET_PIPELINE": [
        "services.gateway.volumes",
        "[text] services.gateway.volumes",
        "[text-dit] services.gateway.volumes",
        "[llm-tts] services.gateway.volumes",
        "[speech] services.gateway.volumes",
        "[embeddings] services.gateway.volumes",
    ],
    "QUARTET_SIGNING_KEY_FILE": ["[database] secrets.signing-key.file"],
    "QUARTET_DATABASE_PASSWORD_FILE": ["[database] secrets.database-password.file"],
    "GATEWAY_REPLICAS": ["[database] services.gateway.deploy.replicas"],
    "PROXY_MEMORY": ["[database] services.proxy.deploy.resources.limits.memory"],
    "DATABASE_MEMORY": ["[database] services.database.deploy.resources.limits.memory"],
    "NGINX_IMAGE": ["[database] services.proxy.image"],
    "POSTGRES_IMAGE": ["[database] services.database.image"],
    "QUARTET_BIND": ["services.gateway.ports", "services.gateway.environment.QUARTET_GATEWAY_PUBLISHED_HOST"],
    "QUARTET_PORT": ["services.gateway.ports"],
    "QUARTET_ALLOW_ANONYMOUS": ["services.gateway.environment.QUARTET_GATEWAY_ALLOW_ANONYMOUS"],
    "QUARTET_STOP_GRACE_PERIOD": everywhere("stop_grace_period"),
    "QUARTET_SHM_SIZE": [*everywhere("shm_size", OF_STAGES), "[mps] services.mps.shm_size"],
    "QUARTET_TMP_SIZE": everywhere("tmpfs"),
    "QUARTET_TENSORS_SIZE": ["volumes.tensors.driver_opts.o"],
    "QUARTET_KEYS_DIR": ["[keys] services.gateway.volumes"],
    "QUARTET_TLS_DIR": [f"[tls] {path}" for path in everywhere("volumes")],
    "QUARTET_TLS_SERVER_NAME": [f"[tls] {path}" for path in variable_of("QUARTET_TLS_SERVER_NAME")],
    "QUARTET_VARIANT": [*everywhere("build.args.VARIANT", OURS), *everywhere("image", OF_STAGES)],
    "QUARTET_UCX": everywhere("build.args.UCX", OURS),
    "TORCH_INDEX": everywhere("build.args.TORCH_INDEX", OURS),
    "WHEELS_IMAGE": everywhere("build.args.WHEELS_IMAGE", OURS),
    "PROMETHEUS_IMAGE": ["services.prometheus.image"],
    "GRAFANA_IMAGE": ["services.grafana.image"],
    "OTEL_COLLECTOR_IMAGE": ["services.otel-collector.image"],
    "HF_TOKEN": variable_of("HF_TOKEN", OF_STAGES),
    "HF_TOKEN_FILE": ["secrets.hf-token.file"],
    "HF_ENDPOINT": variable_of("HF_ENDPOINT", OF_STAGES),
    "OMP_NUM_THREADS": variable_of("OMP_NUM_THREADS", OF_STAGES),
    "GRPC_VERBOSITY": variable_of("GRPC_VERBOSITY"),
    "QUARTET_OTLP_ENDPOINT": variable_of("QUARTET_OTLP_ENDPOINT"),
    "QUARTET_TRACEBACKS": variable_of("QUARTET_TRACEBACKS"),
    "OTEL_EXPORTER_OTLP_ENDPOINT": variable_of("OTEL_EXPORTER_OTLP_ENDPOINT"),
    "OTEL_EXPORTER_OTLP_PROTOCOL": variable_of("OTEL_EXPORTER_OTLP_PROTOCOL"),
    "OTEL_TRACES_SAMPLER": variable_of("OTEL_TRACES_SAMPLER"),
    "UCX_TLS": variable_of("UCX_TLS", OF_STAGES),
    "UCX_NET_DEVICES": variable_of("UCX_NET_DEVICES", OF_STAGES),
    "UCX_TCP_PORT_RANGE": variable_of("UCX_TCP_PORT_RANGE", OF_STAGES),
    **{f"{service.upper()}_MEMORY": [f"services.{service}.deploy.resources.limits.memory"] for service in OURS},
    "THINKER_GPU_MEMORY_UTILIZATION": ["[gpu] services.thinker.environment.QUARTET_THINKER_GPU_MEMORY_UTILIZATION"],
    "THINKER_KV_CACHE_BYTES": ["[gpu] services.thinker.environment.QUARTET_THINKER_KV_CACHE_BYTES"],
    "THINKER_MAX_CONTEXT_TOKENS": ["[gpu] services.thinker.environment.QUARTET_THINKER_MAX_CONTEXT_TOKENS"],
    "TALKER_MAX_RUNNING_REQUESTS": ["[gpu] services.talker.environment.QUARTET_TALKER_MAX_RUNNING_REQUESTS"],
    "TALKER_MAX_CONTEXT_POSITIONS": ["[gpu] services.talker.environment.QUARTET_TALKER_MAX_CONTEXT_POSITIONS"],
    "CODE2WAV_MAX_RUNNING_REQUESTS": ["[gpu] services.code2wav.environment.QUARTET_CODE2WAV_MAX_RUNNING_REQUESTS"],
    "QUARTET_WEBRTC_ADDRESSES": ["[webrtc] services.webrtc.environment.QUARTET_WEBRTC_ADDRESSES"],
    "QUARTET_WEBRTC_MAX_CALLS": ["[webrtc] services.webrtc.environment.QUARTET_WEBRTC_MAX_CALLS"],
    "QUARTET_WEBRTC_UDP_PORT": [
        "[webrtc] services.webrtc.environment.QUARTET_WEBRTC_UDP_PORT",
        "[webrtc] services.webrtc.ports",
    ],
    "GRAFANA_PORT": ["services.grafana.ports"],
    "PROMETHEUS_PORT": ["services.prometheus.ports"],
}

# What no variable of compose is: of another program, or fixed by how the containers are put together.
ELSEWHERE = {
    "COMPOSE_FILE": "compose's own",
    "COMPOSE_PROFILES": "compose's own",
    "QUARTET_API_KEY": "of the quartet command",
    "QUARTET_KEY": "of a client's configuration",
    "QUARTET_KEPT_DIR": "of the tests",
    "QUARTET_THINKER_MODEL": "of Kubernetes; QUARTET_MODEL here",
    "QUARTET_TALKER_MODEL": "of Kubernetes; QUARTET_MODEL or QUARTET_VOICE_MODEL here",
    "QUARTET_CODE2WAV_MODEL": "of Kubernetes; QUARTET_MODEL or QUARTET_VOICE_MODEL here",
    "HF_HOME": "in the images: below the volume of models",
    "HF_TOKEN_PATH": "where the secret is mounted",
    "QUARTET_TLS_CERT": "in tls.yaml: below QUARTET_TLS_DIR",
    "QUARTET_TLS_KEY": "in tls.yaml: below QUARTET_TLS_DIR",
    "QUARTET_TLS_CA": "in tls.yaml: below QUARTET_TLS_DIR",
    "QUARTET_GATEWAY_API_KEYS_FILE": "in keys.yaml: below QUARTET_KEYS_DIR",
    "QUARTET_THINKER_SHARED_MEMORY_DIR": "where the volume of tensors is mounted",
    "QUARTET_TALKER_SHARED_MEMORY_DIR": "where the volume of tensors is mounted",
}

# Settings that follow from how the containers are put together; of the models, by a variable for all stages.
FIXED = {"host", "port", "metrics_port", "tls_cert", "tls_key", "tls_ca", "tls_server_name", "shared_memory_dir"}
FIXED |= {"pipeline", "published_host", "api_keys_file", "jobs_dir", "voices_dir", "files_dir", "model"}
FIXED |= {"served_model_name", "revision"}  # NAME@REVISION is a model, too
SETTINGS = {
    f"QUARTET_{process.upper()}_{setting.upper()}": process
    for process in OURS
    for setting in PROCESSES[process].model_fields
    if setting not in FIXED
}
FILES = ((), ("gpu",), ("keys", "tls"), ("speech",), ("text",), ("gpu", "text", "tls"), ("gpu", "mps"))
FILES += (("database",), ("gpu", "keys", "tls", "database"))


def named() -> dict[str, set[str]]:
    """Variables that the documents and .env.example name, and their pages. `<STAGE>` is each of them."""
    found: dict[str, set[str]] = {}
    for page in (*PAGES, ROOT / ".env.example"):
        if page.name == "CHANGELOG.md":
            continue
        for name in NAME.findall(page.read_text()):
            each = [name.replace("<STAGE>", stage.upper()) for stage in STAGES] if "<STAGE>" in name else [name]
            for variable in each:
                if not variable.endswith("_") and "<" not in variable:  # QUARTET_TALKER_* and the like: all settings
                    found.setdefault(variable, set()).add(str(page.relative_to(ROOT)))
    return found


NAMED = named()


def places(variable: str) -> list[str]:
    """Where it has to arrive."""
    if process := SETTINGS.get(variable):
        return [f"services.{process}.environment.{variable}"]
    return ARRIVES.get(variable, [])


@pytest.mark.parametrize("variable", sorted(NAMED))
def test_a_variable_that_is_named_arrives(variable):
    where = places(variable)
    assert where or variable in ELSEWHERE, f"{variable}, in {', '.join(NAMED[variable])}: where does it arrive?"
    for place in where:
        files = re.match(r"\[([\w-]+)\] ", place)
        config = rendered({variable: VALUE}, *(files.groups() if files else ()))
        assert VALUE in at(config, place.rpartition(" ")[2]), f"{variable}, in {', '.join(NAMED[variable])}: {place}"


@pytest.mark.parametrize("files", FILES, ids="+".join)
def test_every_setting_arrives_as_it_is_set(files):
    values = {variable: f"{VALUE}-{variable}" for variable in SETTINGS}
    services = rendered(values, *files)["services"]
    environments = {variable: services[process]["environment"] for variable, process in SETTINGS.items()}
    assert not {variable for variable, value in values.items() if environments[variable].get(variable) != value}


@pytest.mark.parametrize("files", FILES, ids="+".join)
def test_a_setting_that_is_not_set_is_left_to_the_process(files):
    """An empty variable would be a wrong value of most of them."""
    for name in CONTAINERS:
        environment = rendered({}, *files)["services"][name]["environment"]
        empty = {variable for variable, value in environment.items() if not value}
        process = "thinker" if name == "asr" else name
        may_be = {"OTEL_EXPORTER_OTLP_ENDPOINT", f"QUARTET_{process.upper()}_SERVED_MODEL_NAME"}
        may_be.add("QUARTET_EMBEDDER_MODEL")  # none comes along
        assert empty <= may_be


def test_stages_read_the_hubs_token_from_a_file():
    config = rendered({"HF_TOKEN_FILE": "./hf-token"})
    assert config["secrets"] == {"hf-token": {"file": "./hf-token"}}
    for name in OF_STAGES:
        service = config["services"][name]
        assert (service["secrets"], service["environment"]["HF_TOKEN_PATH"]) == (["hf-token"], "/run/secrets/hf-token")
        assert "HF_TOKEN" not in service["environment"]
    assert not (ROOT / rendered({})["secrets"]["hf-token"]["file"]).read_text()


def test_no_name_is_held_to_anything_without_being_named():
    assert set(ELSEWHERE) <= set(NAMED)
    assert not set(ELSEWHERE) & {*ARRIVES, *SETTINGS}


def test_defaults_have_variables_again():
    text = "a ${A:-${B:-c}}/${D-e} $${F} ${A}$A"
    assert interpolated(text, {}) == "a c/e ${F} "
    assert interpolated(text, {"A": "", "B": "b", "D": ""}) == "a b/ ${F} "
    assert interpolated(text, {"A": "1", "D": "4"}) == "a 1/4 ${F} 11"


@pytest.mark.skipif(shutil.which("docker") is None, reason="docker is not installed")
@pytest.mark.parametrize("files", FILES, ids="+".join)
def test_compose_reads_the_files_in_the_same_way(files, tmp_path):
    if subprocess.run(["docker", "compose", "version"], capture_output=True, timeout=60).returncode:
        pytest.skip("docker has no compose")
    values = {"QUARTET_TALKER_LOG_LEVEL": "debug", "QUARTET_GATEWAY_WORKERS": "3", "QUARTET_PIPELINE": "./other.yaml"}
    values |= {"THINKER_KV_CACHE_BYTES": "1", "QUARTET_THINKER_MAX_CONTEXT_TOKENS": "2", "TALKER_MEMORY": "3m"}
    env_file = tmp_path / ".env"
    env_file.write_text("".join(f"{name}={value}\n" for name, value in values.items()))
    chosen = ["docker-compose.yaml", *(f"deploy/docker/{file}.yaml" for file in files)]
    command = ["docker", "compose", "--env-file", str(env_file), *(word for file in chosen for word in ("-f", file))]
    command += ["--profile", "*", "config", "--format", "json"]
    environment = {name: value for name, value in os.environ.items() if not NAME.fullmatch(name)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    theirs, ours = json.loads(done.stdout)["services"], rendered(values, *files)["services"]
    for name in CONTAINERS:
        given = {variable: value for variable, value in theirs[name]["environment"].items() if value is not None}
        assert given == ours[name]["environment"], name
        mounted = {(mount["source"].removeprefix(f"{ROOT}/"), mount["target"]) for mount in theirs[name]["volumes"]}
        assert mounted == {
            (source.removeprefix("./"), target)
            for source, target in (mount.removesuffix(":ro").rsplit(":", 1) for mount in ours[name]["volumes"])
        }
    assert theirs["talker"]["deploy"]["resources"]["limits"]["memory"] == str(3 << 20)
