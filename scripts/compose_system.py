"""Starts, inspects and removes a `docker compose` system without a GPU, for scripts/test_compose.py."""

import json
import os
import re
import socket
import subprocess
import time
from pathlib import Path
from typing import Any

import httpx
import openai
from compose_load import Answer

ROOT = Path(__file__).resolve().parent.parent
STAGES = {
    "thinker": (50051, "quartet.v1.ThinkerService"),
    "talker": (50052, "quartet.v1.TalkerService"),
    "code2wav": (50053, "quartet.v1.Code2WavService"),
}


def docker(*arguments: str, check: bool = True, errors: bool = False, given: str | None = None) -> str:
    """Returns standard output of `docker ARGUMENTS`, or standard error with `errors`. Raises SystemExit."""
    done = subprocess.run(["docker", *arguments], capture_output=True, text=True, check=False, input=given)
    if check and done.returncode:
        raise SystemExit(f"docker {' '.join(arguments)}: exit status {done.returncode}\n{done.stdout}{done.stderr}")
    return (done.stderr if errors else done.stdout).strip()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class System:
    """One compose project with its own name and port.

    Attributes:
        settings: those of .env; a .env that is there is not read.
        profiles: active profiles.
        expected: questions, and their answers without load.
    """

    def __init__(self, project: str, port: int) -> None:
        self.project, self.url = project, f"http://127.0.0.1:{port}"
        self.settings = {"COMPOSE_PROJECT_NAME": project, "QUARTET_PORT": str(port)}
        self.profiles: list[str] = []
        self.expected: dict[str, Answer] = {}

    def compose(self, *arguments: str) -> None:
        """Runs `docker compose ARGUMENTS`. Raises SystemExit."""
        command = self._command(*arguments)
        print("$", *command, flush=True)
        if status := subprocess.run(command, cwd=ROOT, env=self._environment, check=False).returncode:
            raise SystemExit(f"exit status {status}: {' '.join(command)}")

    def refused(self, *arguments: str) -> str:
        """Returns the output of a `docker compose ARGUMENTS` that must fail. Raises AssertionError if it does not."""
        command = self._command(*arguments)
        done = subprocess.run(command, cwd=ROOT, env=self._environment, capture_output=True, text=True, check=False)
        assert done.returncode, f"{' '.join(command)} did not fail"
        return done.stdout + done.stderr

    @property
    def _environment(self) -> dict[str, str]:
        return {**os.environ, **self.settings}

    def _command(self, *arguments: str) -> list[str]:
        profiles = [word for profile in self.profiles for word in ("--profile", profile)]
        return ["docker", "compose", "--env-file", os.devnull, *profiles, *arguments]

    def image(self, service: str) -> str:
        command = self._command("config", "--format", "json")
        config = subprocess.run(command, cwd=ROOT, env=self._environment, capture_output=True, check=True).stdout
        return json.loads(config)["services"][service]["image"]

    def scale(self, stage: str, replicas: int) -> None:
        """Waits until `replicas` containers of `stage` are healthy. Replaces none of them."""
        self.compose("up", "-d", "--no-recreate", "--wait", "--scale", f"{stage}={replicas}", stage)

    def containers(self, service: str) -> list[dict[str, Any]]:
        """Returns `docker inspect` of each running container of `service`, the oldest first."""
        filters = [f"label=com.docker.compose.{k}={v}" for k, v in (("project", self.project), ("service", service))]
        ids = docker("ps", "-q", "--filter", filters[0], "--filter", filters[1]).split()
        found = json.loads(docker("inspect", *ids)) if ids else []
        return sorted(found, key=lambda container: container["Created"])

    def replace(self, stage: str) -> None:
        """Starts a second container of `stage`; when it serves, drains the first."""
        (old,) = self.containers(stage)
        self.scale(stage, 2)
        docker("stop", old["Id"])  # SIGTERM, and the grace period of docker-compose.yaml
        docker("rm", old["Id"])

    def probe(self, container: dict[str, Any], service: str = "") -> tuple[int, str]:
        """Returns status and output of the images' health command in `container`, for `service`."""
        port = STAGES[container["Config"]["Labels"]["com.docker.compose.service"]][0]
        command = ["python", "-m", "services.common.rpc.probe", "--address", f"127.0.0.1:{port}", "--service", service]
        done = subprocess.run(
            ["docker", "exec", container["Id"], *command], capture_output=True, text=True, check=False
        )
        return done.returncode, done.stderr.strip()

    def kill(self, container: dict[str, Any]) -> None:
        """Kills the stage's process as a crash would: Docker restarts nothing after `docker kill`."""
        first = container["State"]["Pid"]
        os.kill(int(Path(f"/proc/{first}/task/{first}/children").read_text().split()[0]), 9)

    def address(self, container: dict[str, Any]) -> str:
        """IP address on the stages' network, which this host reaches."""
        return container["NetworkSettings"]["Networks"][f"{self.project}_stages"]["IPAddress"]

    def finished(self, container: dict[str, Any]) -> int:
        """Ended requests of a stage's container."""
        return self._metric(container, "quartet_requests_total")

    def running(self, container: dict[str, Any]) -> int:
        """Running requests of a stage's container."""
        return self._metric(container, "quartet_requests_running")

    def _metric(self, container: dict[str, Any], name: str) -> int:
        text = httpx.get(f"http://{self.address(container)}:9464/metrics", timeout=5).text
        return int(sum(map(float, re.findall(rf"^{name}(?:\{{.*\}})? (\S+)$", text, re.MULTILINE))))

    def wait_until_ready(self, timeout_s: float) -> float:
        """Returns the seconds until every stage serves. Raises AssertionError after `timeout_s`."""
        begin = time.monotonic()
        while time.monotonic() - begin < timeout_s:
            if httpx.get(f"{self.url}/ready", timeout=5).status_code == 200:
                return time.monotonic() - begin
            time.sleep(0.1)
        raise AssertionError(f"not ready within {timeout_s:g} s: {httpx.get(f'{self.url}/ready').text}")

    def client(self, api_key: str = "none", max_retries: int = 0) -> openai.OpenAI:
        """The official client, by default without retries, so that failures show."""
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=api_key, max_retries=max_retries, timeout=120)

    def leftovers(self) -> list[str]:
        """Existing containers, networks and volumes of the project."""
        label = f"label=com.docker.compose.project={self.project}"
        listings = (("ps", "-aq"), ("network", "ls", "-q"), ("volume", "ls", "-q"))
        return [each for listing in listings for each in docker(*listing, "--filter", label).split()]
