"""Gateways in this process that the tests of a module share; each test finds its gateway as it was at the start.

A module whose tests use one runs on one event loop: `pytestmark = pytest.mark.asyncio(loop_scope="module")`.
"""

from collections.abc import AsyncIterator, Iterator

import pytest
import pytest_asyncio

from gateway.pipeline import route
from services.common.rpc import channels
from tests.support.systems.gateway import SPEECH, Running, running
from tests.support.systems.video import SOUND_INFO, VIDEO_INFO, Client, gateway_before, scripted_dit

REAL_OPTIONS = channels.CLIENT_OPTIONS
PATIENT = {"grpc.min_reconnect_backoff_ms": 60_000, "grpc.keepalive_timeout_ms": 60_000}


@pytest.fixture(scope="session", autouse=True)
def patience() -> Iterator[None]:
    """What is only late, on a machine that stands still for seconds, is not lost: connections and health checks."""
    with pytest.MonkeyPatch.context() as patch:
        options = [(name, PATIENT.get(name, value)) for name, value in REAL_OPTIONS]
        patch.setattr(channels, "CLIENT_OPTIONS", options)
        patch.setattr(route, "_CHECK_TIMEOUT_S", 60.0)
        yield


@pytest.fixture
def real_options(monkeypatch: pytest.MonkeyPatch) -> None:
    """Channels with the product's own options."""
    monkeypatch.setattr(channels, "CLIENT_OPTIONS", REAL_OPTIONS)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def module_speech_gateway() -> AsyncIterator[Running]:
    async with running() as gateway:
        yield gateway


@pytest_asyncio.fixture(loop_scope="module")
async def speech_gateway(module_speech_gateway: Running) -> AsyncIterator[Running]:
    """Before a thinker, a talker and a code2wav."""
    yield module_speech_gateway
    await module_speech_gateway.reset()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def module_picture_gateway(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Running]:
    async with running(SPEECH.with_name("dit.yaml"), jobs_dir=tmp_path_factory.mktemp("jobs")) as gateway:
        yield gateway


@pytest_asyncio.fixture(loop_scope="module")
async def picture_gateway(module_picture_gateway: Running) -> AsyncIterator[Running]:
    """Before a dit that makes pictures."""
    yield module_picture_gateway
    await module_picture_gateway.reset()


@pytest.fixture
def refusing(picture_gateway: Running) -> Iterator[Running]:
    """For requests that must not reach the stage that makes pictures."""
    yield picture_gateway
    assert picture_gateway.scripts["dit"].requests == []


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def module_video_gateway(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Client]:
    async with scripted_dit(VIDEO_INFO) as stage, gateway_before(stage, tmp_path_factory.mktemp("jobs")) as client:
        yield client


@pytest_asyncio.fixture(loop_scope="module")
async def video_gateway(module_video_gateway: Client) -> AsyncIterator[Client]:
    """Before a dit that makes videos."""
    yield module_video_gateway
    await module_video_gateway.reset()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def module_sound_gateway(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Client]:
    async with scripted_dit(SOUND_INFO) as stage, gateway_before(stage, tmp_path_factory.mktemp("jobs")) as client:
        yield client


@pytest_asyncio.fixture(loop_scope="module")
async def sound_gateway(module_sound_gateway: Client) -> AsyncIterator[Client]:
    """Before a dit that makes sound."""
    yield module_sound_gateway
    await module_sound_gateway.reset()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def module_painter() -> AsyncIterator[Running]:
    async with running(SPEECH.with_name("qwen3-omni-dit.yaml"), hosted_tools=["image_generation"]) as gateway:
        yield gateway


@pytest_asyncio.fixture(loop_scope="module")
async def painter(module_painter: Running) -> AsyncIterator[Running]:
    """Before stages that speak and one that makes pictures, with the tool in chats and sessions."""
    yield module_painter
    await module_painter.reset()
