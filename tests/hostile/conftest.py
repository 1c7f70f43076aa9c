"""One gateway, before scripted stages, for all tests of the folder."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from gateway.access.api_keys import digest
from tests.support.systems.gateway import SPEECH, Running, running

KEY = "sk-quartet-hostile"
HEAD_S, BODY_S, STALL_S, CONNECTIONS = 1.0, 2.0, 4.0, 24


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def hostile_gateway(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Running]:
    """Before stages that speak and one that makes pictures, with short times. One key opens everything."""
    directory: Path = tmp_path_factory.mktemp("hostile")
    keys = directory / "keys.yaml"
    keys.write_text(f"keys:\n  - name: mallory\n    sha256: {digest(KEY)!r}\n    admin: true\n")
    settings: Any = {"head_timeout_s": HEAD_S, "body_timeout_s": BODY_S, "request_timeout_s": STALL_S}
    async with running(
        SPEECH.with_name("qwen3-omni-dit.yaml"),
        hosted_tools=["image_generation"],
        api_keys_file=keys,
        jobs_dir=directory / "jobs",
        voices_dir=directory / "voices",
        max_connections_of_address=CONNECTIONS,
        **settings,
    ) as gateway:
        gateway.openai.api_key = KEY
        gateway.app.openapi()  # is made once
        yield gateway


@pytest_asyncio.fixture(loop_scope="session")
async def gateway(hostile_gateway: Running) -> AsyncIterator[Running]:
    yield hostile_gateway
    await hostile_gateway.reset()
