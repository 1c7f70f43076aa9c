"""Ways in which `quartet up` does not start, and the sentences for them: the table of docs/starting.md, row by row.

Each row is provoked for real: a library is hidden in a mount namespace of its own, a file system is full, a checkpoint
is cut. Rows that start engines are long.
"""

import contextlib
import datetime
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import psutil
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from cli import check
from cli.ports import free_ports
from tests.support import engines
from tests.support.systems.command import in_this_process
from tests.support.systems.hub import serving
from tests.support.systems.stack import HANG_GUARD_S, START_TIMEOUT_S, until
from tests.system.test_supervisor import OTHERS, QUARTET, REPOSITORY, environment, stages, started

__all__ = ["stages"]  # the fixture

PAGE = REPOSITORY / "docs/starting.md"
LONG = {"limit of a container's memory", "engine has no room", "engine is killed"}
NEEDS_ROOT = {"library missing", "CPU without AVX2", "no disk for logs", "no disk for the model", "no /dev/shm"}
NEEDS_ROOT |= {"no network", "no permission"}
WITHOUT_RIGHTS = ["setpriv", "--bounding-set=-dac_override,-dac_read_search"]  # of root, to read what it may not
CUT_BYTES = 1000
MEMORY_GROUPS = Path("/sys/fs/cgroup/memory")


def table() -> dict[str, str]:
    """What is said, by what is wrong."""
    rows = re.findall(r"^\| ([^|]+?) \| ([^|]+?) \|$", PAGE.read_text(), re.MULTILINE)
    return {wrong: said for wrong, said in rows if wrong != "what is wrong"}


TABLE = table()


@dataclass
class Start:
    """A `quartet up` that fails.

    Attributes:
        flags: its command line.
        environment: beside that of this process.
        wrapper: the command that runs it.
        before: shell commands as root in a mount namespace of its own, with the network if `network`.
    """

    flags: list[str]
    environment: dict[str, str] = field(default_factory=dict)
    wrapper: list[str] = field(default_factory=list)
    before: str = ""
    network: bool = True

    @property
    def needs_no_process(self) -> bool:
        return self.network and not (self.environment or self.wrapper or self.before)

    def run(self) -> str:
        """What it says. Its exit status is that of a failed start, and it leaves no folder."""
        command = [*self.wrapper, *QUARTET, "up", *self._all_flags()]
        if self.before or not self.network:
            namespaces = ["unshare", "--mount", *([] if self.network else ["--net"])]
            command = [*namespaces, "sh", "-ec", f'{self.before}\nexec "$@"', "sh", *command]
        env = {**os.environ, **self.environment}
        done = subprocess.run(
            command, env=env, capture_output=True, text=True, timeout=START_TIMEOUT_S, check=False, cwd=REPOSITORY
        )
        assert done.returncode in (1, 2), done.stderr
        return done.stderr

    def run_here(self) -> str:
        """The same without a process, for one that starts nothing."""
        done = in_this_process("up", *self._all_flags())
        assert done.exit_code in (1, 2), done.stderr
        return done.stderr

    def _all_flags(self) -> list[str]:
        return self.flags if "--port" in self.flags else [*self.flags, "--port", str(free_ports(1)[0])]


def vits(directory: Path) -> Path:
    return config_of(directory, {"model_type": "vits", "architectures": ["VitsModel"]})


def config_of(directory: Path, config: dict) -> Path:
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def safetensors(file: Path, size: int) -> None:
    """A whole file of `size` bytes of data, which take no place on the disk."""
    header = json.dumps({"w": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}).encode()
    with file.open("wb") as opened:
        opened.write(len(header).to_bytes(8, "little") + header)
        opened.truncate(8 + len(header) + size)


def certificate_of_tomorrow(directory: Path) -> list[str]:
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "tomorrow")])
    begin = datetime.datetime.now(datetime.UTC) + datetime.timedelta(days=1)
    builder = x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
    builder = builder.not_valid_before(begin).not_valid_after(begin + datetime.timedelta(days=1))
    pem = builder.sign(key, hashes.SHA256())
    (directory / "tls.crt").write_bytes(pem.public_bytes(serialization.Encoding.PEM))
    private = serialization.PrivateFormat.PKCS8
    plain = key.private_bytes(serialization.Encoding.PEM, private, serialization.NoEncryption())
    (directory / "tls.key").write_bytes(plain)
    flags = {"cert": "tls.crt", "key": "tls.key", "ca": "tls.crt"}
    return [f"--tls-{flag}={directory / file}" for flag, file in flags.items()]


def without_libnuma(scratch: Path) -> str:
    """Shell commands that take the library away: an overlay has a whiteout in its place."""
    listed = subprocess.run(["/sbin/ldconfig", "-p"], capture_output=True, text=True, check=True).stdout
    (file,) = re.findall(r"libnuma\.so\.1 .*=> (\S+)", listed)[:1]
    folder = Path(file).resolve().parent
    return (
        f"mkdir {scratch}; mount -t tmpfs tmpfs {scratch}; mkdir {scratch}/upper {scratch}/work\n"
        f"mknod {scratch}/upper/{Path(file).name} c 0 0\n"
        f"mount -t overlay overlay -o lowerdir={folder},upperdir={scratch}/upper,workdir={scratch}/work {folder}"
    )


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory, tiny_checkpoint: Path) -> Iterator[dict[str, Future[str]]]:
    """What each of the starts says that start no engine, by what is wrong; processes two at a time."""
    tmp = tmp_path_factory.mktemp("starts")
    cut = Path(shutil.copytree(tiny_checkpoint, tmp / "cut"))
    os.truncate(cut / "model.safetensors", (cut / "model.safetensors").stat().st_size - CUT_BYTES)
    omni = {"model_type": "qwen3_omni_moe", "talker_config": {}}
    huge, far, closed, pointer = (config_of(tmp / name, omni) for name in ("huge", "far", "closed", "pointer"))
    safetensors(huge / "model.safetensors", check.memory_bytes())
    safetensors(far / "model.safetensors", 64 * 2**20)
    (pointer / "model.safetensors").write_text("version 1\noid sha256:0\nsize 1\n")
    closed.chmod(0)
    (tmp / "empty").mkdir()
    (tmp / "cpuinfo").write_text("flags\t\t: fpu sse4_2 avx\n")
    (tmp / "pipeline.yaml").write_text("stages:\n  a: {kind: dot, address: 'localhost:1'}\noutputs: {text: a}\n")
    with (
        socket.create_server(("127.0.0.1", 0)) as taken,
        serving("some/omni", far) as hub,
        serving("some/omni", far) as gated,
        ThreadPoolExecutor(2) as pool,
    ):
        gated.is_gated = True
        port = str(taken.getsockname()[1])
        small = f"mkdir {tmp}/small; mount -t tmpfs -o size=1m tmpfs {tmp}/small"
        starts = {
            "library missing": Start([], before=without_libnuma(tmp / "overlay")),
            "CPU without AVX2": Start([], before=f"mount --bind {tmp}/cpuinfo /proc/cpuinfo"),
            "no memory": Start(["--model", str(huge)]),
            "port taken": Start(["--port", port]),
            "no disk for logs": Start(["--run-dir", f"{tmp}/logs"], before=small.replace("small", "logs")),
            "no disk for the model": Start(
                ["--model", "some/omni"], hub.environment(tmp / "small"), before=small.replace("1m", "8m")
            ),
            "no /dev/shm": Start([], before="mount -t tmpfs -o ro tmpfs /dev/shm"),
            "no such model": Start(["--model", "none/such/here"]),
            "wrong checkpoint": Start(["--model", str(tmp / "empty")]),
            "cut checkpoint": Start(["--model", str(cut)]),
            "pointer of Git LFS": Start(["--model", str(pointer)]),
            "foreign checkpoint": Start(["--model", str(vits(tmp / "vits"))]),
            "gated hub id": Start(["--model", "some/omni"], gated.environment(tmp / "gated")),
            "unknown hub id": Start(["--model", "some/typo"], hub.environment(tmp / "unknown")),
            "no network": Start(
                ["--model", "some/omni"], {"HF_HUB_OFFLINE": "0", "HF_HOME": f"{tmp}/none"}, network=False
            ),
            "wrong dtype": Start(["--code2wav-arg=--dtype=int8"]),
            "no permission": Start(["--model", str(closed)], wrapper=WITHOUT_RIGHTS),
            "pipeline file": Start(["--pipeline", f"{tmp}/pipeline.yaml"]),
            "clock is wrong": Start(certificate_of_tomorrow(tmp)),
        }
        asked = {wrong: start for wrong, start in starts.items() if wrong not in NEEDS_ROOT or is_root()}
        processes = {wrong: pool.submit(start.run) for wrong, start in asked.items() if not start.needs_no_process}
        yield processes | {wrong: done(start) for wrong, start in asked.items() if start.needs_no_process}
        closed.chmod(0o700)


def done(start: Start) -> Future[str]:
    """A start in this process that has ended; how it failed is that test's, not the fixture's."""
    future: Future[str] = Future()
    try:
        future.set_result(start.run_here())
    except (AssertionError, OSError) as error:
        future.set_exception(error)
    return future


def is_root() -> bool:
    """Whether this process may make mount namespaces."""
    probe = ["unshare", "--mount", "--net", "true"]
    return sys.platform == "linux" and subprocess.run(probe, capture_output=True, check=False).returncode == 0


def holds(wrong: str, output: str) -> None:
    """`output` ends with the table's sentence for what is wrong, in one line, and has no stack trace."""
    pattern = re.escape(f"error: {TABLE[wrong]}").replace("…", ".+")
    assert re.fullmatch(pattern, output.splitlines()[-1]), output
    assert "Traceback" not in output


ALONE = {"GPU driver too old", "two servers, one folder", *LONG}


@pytest.mark.parametrize("wrong", sorted(TABLE.keys() - ALONE))
def test_what_is_known_before_is_one_line_before_anything_starts(said: dict[str, Future[str]], wrong: str) -> None:
    if wrong in NEEDS_ROOT and wrong not in said:
        pytest.skip("needs root, for mount namespaces")
    if wrong == "foreign checkpoint":
        engines.require("vllm")
    output = said[wrong].result(HANG_GUARD_S)
    holds(wrong, output)
    assert len(output.splitlines()) == 1


def test_a_folder_of_a_running_server_is_refused(stages: Path) -> None:
    with started(stages) as first:
        command = [*QUARTET, "up", "--model", "any/model", "--port", str(free_ports(1)[0])]
        command += ["--run-dir", str(first.run_directory)]
        done = subprocess.run(
            command, env=environment(stages), capture_output=True, text=True, check=False, timeout=HANG_GUARD_S
        )
        assert done.returncode == 1
        holds("two servers, one folder", done.stderr)


def test_what_torch_says_of_a_driver_is_said_in_a_sentence(stages: Path) -> None:
    talker = stages / "stand_ins/services/talker/__main__.py"
    talker.write_text(
        'raise RuntimeError("The NVIDIA driver on your system is too old (found version 11040). Please update.")'
    )
    (stages / "stand_ins/services/talker/__init__.py").write_text(OTHERS)
    command = [*QUARTET, "up", "--model", "any/model", "--port", str(free_ports(1)[0])]
    run = partial(subprocess.run, env=environment(stages), capture_output=True, text=True, check=False)
    output = run(command, timeout=HANG_GUARD_S).stderr
    holds("GPU driver too old", output)
    (kept,) = (stages / "temporary").iterdir()
    log = kept / "talker.log"
    assert f"(log: {log})" in output
    assert "Traceback" in log.read_text()
    assert "RuntimeError: The NVIDIA driver" in run([*command, "--verbose"], timeout=HANG_GUARD_S).stderr


def test_the_table_has_a_row_for_each_way() -> None:
    assert len(TABLE) >= 15
    assert set(TABLE) >= NEEDS_ROOT | ALONE


@pytest.mark.long
def test_what_the_engine_fails_with_is_said_by_the_thinker() -> None:
    output = Start(["--pipeline", "text", "--thinker-arg=--kv-cache-bytes=1000"]).run()
    holds("engine has no room", output)
    assert "Traceback" in Path(re.findall(r"\(log: (.*)\)", output)[0]).read_text()
    remove_log(output)


@pytest.mark.long
def test_a_stage_that_the_kernel_kills_for_its_memory_is_named() -> None:
    """By a limit of all processes together, as a container has it."""
    group = MEMORY_GROUPS / f"quartet-test-{os.getpid()}"
    try:
        group.mkdir()
        (group / "memory.limit_in_bytes").write_text(str(200 * 2**20))  # importing torch alone takes as much
    except OSError:
        pytest.skip("needs root, and groups of memory (cgroup v1)")
    enter = ["sh", "-c", f'echo $$ > {group}/cgroup.procs; exec "$@"', "sh"]
    try:
        output = Start(["--pipeline", "speech"], {"OMP_NUM_THREADS": "1"}, enter).run()
    finally:
        until(lambda: not (group / "cgroup.procs").read_text(), "all have ended")
        group.rmdir()
    holds("limit of a container's memory", output)
    remove_log(output)


def remove_log(output: str) -> None:
    """What a failed start has kept."""
    shutil.rmtree(Path(re.findall(r"\(log: (.*)\)", output)[0]).parent)


@pytest.mark.long
def test_an_engine_that_is_killed_while_it_loads_is_named(tmp_path: Path) -> None:
    flags = ["--pipeline", "text", "--port", str(free_ports(1)[0]), "--run-dir", str(tmp_path)]
    with (tmp_path / "said").open("wb") as errors:
        up = subprocess.Popen([*QUARTET, "up", *flags], stderr=errors)
    try:
        until(lambda: up.poll() is not None or kill_engine(up.pid), "the engine's process begins")
        assert up.wait(HANG_GUARD_S) == 1
    finally:
        up.kill()
    holds("engine is killed", (tmp_path / "said").read_text())


def kill_engine(pid: int) -> bool:
    """Kills the process that vLLM spawned for its engine, if it is there."""
    for process in psutil.Process(pid).children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if "spawn_main" in " ".join(process.cmdline()):
                time.sleep(1)
                process.send_signal(signal.SIGKILL)
                return True
    return False


@pytest.mark.long
def test_a_stage_alone_says_it_in_its_last_line_without_a_stack_trace(tiny_checkpoint: Path, tmp_path: Path) -> None:
    cut = Path(shutil.copytree(tiny_checkpoint, tmp_path / "cut"))
    os.truncate(cut / "model.safetensors", (cut / "model.safetensors").stat().st_size - CUT_BYTES)
    command = [sys.executable, "-P", "-m", "services.thinker", "--model", str(cut)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=START_TIMEOUT_S)
    assert done.returncode == 2
    last = json.loads(done.stderr.splitlines()[-1])
    assert last["event"] == "cannot start"
    assert last["error"] == "a file of the checkpoint is corrupt or not all there: fetch it again"
    assert "Traceback" not in done.stderr
