"""`quartet up` with small real processes in place of the stages: gRPC health servers and an HTTP server.

They stand in a directory of their own as packages `services.*` and `gateway`, which PYTHONPATH puts before the real
ones: the supervisor starts them with the very command lines that start the real ones. What is not there, such as the
reader of pipeline files, is found in the real packages. The working directory has folders of the same names, which are
a user's own and must not be touched.
"""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from cli import process as processes
from cli.supervisor import free_ports
from gateway.pipelines import SHIPPED
from tests.support.systems.command import in_this_process
from tests.support.systems.stack import HANG_GUARD_S, until

REPOSITORY = Path(__file__).parents[2]

STAGE = """
import argparse, os, subprocess, sys, time
from concurrent import futures
import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

NAMES = {"thinker": "ThinkerService", "talker": "TalkerService", "code2wav": "Code2WavService", "dit": "DitService",
         "encoder": "EncoderService", "embedder": "EmbedderService", "aligner": "AlignerService"}
flags = argparse.ArgumentParser(allow_abbrev=False)
flags.add_argument("--model")
flags.add_argument("--port")
arguments, rest = flags.parse_known_args()
stage = os.path.basename(os.path.dirname(os.path.abspath(__file__)))
print(stage, arguments.model, *rest, flush=True)
if arguments.model == "broken/model" and stage == "talker":
    sys.exit("talker: no such checkpoint: broken")
if stage == "thinker":  # as vLLM, it has a process of its own that outlives a killed parent unless someone ends it
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
server = grpc.server(futures.ThreadPoolExecutor(2))
servicer = health.HealthServicer()
health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
servicer.set("quartet.v1." + NAMES[stage], health_pb2.HealthCheckResponse.SERVING)
server.add_insecure_port("127.0.0.1:" + arguments.port)
server.start()
if arguments.model == "dies/model" and stage == "talker":
    time.sleep(1)  # ready by then
    os._exit(7)
server.wait_for_termination()
"""

GATEWAY = """
import argparse
import os
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

flags = argparse.ArgumentParser(allow_abbrev=False)
flags.add_argument("--host")
flags.add_argument("--port", type=int)
flags.add_argument("--pipeline")
arguments, rest = flags.parse_known_args()
print(*rest, flush=True)


class Ready(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(503 if os.path.basename(arguments.pipeline) == "never.yaml" else 200)
        self.end_headers()


ThreadingHTTPServer((arguments.host, arguments.port), Ready).serve_forever()
"""

OTHERS = "__path__ = __import__('pkgutil').extend_path(__path__, __name__)"  # of the package, elsewhere on sys.path
DIFFUSERS_FILE = "model_index.json"


# As the command `quartet`, without the working directory; but what never ends by itself is soon killed.
COMMAND = "import cli.reaper; cli.reaper.PATIENCE_S = 0.5; from cli.main import app; app()"
QUARTET = [sys.executable, "-P", "-c", COMMAND]


def environment(directory: Path) -> dict[str, str]:
    """In which `quartet up` starts what stands in `directory`, and keeps temporary files there."""
    paths = os.pathsep.join([str(directory / "stand_ins"), str(REPOSITORY)])
    return {**os.environ, "PYTHONPATH": paths, "TMPDIR": str(directory / "temporary")}


class Run:
    """A running `quartet up`: its process, its run directory and the port of its gateway."""

    def __init__(self, directory: Path, model: str = "any/model", *more: str) -> None:
        self.run_directory = directory / "run"
        (self.port,) = free_ports(1)
        flags = ["--model", model, "--port", str(self.port), "--run-dir", str(self.run_directory), *more]
        self._errors = directory / "stderr.txt"
        with self._errors.open("wb") as errors:
            self.process = subprocess.Popen(
                [*QUARTET, "up", *flags],
                cwd=directory / "users",
                env=environment(directory),
                stderr=errors,
            )

    def errors(self) -> str:
        """What it has said so far."""
        return self._errors.read_text()

    def log(self, name: str) -> str:
        """What a process has said so far."""
        return (self.run_directory / f"{name}.log").read_text()

    def state(self) -> dict[str, Any]:
        """state.json's processes, by name."""
        return json.loads((self.run_directory / "state.json").read_text())["processes"]

    def family(self) -> list[psutil.Process]:
        """Every descendant of `quartet up`."""
        return psutil.Process(self.process.pid).children(recursive=True)


@pytest.fixture
def stages(tmp_path: Path) -> Path:
    """A directory with stand-ins for the packages that `quartet up` starts."""
    scripts = {
        f"services/{stage}": STAGE
        for stage in ("thinker", "talker", "code2wav", "dit", "encoder", "embedder", "aligner")
    } | {"gateway": GATEWAY}
    for package, script in scripts.items():
        folder = tmp_path / "stand_ins" / package
        folder.mkdir(parents=True)
        (folder / "__init__.py").write_text(OTHERS)
        (folder / "__main__.py").write_text(script)
    (tmp_path / "stand_ins/services/__init__.py").write_text(OTHERS)
    for package in ("services", "gateway", "cli"):
        (tmp_path / "users" / package).mkdir(parents=True)
        (tmp_path / "users" / package / "__init__.py").write_text("raise SystemExit('this is the user's own')")
    (tmp_path / "temporary").mkdir()
    return tmp_path


@pytest.fixture
def run(stages: Path) -> Iterator[Run]:
    with started(stages) as run:
        yield run


@contextlib.contextmanager
def started(stages: Path, *arguments: str) -> Iterator[Run]:
    """A `quartet up` that is ready."""
    run = Run(stages, *arguments)
    family: list[psutil.Process] = []
    try:
        until(lambda: "ready after" in run.errors() or run.process.poll() is not None)
        assert run.process.poll() is None, run.errors()
        family = run.family()
        yield run
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):
            family += run.family()
        run.process.kill()
        run.process.wait()
        for process in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()


def all_gone(family: list[psutil.Process]) -> bool:
    return not any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in family)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stop_leaves_no_process(run: Run, number: signal.Signals) -> None:
    family = run.family()
    run.process.send_signal(number)
    assert run.process.wait(HANG_GUARD_S) == 0
    assert all_gone(family)


def test_a_stage_that_dies_is_restarted_on_its_port_and_what_it_had_started_ends(run: Run) -> None:
    before = run.state()["thinker"]
    (engine,) = psutil.Process(before["pid"]).children()
    os.kill(before["pid"], signal.SIGKILL)
    until(lambda: run.state()["thinker"]["pid"] != before["pid"])
    assert all_gone([engine])
    after = run.state()["thinker"]
    assert after["address"] == before["address"]
    host, port = after["address"].split(":")
    until(lambda: _connects(host, int(port)))
    assert "thinker   was killed by SIGKILL" in run.errors()


def test_what_ended_for_want_of_memory_is_told_from_a_crash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert processes.ending(1) == "ended with status 1"
    assert processes.ending(-signal.SIGKILL) == "was killed by SIGKILL"
    for status in (1, -signal.SIGKILL):  # of one whose child was killed, of one that was killed itself
        assert "; out of memory" in processes.ending(status, killed=1)
    vmstat = tmp_path / "vmstat"
    vmstat.write_text("nr_free_pages 1665516\noom_kill 3\n")
    monkeypatch.setattr(processes, "VMSTAT", vmstat)
    assert processes.oom_kills() == 3


def test_killing_the_supervisor_leaves_no_process(run: Run) -> None:
    family = run.family()
    run.process.kill()
    run.process.wait()
    until(lambda: all_gone(family))


def test_a_stage_that_cannot_start_is_named_with_its_log(stages: Path) -> None:
    broken = Run(stages, model="broken/model")
    assert broken.process.wait(HANG_GUARD_S) == 1
    assert "talker: no such checkpoint: broken" in broken.errors()
    assert all_gone([psutil.Process(p["pid"]) for p in broken.state().values() if psutil.pid_exists(p["pid"])])


@pytest.mark.long
def test_a_stage_that_dies_while_others_start_is_named(stages: Path) -> None:
    pipeline = stages / "never.yaml"  # the gateway waits for the stage
    pipeline.write_text((SHIPPED / "qwen3-omni.yaml").read_text())
    dying = Run(stages, "dies/model", "--pipeline", str(pipeline))
    assert dying.process.wait(HANG_GUARD_S) == 1
    assert "talker ended with status 7" in dying.errors()


def test_a_diffusers_directory_is_served_by_a_dit_alone(stages: Path) -> None:
    checkpoint = stages / "checkpoint"
    checkpoint.mkdir()
    (checkpoint / DIFFUSERS_FILE).write_text("{}")
    with started(stages, str(checkpoint), "--dit-arg=--max-batch=3") as run:
        assert set(run.state()) == {"dit", "gateway"}
        assert "starting dit and gateway;" in run.errors()
        assert f"dit {checkpoint} --metrics-port" in run.log("dit")
        assert "--max-batch=3" in run.log("dit")
        assert f"--stage dit={run.state()['dit']['address']}" in run.log("gateway")


def test_ports_of_stages_are_none_that_a_connection_may_get():
    """It would have one before the stage binds it."""
    first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    with contextlib.ExitStack() as taken:
        ports = free_ports(8)
        assert len(set(ports)) == 8
        assert max(ports) < max(first, 32_768)
        for port in ports:
            taken.enter_context(socket.socket()).bind(("127.0.0.1", port))
        assert not set(ports) & {port for _ in range(200) for port in free_ports(100)}


def test_a_port_that_somebody_is_to_bind_is_given_to_nobody_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not by this process nor by another, though all begin at the same number, as two may by chance."""
    (first,) = free_ports(1)
    monkeypatch.setattr("cli.ports.random.randrange", lambda *_: first)
    (second,) = free_ports(1, but=first + 1)
    assert second > first + 1
    code = f"import cli.ports; cli.ports.random.randrange = lambda *_: {first}; print(*cli.ports.free_ports(2))"
    others = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not {first, second} & {int(other) for other in others}


def test_a_pipeline_file_says_which_stages_are_started(stages: Path) -> None:
    text_only = stages / "text.yaml"
    text_only.write_text("stages:\n  writer:\n    kind: thinker\n    address: localhost:1\noutputs:\n  text: writer\n")
    with started(stages, "any/model", "--pipeline", str(text_only), "--thinker-arg=--block-size=32") as run:
        assert set(run.state()) == {"writer", "gateway"}  # by their names in the file
        assert run.log("writer").startswith("thinker any")
        assert "--block-size=32" in run.log("writer")


def test_a_dit_beside_other_stages_has_a_checkpoint_of_its_own(stages: Path) -> None:
    four = str(SHIPPED / "qwen3-omni-dit.yaml")
    with started(stages, "omni/model", "--pipeline", four, "--dit-model", "diffusion/model") as run:
        assert "starting thinker, talker, code2wav, dit and gateway;" in run.errors()
        assert run.log("dit").startswith("dit diffusion")
        for stage in ("thinker", "talker", "code2wav"):
            assert run.log(stage).startswith(f"{stage} omni")


def test_ears_and_a_voice_have_checkpoints_of_their_own(stages: Path) -> None:
    others = ("--talker-model", "tts/model", "--asr-model", "asr/model", "--asr-arg=--max-queued-requests=2")
    with started(stages, "llm/model", *others) as run:
        assert "starting thinker, talker, code2wav, asr and gateway;" in run.errors()
        assert run.log("thinker").startswith("thinker llm")
        assert "--max-queued-requests=2" not in run.log("thinker")
        assert run.log("asr").startswith("thinker asr")
        assert "--max-queued-requests=2" in run.log("asr")
        for stage in ("talker", "code2wav"):
            assert run.log(stage).startswith(f"{stage} tts")


def test_an_aligner_is_added_to_any_pipeline(stages: Path) -> None:
    others = ("--aligner-model", "times/model", "--aligner-arg=--max-words=9")
    with started(stages, "omni/model", *others) as run:
        assert set(run.state()) == {"thinker", "talker", "code2wav", "aligner", "gateway"}
        assert run.log("aligner").startswith("aligner times")
        assert "--max-words=9" in run.log("aligner")
        assert f"--aligner {run.state()['aligner']['address']}" in run.log("gateway")
        assert "--stage aligner" not in run.log("gateway")


def test_an_encoder_and_its_dit_share_a_checkpoint(stages: Path) -> None:
    with started(
        stages, "glm/model", "--pipeline", str(SHIPPED / "glm-image.yaml"), "--encoder-arg=--max-queued-requests=2"
    ) as run:
        assert set(run.state()) == {"encoder", "dit", "gateway"}
        assert run.log("encoder").startswith("encoder glm")
        assert "--max-queued-requests=2" in run.log("encoder")
        assert run.log("dit").startswith("dit glm")
        assert "--encoders stream" in run.log("dit")


TWO_DITS = """stages:
  a: {kind: dit, address: "localhost:1"}
  b: {kind: dit, address: "localhost:2"}
outputs: {image: a, video: b}
"""
DIT_NAMED_GATEWAY = """stages:
  gateway: {kind: dit, address: "localhost:1"}
outputs: {image: gateway}
"""


@pytest.mark.parametrize(
    ("pipeline", "flags", "told"),
    [
        ("qwen3-omni-dit.yaml", [], "--dit-model: missing"),
        ("qwen3-omni.yaml", ["--dit-model=a/b"], "--dit-model: .* has no stage of kind dit"),
        ("qwen3-omni.yaml", ["--talker-model=a/b"], "--talker-model: .* has no talker that reads text"),
        ("llm-tts.yaml", [], "--talker-model: missing; .* has a talker of another checkpoint"),
        ("qwen3-omni.yaml", ["--asr-model=a/b"], "--asr-model: .* has no thinker that only writes down speech"),
        ("qwen3-omni.yaml", ["--asr-arg=--seed=1"], "--asr-arg: .* has no thinker that only writes down speech"),
        ("asr-llm-tts.yaml", ["--talker-model=a/b"], "--asr-model: missing; .* has a thinker for outputs.transcript"),
        ("asr-llm-tts.yaml", ["--asr-model=a/b"], "--talker-model: missing; .* has a talker of another checkpoint"),
        ("dit.yaml", ["--dit-model=a/b"], "--dit-model: .* name its checkpoint by --model"),
        ("dit.yaml", ["--aligner-model=a/b"], "--aligner-model: .* has no model that writes down speech"),
        ("qwen3-omni.yaml", ["--aligner-arg=--max-words=3"], "--aligner-arg: .* has no stage of kind aligner"),
        ("dit.yaml", ["--talker-arg=--max-frames=3"], "--talker-arg: .* has no stage of kind talker"),
        ("no-such.yaml", [], "--pipeline: .*no-such.yaml:1: cannot be read"),
        (TWO_DITS, [], "a and b are both of kind dit"),
        (DIT_NAMED_GATEWAY, [], "stages.gateway: .* use another"),
        (TWO_DITS.replace("kind: dit", "kind: dot"), [], "given.yaml:2: .*unknown stage kind 'dot'"),
    ],
)
def test_what_does_not_fit_the_pipeline_is_refused_before_anything_starts(
    tmp_path: Path, pipeline: str, flags: list[str], told: str
) -> None:
    file = SHIPPED / pipeline
    if "\n" in pipeline:
        file = tmp_path / "given.yaml"
        file.write_text(pipeline)
    run_directory = tmp_path / "run"
    where = ["--port", str(free_ports(1)[0]), "--run-dir", str(run_directory), "--pipeline", str(file)]
    refused = in_this_process("up", "--model", "any/model", *where, *flags)
    assert refused.exit_code == 1
    assert re.search(told, refused.stderr)
    assert "starting" not in refused.stderr
    assert not run_directory.exists()


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--model", "other", "--pipeline", "dit"], r"--model other: has no model_index.json and no modular_.*"),
        (["--model", "a/b", "--talker-arg=--max-frame=1"], r"talker: no such flag: --max-frame=1"),
        (["--model", "llama", "--talker-model", "llama"], r"--talker-model llama: this checkpoint has no talker.*"),
        (["--model", "llama", "--talker-model", "no"], r"--talker-model no: there is no such directory.*"),
        (["--model", "llama", "--asr-model", "llama"], r"--asr-model llama: .*reads texts alone; give a model that .*"),
        (
            ["--model", "a/b", "--aligner-model", "llama"],
            r"--aligner-model llama: .*has no aligner; give Qwen.*-hf, say.*",
        ),
        (["--model", "times"], r"--model times: .*; name it by --aligner-model, beside a --model that .*"),
        (["--model", "a/b", "--api-keys-file", "none.yaml"], r"--api-keys-file: .*none.yaml:1: cannot be read.*"),
        (["--model", "a/b", "--host", "0.0.0.0"], r"gateway: .*without API keys.*"),
        (["--model", "a/b", "--tls-cert", "a", "--tls-key", "b", "--tls-ca", "c"], r"--tls-cert.*"),
    ],
)
def test_a_first_mistake_is_one_line_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: list[str], told: str
) -> None:
    for folder in ("other", "temporary"):
        (tmp_path / folder).mkdir()
    (tmp_path / "other" / "config.json").write_text('{"model_type": "bert"}')
    (tmp_path / "llama").mkdir()
    llama = {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
    (tmp_path / "llama" / "config.json").write_text(json.dumps(llama))
    (tmp_path / "times").mkdir()
    times = {"model_type": "qwen3_asr", "architectures": ["Qwen3ASRForTokenClassification"]}
    (tmp_path / "times" / "config.json").write_text(json.dumps(times))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    refused = in_this_process("up", *flags)
    assert refused.exit_code == 2
    [line] = refused.stderr.splitlines()
    assert re.fullmatch(f"error: {told}", line)
    assert not any((tmp_path / "temporary").iterdir())


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_nothing_stays_in_the_temporary_folder(stages: Path, number: signal.Signals) -> None:
    pipeline = stages / "never.yaml"
    pipeline.write_text((SHIPPED / "qwen3-omni.yaml").read_text())
    temporary = stages / "temporary"
    command = [*QUARTET, "up", "--model", "any/model", "--port", "0", "--pipeline", str(pipeline)]
    loading = subprocess.Popen(command, env=environment(stages), stderr=subprocess.DEVNULL)
    try:
        until(lambda: any(temporary.rglob("talker.log")) or loading.poll() is not None, "a stage begins")
        loading.send_signal(number)
        assert loading.wait(HANG_GUARD_S) == (-number if number == signal.SIGKILL else 0)
        until(lambda: not any(temporary.iterdir()), "its folder is gone")
    finally:
        loading.kill()


def _connects(host: str, port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex((host, port)) == 0
