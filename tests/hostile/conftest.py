"""One gateway, before scripted stages, for all tests of the folder."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from gateway import app as gateway_app
from gateway.access.api_keys import digest
from tests.hostile.meter import MIB
from tests.support.systems.gateway import METRICS_KEPT_S, SPEECH, Running, running

KEY, OTHER_KEY = "sk-quartet-hostile", "sk-quartet-honest"
HEAD_S, BODY_S, STALL_S, CONNECTIONS = 1.0, 2.0, 4.0, 24
MAX_BODY_BYTES, MAX_REALTIME_BYTES = 12 * MIB, 3 * MIB


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def hostile_gateway(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Running]:
    """Before stages that speak and one that makes pictures, with short times. One key opens everything, the other
    nothing of operators."""
    directory: Path = tmp_path_factory.mktemp("hostile")
    keys = directory / "keys.yaml"
    entry = "  - name: {}\n    sha256: {!r}\n    admin: {}\n"
    entries = entry.format("mallory", digest(KEY), "true") + entry.format("alice", digest(OTHER_KEY), "false")
    keys.write_text(f"keys:\n{entries}")
    settings: Any = {"head_timeout_s": HEAD_S, "body_timeout_s": BODY_S, "request_timeout_s": STALL_S}
    patch = pytest.MonkeyPatch()
    patch.setattr(gateway_app, "METRICS_KEPT_S", METRICS_KEPT_S)
    async with running(
        SPEECH.with_name("qwen3-omni-dit.yaml"),
        hosted_tools=["image_generation"],
        api_keys_file=keys,
        jobs_dir=directory / "jobs",
        voices_dir=directory / "voices",
        files_dir=directory / "files",
        max_connections_of_address=CONNECTIONS,
        max_body_bytes=MAX_BODY_BYTES,
        max_realtime_bytes=MAX_REALTIME_BYTES,
        **settings,
    ) as gateway:
        patch.undo()
        gateway.openai.api_key = KEY
        gateway.app.openapi()  # is made once
        yield gateway


@pytest_asyncio.fixture(loop_scope="session")
async def gateway(hostile_gateway: Running) -> AsyncIterator[Running]:
    yield hostile_gateway
    await hostile_gateway.reset()
