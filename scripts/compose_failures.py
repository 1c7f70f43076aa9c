"""Checks systems that cannot start: `up --wait` ends with a cause. For scripts/test_compose.py."""

import json
import time
from collections.abc import Iterator
from datetime import datetime
from typing import Any

from compose_system import STAGES, System, docker

ENDS_WITHIN_S = 60  # of a stage's third failed start
NO_LIBRARY = "test-without-libnuma"
TEXT = "docker-compose.yaml:deploy/docker/text.yaml"
SPEECH = "docker-compose.yaml:deploy/docker/speech.yaml"


def failed_starts(system: System) -> Iterator[str]:
    """Tries too little memory, an unknown dtype, an unknown model, a model of another kind, a missing library."""
    yield _fails(system, "no memory", {"TALKER_MEMORY": "280m"}, ("talker",), "280 MiB (TALKER_MEMORY)")
    yield _fails(system, "wrong dtype", {"QUARTET_TALKER_DTYPE": "float7"}, ("talker",), "dtype")
    nothing = {"QUARTET_MODEL": "/models/nothing"}
    yield _fails(system, "no model", nothing, tuple(STAGES), "/models/nothing")
    mount = ("--volume", f"{system.project}_models:/models")
    config = '{"architectures": ["BertModel"], "model_type": "bert"}'
    write = f"mkdir -p /models/foreign; echo '{config}' > /models/foreign/config.json"
    docker("run", "--rm", "--network", "none", *mount, system.image("talker"), "sh", "-ec", write)
    foreign = {"QUARTET_MODEL": "/models/foreign", "COMPOSE_FILE": SPEECH}
    yield _fails(system, "wrong model", foreign, ("talker", "code2wav"), "bert")
    _make_images_without_library(system)
    try:
        yield _fails(system, "no library", {"QUARTET_TAG": NO_LIBRARY, "COMPOSE_FILE": TEXT}, ("thinker",), "libnuma")
    finally:
        system.compose("down", "--timeout", "75")
        docker("image", "rm", f"quartet-gateway:{NO_LIBRARY}", f"quartet-thinker:{NO_LIBRARY}-cpu", check=False)


def _fails(system: System, what: str, settings: dict[str, str], stages: tuple[str, ...], cause: str) -> str:
    """Checks how `up --wait` ends with `settings`, which `stages` cannot start with for a `cause`."""
    before, system.settings = system.settings, system.settings | settings
    begin = time.monotonic()
    try:
        said = system.refused("up", "-d", "--wait")
        took, end = time.monotonic() - begin, time.time()
        last = said.strip().splitlines()[-1]
        (stage,) = [stage for stage in stages if f"{system.project}-{stage}-1 is unhealthy" in last]
        (container,) = system.containers(stage)
        line = _last_line(container)
        assert "failed to start 3 times" in line["event"], line
        assert cause in line["error"], line
        waited = end - datetime.fromisoformat(line["timestamp"]).timestamp()
        assert waited < ENDS_WITHIN_S, f"{what}: {waited:.0f} s after the third failed start"
    finally:
        system.compose("down", "--timeout", "75")
        system.settings = before
    return f"{what}: status not 0 after {took:.0f} s, {waited:.0f} s after the third: {last}; {line['error']}"


def _last_line(container: dict[str, Any]) -> dict[str, str]:
    return json.loads(docker("logs", "--tail", "1", container["Id"], errors=True))


def _make_images_without_library(system: System) -> None:
    for service in ("gateway", "thinker"):
        image = system.image(service)
        suffix = "" if service == "gateway" else "-cpu"
        docker("tag", image, f"quartet-{service}:{NO_LIBRARY}{suffix}")
    recipe = f"FROM {system.image('thinker')}\nUSER 0\nRUN rm -f /usr/lib/*/libnuma.so*\nUSER 10001:10001\n"
    docker("build", "--quiet", "--tag", f"quartet-thinker:{NO_LIBRARY}-cpu", "-", given=recipe)
