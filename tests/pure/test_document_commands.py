"""Every command in a shell block of the documents is run by a test, or held to what would read it.

`CHECKS` has the programs. A new one fails until it is there: have a test run it (tests/system/test_docs.py runs
curl and blocks of Python as they come), or write a check here that fails when an option, file or name in it is gone.
"""

import json
import re
import shutil
import subprocess
import tomllib
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import typer
import yaml
from typer.core import TyperGroup

from cli.main import app
from gateway.access.signing import read_signing_key
from gateway.app import create_app
from gateway.dialects.responses.store import ResponseStore
from gateway.pipeline.config import load_pipeline
from gateway.settings import GatewaySettings
from tests.support.clients.grpcurl import arguments, check_call
from tests.support.deployment.compose_files import rendered
from tests.support.documents import PAGES, ROOT, SHELL, URL, Command, blocks, commands
from tests.support.k8s.kustomize import build
from tests.support.settings_of_processes import PROCESSES, required_flags

COMMANDS = commands()
LANGUAGES = {*SHELL, "python", "py", "js", "json", "toml", "yaml", "sql", "nginx", "text", ""}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
COMPOSE = yaml.safe_load((ROOT / "docker-compose.yaml").read_text())
DATABASE = rendered({}, "database")
DOCKERFILE = (ROOT / "deploy/docker/Dockerfile").read_text()
FILES = (".png", ".wav", ".mp3", ".mp4", ".yaml", ".crt", ".key")  # of those that a command reads

# Pages whose commands a test types one after another, and that test.
TYPED = {
    "docs/tutorials/own-family.md": "tests/system/test_toy_family.py",
    "docs/tutorials/own-stage.md": "tests/stage/test_examples.py",
}


def quartet(command: Command) -> None:
    """Its own parser takes it, and the stages' parsers what it hands to them."""
    for word in command.words[1:]:
        if word.endswith(FILES) and not word.startswith("-"):  # it has to be there
            Path(word).parent.mkdir(parents=True, exist_ok=True)
            Path(word).touch()
    if "toy" in command.words:
        assert command.page in TYPED  # the parser does not know the family before it is installed
        return
    group, words = typer.main.get_group(app), list(command.words[1:])
    context = group.make_context("quartet", words)
    while isinstance(group, TyperGroup):
        name, found, words = group.resolve_command(context, [*context._protected_args, *context.args])
        assert found is not None
        context, group = found.make_context(name, words, parent=context), found
    for process, settings in PROCESSES.items():
        if flags := context.params.get(f"{process}_arg"):
            settings.load([*required_flags(settings), *flags])


def python(command: Command) -> None:
    """Settings take a process's flags; a program is in the repository, or is one that the page says to save."""
    match command.words[1:]:
        case ("-m", "pip", *words):
            pip(Command(command.where, ("pip", *words), command.text))
        case ("-m", module, *words):
            PROCESSES[module.rpartition(".")[2]].load(words)
        case (file, *_):
            saved = f"`{file}`" in (ROOT / command.page).read_text().replace("Save this as\n", "Save this as ")
            assert (ROOT / file).is_file() or saved


def pip(command: Command) -> None:
    assert command.words[1] == "install"
    for name, extra in re.findall(r"(\w+)\[(\w+)\]", " ".join(command.words)):
        assert name == PROJECT["name"]
        assert extra in PROJECT["optional-dependencies"]


def openssl(command: Command) -> None:
    """It makes a signing key, or a password of database.yaml's."""
    if not shutil.which("openssl"):
        pytest.skip("no openssl here")
    made = subprocess.run(command.words, capture_output=True, timeout=60, check=True)
    if "password" in command.text:
        assert command.text.partition("> ")[2] in secret_files()
        assert re.fullmatch(r"\w{32,}\n", made.stdout.decode())  # also in a URL
        return
    Path("signing.key").write_bytes(made.stdout)
    assert len(read_signing_key(Path("signing.key"))) >= 64


def make(command: Command) -> None:
    makefile = (ROOT / "Makefile").read_text()
    for word in command.words[1:]:
        variable, is_set, _ = word.partition("=")
        assert re.search(rf"^{variable} \?=" if is_set else rf"^{word}:", makefile, re.MULTILINE), word


@cache
def routes() -> dict[str, set[str]]:
    """Methods of the gateway's API, by path."""
    settings = GatewaySettings.model_validate({"pipeline": ROOT / "gateway/pipelines/qwen3-omni-dit.yaml"})
    found: dict[str, set[str]] = {}
    for path, methods in create_app(settings, load_pipeline(settings.pipeline)).openapi()["paths"].items():
        found.setdefault(path, set()).update(method.upper() for method in methods)
    return found


def curl(command: Command) -> None:
    """It asks what is there. tests/system/test_docs.py runs it."""
    (url,) = [word for word in command.words if "localhost:" in word or URL in word]
    words = command.words
    sends = "-d" in words or "-F" in words
    method = words[words.index("-X") + 1] if "-X" in words else "POST" if sends else "GET"
    assert method in routes()[url.partition(":8000")[2]]
    if "-d" in words:
        json.loads(words[words.index("-d") + 1])


def grpcurl(command: Command) -> None:
    """A stage has the method, which takes the request."""
    if command.words[-1] == "$@":  # the function `tlscurl`
        return
    given = arguments(command.words[1:])
    assert len(given) == 2
    if given[1] != "list":
        check_call(command.words[1:], command.stdin)


def docker(command: Command) -> None:
    """The files, services, images and containers that it names are there. `make test-compose` runs docker compose."""
    match command.words[1:]:
        case ("compose", "run", "--rm", "--no-deps", "-v", mounted, name, "cp", "-r", source, target):
            assert mounted.endswith(f":{source}:ro")
            mounts = [each.split(":")[1] for each in COMPOSE["services"][name]["volumes"]]
            assert target.startswith(tuple(f"{each}/" for each in mounts))
        case ("compose", *words):
            while words[0] == "-f":
                assert (ROOT / words[1]).is_file()
                words = words[2:]
            flags = {"up": {"-d", "--build", "--wait", "--no-recreate", "--scale", "--force-recreate", "--no-deps"}}
            flags |= {"down": {"--volumes"}, "logs": {"--tail"}, "stop": set(), "start": set()}
            if words[:2] == ["exec", "-T"]:
                assert words[2] in DATABASE["services"]
                of_postgres(Command(command.where, tuple(words[3:]), command.text))
                return
            assert {word.partition("=")[0] for word in words[1:] if word[0] == "-"} <= flags[words[0]]
            named = {word.partition("=")[0] for word in words[1:] if word[0] != "-"}
            assert named <= set(COMPOSE["services"])
        case ("build", *words):
            assert words[:2] == ["-f", "deploy/docker/Dockerfile"]
            assert words[-1] == "."
            target, image = words[words.index("--target") + 1], words[words.index("-t") + 1]
            assert re.search(rf"^FROM \S+ AS {target}$", DOCKERFILE, re.MULTILINE)
            assert image in images()
            for name in re.findall(r"--build-arg (\w+)=", " ".join(words)):
                assert re.search(rf"^ARG {name}\b", DOCKERFILE, re.MULTILINE)
        case ("stop" | "rm", name) | ("inspect", "-f", _, name):
            found = re.fullmatch(r"quartet-(\w+)-1", name)
            assert found
            assert found[1] in COMPOSE["services"]
        case words:
            assert words[0] == "events"


@cache
def images() -> set[str]:
    """What the overlays without a GPU, and that with a diffusion stage, run."""
    pods = str(build(ROOT / "deploy/k8s/overlays/cpu-demo"))
    return {*re.findall(r"quartet-\w+:[\w.-]+", pods), f"quartet-dit:{PROJECT['version']}-cpu"}


@cache
def objects(directory: str) -> set[str]:
    """`deployment/NAME` and so on of a kustomization."""
    return {f"{each['kind'].lower()}/{each['metadata']['name']}" for each in build(ROOT / directory)}


def kubectl(command: Command) -> None:
    """The overlay is one that can be built, and has what is named. tests/stage/test_kubectl.py has kubectl read the
    flags, and compares what it renders."""
    match command.words[1:]:
        case ("kustomize", directory) | ("apply" | "delete", "-k", directory):
            assert objects(directory)
        case ("-n", "quartet", "wait", "--for=condition=Available", "deployment", "--all", _):
            pass
        case ("-n", "quartet", "delete", _, "-l", _):
            pass  # tests/pure/test_k8s_combinations.py: what it removes
        case ("-n", "quartet", *words):
            named = [word for word in words if "/" in word]
            assert set(named) <= objects("deploy/k8s/overlays/cpu-demo")
            assert named or words[-1] in ("pods", "pod")
        case words:
            pytest.fail(f"no check for {words}")


def kind(command: Command) -> None:
    """kind is not here: the images that it loads are those that the overlay runs."""
    if command.words[1:] != ("create", "cluster"):
        assert command.words[1:3] == ("load", "docker-image")
        assert set(command.words[3:]) == images() - {f"quartet-dit:{PROJECT['version']}-cpu"}


def loop(command: Command) -> None:
    """A loop of `docker build`: each turn is checked as bash expands it."""
    script = "docker() { (IFS=$'\\t'; echo \"docker\t$*\"); }\n" + command.words[1]
    done = subprocess.run(["bash", "-euc", script], capture_output=True, text=True, timeout=60, check=True)
    turns = done.stdout.splitlines()
    assert turns
    for turn in turns:
        docker(Command(command.where, tuple(turn.split("\t")), command.text))


def copies(command: Command) -> None:
    assert (ROOT / command.words[-2]).exists()


def secret(command: Command) -> None:
    """Files that database.yaml reads are for its user alone."""
    mode, *files = [word for word in command.words if word not in ("sudo", "chown", "chmod")]
    assert mode == ("600" if command.words[0] == "chmod" else "10001")
    assert set(files) == secret_files()


def secret_files() -> set[str]:
    secrets = {name: each for name, each in DATABASE["secrets"].items() if name != "hf-token"}
    return {Path(each["file"]).name for each in secrets.values()}


def of_postgres(command: Command) -> None:
    """The program has the options; database.yaml the user and the database. tests/stage/test_database_backup.py
    runs what they do."""
    program, *words = command.words
    options = [word.partition("=") for word in words if word.startswith("--")]
    if shutil.which(program):
        helped = subprocess.run([program, "--help"], capture_output=True, text=True, timeout=60, check=True).stdout
        assert {name for name, _, _ in options} <= set(re.findall(r"--[a-z-]+", helped))
    environment = DATABASE["services"]["database"]["environment"]
    for name, _, value in options:
        if name == "--username":
            assert value == environment["POSTGRES_USER"]


def sqlite3(command: Command) -> None:
    assert Path(command.words[1]).name == f"{ResponseStore.name}.sqlite"
    assert command.words[2].startswith(".backup ")


def typed(command: Command) -> None:
    """A test types the whole page."""
    assert command.page in TYPED, f"give {command.page} a test that types it, and name that in TYPED"


CHECKS: dict[str, Callable[[Command], None]] = {
    "quartet": quartet,
    "python": python,
    "pip": pip,
    "openssl": openssl,
    "make": make,
    "curl": curl,
    "grpcurl": grpcurl,
    "tlscurl": grpcurl,
    "docker": docker,
    "kubectl": kubectl,
    "kind": kind,
    "for": loop,
    "cp": copies,
    "echo": lambda _: None,
    "pg_dump": of_postgres,
    "pg_restore": of_postgres,
    "sqlite3": sqlite3,
    "chmod": secret,
    "sudo": secret,
    "mkdir": typed,
    "sed": typed,
}


def test_there_are_commands() -> None:
    assert len(COMMANDS) > 150
    assert {command.words[0] for command in COMMANDS} == set(CHECKS)


@pytest.mark.parametrize("command", COMMANDS, ids=str)
def test_a_command_is_checked(command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    check = CHECKS.get(command.words[0])
    assert check, f"nothing checks {command.words[0]!r} of {command.where}: see the top of {Path(__file__).name}"
    check(command)


@pytest.mark.parametrize("page", TYPED)
def test_a_page_is_typed_by_its_test(page: str) -> None:
    assert page in (ROOT / TYPED[page]).read_text()


def test_commands_are_in_blocks_that_are_known() -> None:
    """A block of another language, or of none, would hide its commands. `python` is run, `py` and `js` are lines of
    programs that tests/pure/test_client_documents.py compares."""
    assert {block.language for block in blocks()} <= LANGUAGES
    pages = {f"docs/{family}-clients.md" for family in ("chat", "message", "realtime", "speech")}
    assert {block.where.partition(":")[0] for block in blocks("py", "js")} == pages
    hidden = [
        block.where for block in blocks("", "text") if re.search(rf"^\s*\$? ?({'|'.join(CHECKS)}) ", block.text, re.M)
    ]
    assert hidden == []
    for page in PAGES:
        assert len(re.findall(r"^ *```", page.read_text(), re.MULTILINE)) % 2 == 0, page
