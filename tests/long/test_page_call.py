"""The page at `/` by WebRTC: a real Chromium, a file as its microphone, and scripted stages."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest
import pytest_asyncio

from tests.support.clients.browser import Visit, browser, chromium, microphone_file, visiting
from tests.support.network.lossy import Network
from tests.support.scripted import code2wav
from tests.support.scripted.thinker import PIECES
from tests.support.systems.calls import CallServer, call_server
from tests.support.systems.gateway import Running, running

pytestmark = [pytest.mark.e2e, pytest.mark.long]
TALK, MODEL, USER = "#microphone", ".turn.assistant", ".turn.user"
ANSWER_S = 4.0


@pytest.fixture(autouse=True)
def audible(monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers that Opus keeps, and that the echo canceller of the browser has nothing to find in the microphone."""
    samples = 6000 * np.sin(np.arange(round(ANSWER_S * code2wav.SAMPLE_RATE_HZ)) / 8)
    monkeypatch.setattr(code2wav, "sound", lambda _: samples.astype("<i2").tobytes())


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def chrome(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Any]:
    chromium()  # or skips, before anything is started
    async with browser(microphone_file("What is it?", tmp_path_factory.mktemp("call") / "mic.wav")) as started:
        yield started


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def server() -> AsyncIterator[CallServer]:
    async with call_server() as started:
        yield started


@asynccontextmanager
async def opened(chrome: Any, gateway: Running) -> AsyncIterator[Visit]:
    """The page. Nothing on it may have gone wrong at the end."""
    async with visiting(chrome, gateway.url) as visit:
        await visit.until("body[data-ready]")
        yield visit
        assert await visit.page.inner_text("#notices") == ""
        assert visit.complaints == []
        await visit.page.goto("about:blank")  # who leaves the page leaves the call


@pytest_asyncio.fixture(loop_scope="session")
async def visit(chrome: Any, server: CallServer) -> AsyncIterator[Visit]:
    async with opened(chrome, server.gateway) as visit:
        yield visit
    await server.all_gone()
    await server.gateway.reset()


async def test_a_spoken_turn(visit: Visit, server: CallServer) -> None:
    page = visit.page
    await page.click(TALK)
    assert await visit.number(MODEL, "latency") >= 0
    assert await page.inner_text("#transport") == "Sound by WebRTC"
    assert len(server.calls) == 1
    assert await visit.number(MODEL, "played") > 1000 * ANSWER_S / 2
    assert (await page.inner_text(f"{MODEL} .text")).strip() == "".join(PIECES)
    assert await page.locator(USER).count() == 1
    await page.click(TALK)
    assert await page.get_attribute(TALK, "aria-pressed") == "false"


async def test_an_answer_is_interrupted(visit: Visit, server: CallServer) -> None:
    page = visit.page
    server.gateway.scripts["thinker"].pieces = [f" word{i}" for i in range(20)]
    await page.fill("#message", "Tell me of the sea.")
    await page.press("#message", "Enter")
    assert await visit.number(MODEL, "latency") >= 0
    await page.keyboard.press("Escape")
    assert 0 < await visit.number(MODEL, "played") < 1000 * ANSWER_S
    assert "interrupted after" in await page.inner_text(f"{MODEL} .facts")
    await visit.until(".unheard")


async def takes(visit: Visit) -> str:
    """Which transport the page says that it takes for a spoken turn, which is answered."""
    await visit.page.click(TALK)
    assert await visit.number(MODEL, "latency") >= 0
    return await visit.page.inner_text("#transport")


async def test_where_there_are_no_calls_the_socket_is_taken(chrome: Any) -> None:
    async with running() as gateway, opened(chrome, gateway) as visit:
        assert await takes(visit) == "Sound by WebSocket"


async def test_where_no_datagram_goes_through_the_socket_is_taken(chrome: Any) -> None:
    async with call_server(Network(loss=1.0)) as server, opened(chrome, server.gateway) as visit:
        assert await takes(visit) == "Sound by WebSocket"
