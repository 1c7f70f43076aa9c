"""A system under `docker compose --profile cpu`, for scripts/test_compose.py: start, look inside, ask, take down."""

import base64
import json
import os
import re
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import openai

ROOT = Path(__file__).resolve().parent.parent
STAGES = {
    "thinker": (50051, "quartet.v1.ThinkerService"),
    "talker": (50052, "quartet.v1.TalkerService"),
    "code2wav": (50053, "quartet.v1.Code2WavService"),
}
FINISHED = re.compile(r'^quartet_requests_total\{[^}]*outcome="(\w+)"[^}]*\} (\S+)$', re.MULTILINE)


def docker(*arguments: str, check: bool = True) -> str:
    """Standard output of `docker ARGUMENTS`. Raises SystemExit, with what it printed, if it failed."""
    done = subprocess.run(["docker", *arguments], capture_output=True, text=True, check=False)
    if check and done.returncode:
        raise SystemExit(f"docker {' '.join(arguments)}: exit status {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout.strip()


class System:
    """One compose project with the cpu profile, of its own name and port: it is in no other's way."""

    def __init__(self, project: str, port: int) -> None:
        self.project, self.url = project, f"http://127.0.0.1:{port}"
        self._environment = {**os.environ, "COMPOSE_PROJECT_NAME": project, "QUARTET_PORT": str(port)}

    def compose(self, *arguments: str) -> None:
        """`docker compose --profile cpu ARGUMENTS`; a .env, which is another system's, is not read.

        Raises:
            SystemExit: it failed; what it printed is on the terminal.
        """
        command = ["docker", "compose", "--env-file", os.devnull, "--profile", "cpu", *arguments]
        print("$", *command, flush=True)
        if status := subprocess.run(command, cwd=ROOT, env=self._environment, check=False).returncode:
            raise SystemExit(f"exit status {status}: {' '.join(command)}")

    def image(self, service: str) -> str:
        """Name of the image of `service`."""
        command = ["docker", "compose", "--env-file", os.devnull, "--profile", "cpu", "config", "--format", "json"]
        config = subprocess.run(command, cwd=ROOT, env=self._environment, capture_output=True, check=True).stdout
        return json.loads(config)["services"][service]["image"]

    def scale(self, stage: str, replicas: int) -> None:
        """Returns when `replicas` containers of `stage` are healthy. None of those that stay is replaced."""
        self.compose("up", "-d", "--no-recreate", "--wait", "--scale", f"{stage}={replicas}", stage)

    def containers(self, service: str) -> list[dict[str, Any]]:
        """What `docker inspect` says of each running container of `service`, the oldest first."""
        filters = [f"label=com.docker.compose.{k}={v}" for k, v in (("project", self.project), ("service", service))]
        ids = docker("ps", "-q", "--filter", filters[0], "--filter", filters[1]).split()
        found = json.loads(docker("inspect", *ids)) if ids else []
        return sorted(found, key=lambda container: container["Created"])

    def replace(self, stage: str) -> None:
        """Starts a second container of `stage`; when it serves, lets the first drain and go."""
        (old,) = self.containers(stage)
        self.scale(stage, 2)
        docker("stop", old["Id"])  # SIGTERM, and the grace period of docker-compose.yaml
        docker("rm", old["Id"])

    def kill(self, container: dict[str, Any]) -> None:
        """SIGKILL to its process, as a crash: `docker kill` would count as wanted and not be followed by a restart."""
        os.kill(container["State"]["Pid"], 9)

    def address(self, container: dict[str, Any]) -> str:
        """Its IP address on the network of the stages, which this host reaches."""
        return container["NetworkSettings"]["Networks"][f"{self.project}_stages"]["IPAddress"]

    def finished(self, container: dict[str, Any]) -> int:
        """Requests that a stage's container has ended, however."""
        text = httpx.get(f"http://{self.address(container)}:9464/metrics", timeout=5).text
        return int(sum(float(count) for _, count in FINISHED.findall(text)))

    def wait_until_ready(self, timeout_s: float) -> float:
        """Seconds until every stage serves. Raises AssertionError after `timeout_s`."""
        begin = time.monotonic()
        while time.monotonic() - begin < timeout_s:
            if httpx.get(f"{self.url}/ready", timeout=5).status_code == 200:
                return time.monotonic() - begin
            time.sleep(0.1)
        raise AssertionError(f"not ready within {timeout_s:g} s: {httpx.get(f'{self.url}/ready').text}")

    def client(self) -> openai.OpenAI:
        """The official client, without retries: a failure shall be seen."""
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=120)

    def leftovers(self) -> list[str]:
        """Containers, networks and volumes of the project that exist."""
        label = f"label=com.docker.compose.project={self.project}"
        listings = (("ps", "-aq"), ("network", "ls", "-q"), ("volume", "ls", "-q"))
        return [each for listing in listings for each in docker(*listing, "--filter", label).split()]


def speak(client: openai.OpenAI, question: str, max_tokens: int = 24, frames: int = 24) -> tuple[str, bytes]:
    """Text and PCM16 speech of one streamed answer; a random model may well say nothing.

    Raises:
        openai.APIError: the server refused or broke off.
        AssertionError: the stream ended without saying why.
    """
    stream = client.chat.completions.create(
        model=client.models.list().data[0].id,
        messages=[{"role": "user", "content": question}],
        modalities=["text", "audio"],
        audio={"voice": "ethan", "format": "pcm16"},
        max_tokens=max_tokens,
        stream=True,
        extra_body={"quartet": {"talker": {"max_frames": frames}}},
    )
    text, pcm, reason = "", b"", None
    for chunk in stream:
        for choice in chunk.choices:
            text += choice.delta.content or ""
            reason = choice.finish_reason or reason
            audio = getattr(choice.delta, "audio", None)
            pcm += base64.b64decode(getattr(audio, "data", None) or "")
    assert reason, f"the stream ended after {len(text)} characters and {len(pcm)} bytes of speech"
    return text, pcm


@dataclass
class Load:
    """Speaking requests, `clients` at a time, one after another, while the block runs: `with Load(...) as load`.

    Attributes:
        answered: requests that were answered in full.
        failures: (start, end, error) of those that were not; times by time.monotonic().
    """

    client: Callable[[], openai.OpenAI]
    clients: int = 8
    answered: int = 0
    failures: list[tuple[float, float, Exception]] = field(default_factory=list)

    def __enter__(self) -> "Load":
        self._ended = threading.Event()
        self._lock = threading.Lock()
        self._threads = [threading.Thread(target=self._ask, args=(i,)) for i in range(self.clients)]
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_) -> None:
        self._ended.set()
        for thread in self._threads:
            thread.join()

    def _ask(self, index: int) -> None:
        client, count = self.client(), 0
        while not self._ended.is_set():
            count += 1
            begin = time.monotonic()
            try:
                speak(client, f"Question {count} of client {index}?")
                with self._lock:
                    self.answered += 1
            except Exception as error:
                with self._lock:
                    self.failures.append((begin, time.monotonic(), error))
                self._ended.wait(0.2)
