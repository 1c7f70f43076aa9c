"""deploy/docker, docker-compose.yaml and .env.example agree with each other and with the project."""

import os
import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml

from cli.budget_report import MOST_GPUS
from gateway.pipeline.config import load_pipeline
from gateway.settings import GatewaySettings
from services.demo_models import ALIGNER, OMNI, PAINTER
from tests.support.deployment.compose_files import rendered
from tests.support.deployment.health_command import COMMAND
from tests.support.k8s.objects import settings_classes

ROOT = Path(__file__).parent.parent.parent
VERSIONS = dict(
    line.split("=", 1) for line in (ROOT / "deploy/docker/versions.env").read_text().splitlines() if line[:1] not in "#"
)
DOCKERFILE = (ROOT / "deploy/docker/Dockerfile").read_text()
COMPOSE = (ROOT / "docker-compose.yaml").read_text()
DATABASE = (ROOT / "deploy/docker/database.yaml").read_text()
SERVICES = yaml.safe_load(COMPOSE)["services"]
SPEECH = yaml.safe_load((ROOT / "deploy/docker/speech.yaml").read_text())["services"]
TEXT = yaml.safe_load((ROOT / "deploy/docker/text.yaml").read_text())["services"]
SECURITY = ("keys", "tls")
OURS = ("gateway", "thinker", "talker", "code2wav", "asr", "dit", "embedder", "aligner")
PROCESS = {name: name for name in OURS} | {"asr": "thinker"}  # what a service runs, which its image is named after
IMAGES = tuple(dict.fromkeys(PROCESS.values()))
START = ROOT / "deploy/docker/start.py"


def test_versions_are_pinned_in_one_place():
    for name, default in re.findall(
        r"(?:^ARG |\$\{)(\w+)(?:=|:-)([^$}\s]+)", DOCKERFILE + COMPOSE + DATABASE, re.MULTILINE
    ):
        assert VERSIONS.get(name, default) == default, f"{name}: {default} is not what versions.env says"
    for image in VERSIONS.values():
        assert not image.endswith(":latest")


def test_tags_are_the_projects_version():
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert set(re.findall(r"QUARTET_TAG:-([^}]+)\}", COMPOSE)) == {version}


def image(stage):
    """What the Dockerfile says of one stage."""
    found = re.search(rf"^FROM \S+ AS {stage}\n(.*?)(?=^FROM |\Z)", DOCKERFILE, re.MULTILINE | re.DOTALL)
    assert found, stage
    return found[1]


def test_what_stages_compile_outlives_their_containers():
    caches = ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "VLLM_CACHE_ROOT")
    for stage, names in {"thinker": caches, "talker": caches[:2]}.items():
        (volume,) = (mount.split(":")[1] for mount in SERVICES[stage]["volumes"] if mount.startswith("models:"))
        for cache in names:
            assert f" {cache}={volume}/" in image(stage), (stage, cache)
    assert " g++ " in image("thinker-packages-cuda")


def gib(size):
    """Of a size like "8g"."""
    found = re.fullmatch(r"(\d+)g", size)
    assert found, size
    return int(found[1])


@pytest.mark.parametrize("name", OURS[1:])
def test_stages_have_shared_memory_and_load_what_they_compile(name):
    """NCCL and vLLM need 1 GiB for each GPU of a split thinker."""
    service = rendered({}, "gpu")["services"][name]
    assert gib(service["shm_size"]) >= 1
    example = re.search(r"^QUARTET_SHM_SIZE=(.*)$", (ROOT / ".env.example").read_text(), re.MULTILINE)
    assert example
    assert gib(example[1]) >= MOST_GPUS
    [temporary] = service["tmpfs"]
    path, options = temporary.split(":")
    assert (path, "exec" in options.split(",")) == ("/tmp", True)


@pytest.mark.parametrize("name", OURS)
def test_every_stage_sees_all_gpus(name):
    """And chooses by its settings: `quartet budget --gpus N`."""
    resources = rendered({}, "gpu")["services"][name]["deploy"]["resources"]
    gpus = {"devices": [{"driver": "nvidia", "count": "all", "capabilities": ["gpu"]}]}
    assert resources.get("reservations") == (None if name == "gateway" else gpus)
    assert set(resources["limits"]) == {"memory", "pids"}


@pytest.mark.parametrize("name", IMAGES[1:])
def test_an_image_for_gpus_has_the_drivers_libraries_and_a_compiler(name):
    """NVML ("utility") is how vLLM finds GPUs; Triton compiles its launchers."""
    of_cuda = DOCKERFILE.replace("${VARIANT}", "cuda")
    base = {stage: image for image, stage in re.findall(r"^FROM (\S+) AS (\S+)$", of_cuda, re.MULTILINE)}
    layers = [name]
    while layers[-1] in base:
        layers.append(base[layers[-1]])
    assert "torch-cuda" in layers
    capabilities = re.search(r" NVIDIA_DRIVER_CAPABILITIES=(\S+)", image("torch-cuda"))
    assert capabilities
    assert {"compute", "utility"} <= set(capabilities[1].split(","))
    assert " NVIDIA_VISIBLE_DEVICES=all " in image("torch-cuda")
    assert " gcc " in image("torch-cuda")


@pytest.mark.parametrize("name", OURS)
def test_containers_are_hardened(name):
    service = SERVICES[name]
    assert service["user"] == "10001:10001"
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert service["restart"] == "unless-stopped"
    assert service["deploy"]["resources"]["limits"]["memory"]
    assert ("ports" in service) is (name == "gateway")
    drain = service["environment"][f"QUARTET_{PROCESS[name].upper()}_DRAIN_TIMEOUT_S"]
    assert _default(service["stop_grace_period"], "s") > _default(drain)


def test_nobody_is_grafana_s_administrator_and_it_sees_no_stage():
    grafana = SERVICES["grafana"]
    environment = grafana["environment"]
    assert environment["GF_AUTH_BASIC_ENABLED"] == "false"
    assert environment["GF_SECURITY_DISABLE_INITIAL_ADMIN_CREATION"] == "true"
    assert "stages" not in grafana["networks"]
    assert set(grafana["networks"]) & set(SERVICES["prometheus"]["networks"])
    for name in ("prometheus", "grafana", "otel-collector"):
        assert SERVICES[name]["deploy"]["resources"]["limits"]["pids"], name


def _default(text, unit=""):
    """The number that `${NAME:-NUMBER}` has by default."""
    found = re.fullmatch(rf"\$\{{QUARTET_\w+:-(\d+){unit}\}}", text)
    assert found, text
    return int(found[1])


@pytest.mark.parametrize("name", OURS)
def test_failed_starts_are_counted_and_known_to_all(name):
    """And nobody waits for another's health: compose would wait for all of them before it says that one has failed."""
    module = "gateway" if name == "gateway" else f"services.{PROCESS[name]}"
    assert SERVICES[name]["command"] == ["start.py", "python", "-m", module]
    assert f'CMD ["python", "-m", "{module}"]' in image(PROCESS[name])
    assert "starts:/run/quartet-starts" in SERVICES[name]["volumes"]
    needs = SERVICES[name].get("depends_on", {})
    assert set(needs) == (set(OURS[1:]) if name == "gateway" else set())
    assert all(how == {"condition": "service_started", "required": False} for how in needs.values())


def test_plain_commands_see_the_whole_system():
    """`docker compose down` without --profile leaves out, without a word, whatever has a profile."""
    plain = {name for name, service in SERVICES.items() if "profiles" not in service}
    assert plain == {"gateway", "thinker", "talker", "code2wav"}
    for name in plain:
        needed = [other for other, how in SERVICES[name].get("depends_on", {}).items() if how.get("required", True)]
        assert not any("profiles" in SERVICES[other] for other in needed)
    example = (ROOT / ".env.example").read_text()
    profiles = re.search(r"^#?COMPOSE_PROFILES=(\S*)$", example, re.MULTILINE)
    assert profiles
    named = set(profiles[1].split(","))
    assert named == {profile for service in SERVICES.values() for profile in service.get("profiles", [])}


def test_a_speech_server_starts_without_the_thinker():
    """The file takes one service away from what starts, and nothing that does start waits for that one."""
    assert "asr" not in SPEECH  # has a profile already
    (profile,) = SPEECH["thinker"]["profiles"]
    assert profile not in {each for service in SERVICES.values() for each in service.get("profiles", [])}
    waits = [name for name, service in SERVICES.items() if "thinker" in service.get("depends_on", ())]
    assert waits == ["gateway"]
    assert SERVICES["gateway"]["depends_on"]["thinker"]["required"] is False
    (mount,) = SPEECH["gateway"]["volumes"]
    [(source, target)] = re.findall(r"^\$\{QUARTET_PIPELINE:-(\S+)\}:(\S+):ro$", mount)
    assert any(mounted.endswith(f":{target}:ro") for mounted in SERVICES["gateway"]["volumes"])
    assert set(load_pipeline(ROOT / source).stages) == {"talker", "code2wav"}


def test_a_server_of_text_starts_the_thinker_alone():
    for stage in ("talker", "code2wav"):
        (profile,) = TEXT[stage]["profiles"]
        assert profile not in {each for service in SERVICES.values() for each in service.get("profiles", [])}
        assert [name for name, service in SERVICES.items() if stage in service.get("depends_on", ())] == ["gateway"]
        assert SERVICES["gateway"]["depends_on"][stage]["required"] is False
    (mount,) = TEXT["gateway"]["volumes"]
    [(source, target)] = re.findall(r"^\$\{QUARTET_PIPELINE:-(\S+)\}:(\S+):ro$", mount)
    assert any(mounted.endswith(f":{target}:ro") for mounted in SERVICES["gateway"]["volumes"])
    assert set(load_pipeline(ROOT / source).stages) == {"thinker"}


def test_a_voice_has_a_model_of_its_own():
    voiced = yaml.safe_load((ROOT / "deploy/docker/llm-tts.yaml").read_text())["services"]
    (mount,) = voiced["gateway"]["volumes"]
    [(source, target)] = re.findall(r"^\$\{QUARTET_PIPELINE:-(\S+)\}:(\S+):ro$", mount)
    assert any(mounted.endswith(f":{target}:ro") for mounted in SERVICES["gateway"]["volumes"])
    assert load_pipeline(ROOT / source).speaks_text
    assert set(voiced) == {"gateway", "talker", "code2wav"}
    for stage in ("talker", "code2wav"):
        changed = voiced[stage]["environment"]
        assert set(changed) <= set(SERVICES[stage]["environment"])
        assert set(changed.values()) == {f"${{QUARTET_VOICE_MODEL:-{OMNI}}}", "${QUARTET_VOICE_MODEL_NAME:-}"}


@pytest.mark.parametrize(
    ("overlay", "pipeline", "stages"),
    [("text", "asr-llm", {"thinker", "asr"}), ("llm-tts", "asr-llm-tts", {"thinker", "talker", "code2wav", "asr"})],
)
def test_ears_are_added_by_a_profile_and_a_pipeline(overlay, pipeline, stages):
    file = f"./deploy/docker/pipelines/pipeline-{pipeline}.yaml"
    assert f"={file}" in (ROOT / ".env.example").read_text()
    config = load_pipeline(ROOT / file)
    assert (set(config.stages), config.listener) == (stages, "asr")
    models = {"QUARTET_MODEL": "an/llm", "QUARTET_ASR_MODEL": "an/asr", "QUARTET_VOICE_MODEL": "a/tts"}
    services = rendered({"QUARTET_PIPELINE": file, **models}, "gpu", "tls", overlay)["services"]
    assert f"{file}:/etc/quartet/pipeline.yaml:ro" in services["gateway"]["volumes"]
    own = {stage: services[stage]["environment"][f"QUARTET_{PROCESS[stage].upper()}_MODEL"] for stage in stages}
    assert (own["thinker"], own["asr"]) == ("an/llm", "an/asr")
    assert {services[name].get("profiles", ["asr"])[0] for name in stages} == {"asr"}
    assert services["asr"]["image"] == services["thinker"]["image"]


def test_one_checkpoint_understands_and_makes_pictures():
    given = {"QUARTET_MODEL": "a/cosmos", "QUARTET_DIT_MAX_RUNNING_OUTPUTS": "2"}
    services = rendered(given, "gpu", "tls", "text-dit")["services"]
    assert services["thinker"]["environment"]["QUARTET_THINKER_MODEL"] == "a/cosmos"
    assert services["dit"]["environment"]["QUARTET_DIT_MODEL"] == "a/cosmos"
    assert services["dit"]["environment"]["QUARTET_DIT_MAX_RUNNING_OUTPUTS"] == "2"
    started = {name for name in OURS if not {*services[name].get("profiles", ["dit"])} - {"dit"}}
    assert started == {"gateway", "thinker", "dit"}
    (mount,) = (each for each in services["gateway"]["volumes"] if each.endswith(":/etc/quartet/pipeline.yaml:ro"))
    assert set(load_pipeline(ROOT / mount.partition(":")[0]).stages) == {"thinker", "dit"}
    own, demo = ({**given, "QUARTET_DIT_MODEL": "a/painter"}, {})
    for values, model in ((own, "a/painter"), (demo, PAINTER)):
        environment = rendered(values, "text-dit")["services"]["dit"]["environment"]
        assert environment["QUARTET_DIT_MODEL"] == model


@pytest.mark.parametrize("output", ["embeddings", "rerank"])
def test_an_embedder_starts_alone(output):
    file = f"./deploy/docker/pipelines/pipeline-{output}.yaml"
    assert f"={file}" in (ROOT / ".env.example").read_text()
    assert set(load_pipeline(ROOT / file).stages) == {"embedder"}
    chosen = {} if output == "embeddings" else {"QUARTET_PIPELINE": file}
    services = rendered({"QUARTET_EMBEDDER_MODEL": "an/embedder", **chosen}, "gpu", "tls", "embeddings")["services"]
    assert f"{file}:/etc/quartet/pipeline.yaml:ro" in services["gateway"]["volumes"]
    assert services["embedder"]["environment"]["QUARTET_EMBEDDER_MODEL"] == "an/embedder"
    started = {name for name in OURS if not {*services[name].get("profiles", ["embedder"])} - {"embedder"}}
    assert started == {"gateway", "embedder"}


@pytest.mark.skipif(shutil.which("docker") is None, reason="docker is not installed")
@pytest.mark.parametrize(
    ("file", "stages"), [("speech", {"talker", "code2wav"}), ("text", {"thinker"}), ("embeddings", set())]
)
def test_compose_leaves_stages_out(file, stages):
    files = ("docker-compose.yaml", "deploy/docker/gpu.yaml", "deploy/docker/tls.yaml", f"deploy/docker/{file}.yaml")
    command = ["docker", "compose", "--env-file", "/dev/null", *(word for file in files for word in ("-f", file))]
    if subprocess.run(["docker", "compose", "version"], capture_output=True, timeout=60).returncode:
        pytest.skip("docker has no compose")
    done = subprocess.run([*command, "config", "--services"], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert set(done.stdout.split()) == {"gateway", *stages}


def test_an_image_is_built_once():
    """Built by two services at a time, one of the two results keeps 3 GB and no name."""
    built = [service["image"] for service in SERVICES.values() if "build" in service]
    assert len(built) == len(set(built))
    assert set(built) == {service["image"] for service in SERVICES.values() if service["image"].startswith("quartet-")}


@pytest.mark.parametrize("name", OURS)
def test_an_image_has_the_model_that_is_served_without_env(name):
    process = PROCESS[name]
    served = re.findall(r":-([^}]+)", SERVICES[name]["environment"].get(f"QUARTET_{process.upper()}_MODEL", ""))
    assert served == {"gateway": [], "embedder": [], "dit": [PAINTER], "aligner": [ALIGNER]}.get(name, [OMNI])
    copied = r"^COPY --from=code /shipped/(\S+) /opt/quartet/code/services/demo_models/\1$"
    assert re.findall(copied, image(process), re.MULTILINE) == served


@pytest.mark.parametrize("name", IMAGES)
def test_health_checks_start_no_python_and_wait_for_a_slow_start(name):
    image = DOCKERFILE.split(f" AS {name}\n")[1].split("\nFROM ")[0]
    (options, check), *more = re.findall(r"^HEALTHCHECK (.*) CMD (.*)$", image, re.MULTILINE)
    assert not more
    variable = f"QUARTET_{name.upper()}_{'PORT' if name == 'gateway' else 'METRICS_PORT'}"
    assert f"{variable}=" in image
    assert check == f"exec healthy --watch ${variable} {'/health' if name == 'gateway' else '/ready'}"
    limits = dict(re.findall(r"--([a-z-]+)=(\S+)", options))
    assert int(limits["timeout"].removesuffix("h")) * 3600 * 4e6 > 70e9, "70 GB at 4 MB/s are fetched at first"
    assert limits["retries"] == "1", "the command itself asks again before it says no"
    assert "start-period" not in limits, "in which Docker would hear no failure"
    in_compose = {"test": ["CMD-SHELL", f"exec healthy --watch $${variable} /ready"]}  # and the image's limits
    assert SERVICES[name].get("healthcheck") == (in_compose if name == "gateway" else None)


def test_the_commands_of_the_containers_are_in_every_image():
    """In a layer of their own behind the packages, which are not installed again when a command changes."""
    commands = [COMMAND, START]
    names = " ".join(str(command.relative_to(ROOT)) for command in commands)
    for name in IMAGES:
        assert f"COPY {names} /usr/local/bin/" in image(name)
    for command in commands:
        assert os.access(command, os.X_OK)
        assert f"!{command.relative_to(ROOT)}" in (ROOT / ".dockerignore").read_text().splitlines()


@pytest.mark.parametrize("name", OURS)
def test_containers_set_only_settings_that_exist(name):
    files = [COMPOSE, *((ROOT / f"deploy/docker/{file}.yaml").read_text() for file in ("gpu", *SECURITY))]
    services = [service for file in files if (service := yaml.safe_load(file)["services"].get(name))]
    settings = settings_classes()[name]
    known = {f"{settings.model_config.get('env_prefix', '')}{setting.upper()}" for setting in settings.model_fields}
    known |= {f"QUARTET_{setting.upper()}" for setting in settings.for_every_process}
    image = DOCKERFILE.split(f" AS {PROCESS[name]}\n")[1].split("\nFROM ")[0]
    used = {variable for service in services for variable in service.get("environment", {})}
    used |= set(re.findall(r"\b(QUARTET_[A-Z0-9_]+)=", image))
    known |= {"QUARTET_OTLP_ENDPOINT", "QUARTET_TRACEBACKS"}  # of no one process
    assert {each for each in used if each.startswith("QUARTET_") and "_ENCODER_" not in each} <= known


def test_the_example_sets_only_what_is_read():
    files = COMPOSE + "".join(
        (ROOT / f"deploy/docker/{name}.yaml").read_text() for name in ("gpu", "llm-tts", "database", *SECURITY)
    )
    read = set(re.findall(r"\$\{(\w+)", files)) | {"COMPOSE_FILE", "COMPOSE_PROFILES"}
    read |= set(re.findall(r"- (QUARTET_\w+)", (ROOT / "deploy/docker/settings.yaml").read_text()))
    example = set(re.findall(r"^#?([A-Z][A-Z0-9_]+)=", (ROOT / ".env.example").read_text(), re.MULTILINE))
    assert example <= read


def test_stages_find_the_daemon_of_mps():
    """They share its /dev/shm, the directory of its sockets and its user; without mps.yaml nothing of it is there."""
    assert "mps" not in str(rendered({}, "gpu"))
    config = rendered({}, "gpu", "mps")
    daemon = config["services"]["mps"]
    directory = daemon["environment"]["CUDA_MPS_PIPE_DIRECTORY"]
    assert daemon["image"] == VERSIONS["PYTHON_IMAGE"]
    assert (daemon["read_only"], daemon["cap_drop"]) == (True, ["ALL"])
    assert (daemon["security_opt"], daemon["network_mode"]) == (["no-new-privileges:true"], "none")
    assert "compute" in daemon["environment"]["NVIDIA_DRIVER_CAPABILITIES"].split(",")
    assert daemon["ipc"] == "shareable"
    for name in OURS[1:]:
        stage = config["services"][name]
        assert stage["ipc"] == "service:mps"
        assert stage["depends_on"] == {"mps": {"condition": "service_healthy"}}
        assert stage["environment"]["CUDA_MPS_PIPE_DIRECTORY"] == directory
        assert f"mps:{directory}" in stage["volumes"]
        assert f"mps:{directory}" in daemon["volumes"]
        assert stage["user"] == daemon["user"]
        reserved = [each["deploy"]["resources"]["reservations"] for each in (stage, daemon)]
        assert reserved[0] == reserved[1]
        assert stage["deploy"]["resources"]["limits"]["memory"]
    assert f"uid={daemon['user'].partition(':')[0]}," in config["volumes"]["mps"]["driver_opts"]["o"]


def test_pipelines_name_services_and_ports_of_compose():
    for file in (ROOT / "deploy/docker/pipelines").glob("*.yaml"):
        for name, stage in yaml.safe_load(file.read_text())["stages"].items():
            host, port = stage["address"].split(":")
            assert host == name
            assert name in SERVICES
            assert f"EXPOSE {port}" in DOCKERFILE


def test_only_this_machine_reaches_a_gateway_without_keys():
    gateway = SERVICES["gateway"]
    [published] = gateway["ports"]
    host = re.match(r"\$\{QUARTET_BIND:-[^}]+\}", published)
    assert host
    assert gateway["environment"]["QUARTET_GATEWAY_PUBLISHED_HOST"] == host[0]
    assert host[0] == "${QUARTET_BIND:-127.0.0.1}"
    assert gateway["environment"]["QUARTET_GATEWAY_ALLOW_ANONYMOUS"] == (
        "${QUARTET_GATEWAY_ALLOW_ANONYMOUS:-${QUARTET_ALLOW_ANONYMOUS:-false}}"
    )


def test_what_the_security_files_name_is_mounted():
    keys, tls = (yaml.safe_load((ROOT / f"deploy/docker/{name}.yaml").read_text())["services"] for name in SECURITY)
    assert set(tls) == set(OURS)
    for name, service in [("gateway", keys["gateway"]), *tls.items()]:
        [volume] = service["volumes"]
        source, _, target = volume.removesuffix(":ro").rpartition(":")
        assert volume.endswith(":ro")
        assert source in ("${QUARTET_KEYS_DIR:-./keys}", f"${{QUARTET_TLS_DIR:-./tls}}/{name}")
        for variable, file in service["environment"].items():
            if variable == "QUARTET_TLS_SERVER_NAME":
                assert file is None  # as it is in .env
                continue
            setting = variable.removeprefix("QUARTET_").removeprefix("GATEWAY_").lower()
            assert setting in GatewaySettings.model_fields
            assert str(Path(file).parent) == target
