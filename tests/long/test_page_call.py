"""The page at `/` by WebRTC: a real Chromium, a file as its microphone, and scripted stages."""

from collections.abc import AsyncIterator

import numpy as np
import pytest
import pytest_asyncio

from tests.support.clients.browser import Visit, browser, chromium, microphone_file, visiting
from tests.support.scripted import code2wav
from tests.support.scripted.thinker import PIECES
from tests.support.systems.calls import CallServer, call_server
from tests.support.systems.gateway import running

pytestmark = [pytest.mark.e2e, pytest.mark.long]
TALK, MODEL, USER = "#microphone", ".turn.assistant", ".turn.user"
ANSWER_S = 4.0


@pytest.fixture(autouse=True)
def audible(monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers that Opus keeps, and that the echo canceller of the browser has nothing to find in the microphone."""
    samples = 6000 * np.sin(np.arange(round(ANSWER_S * code2wav.SAMPLE_RATE_HZ)) / 8)
    monkeypatch.setattr(code2wav, "sound", lambda _: samples.astype("<i2").tobytes())


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def server() -> AsyncIterator[CallServer]:
    chromium()  # or skips, before anything is started
    async with call_server() as started:
        yield started


@pytest_asyncio.fixture(loop_scope="session")
async def visit(server: CallServer, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Visit]:
    microphone = microphone_file("What do you see in this picture?", tmp_path_factory.mktemp("call") / "mic.wav")
    async with browser(microphone) as started, visiting(started, server.gateway.url) as opened:
        await opened.until("body[data-ready]")
        yield opened
        assert await opened.page.inner_text("#notices") == ""
        assert opened.complaints == []
        assert opened.complaints == []
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


async def test_where_there_are_no_calls_the_socket_is_taken(tmp_path_factory: pytest.TempPathFactory) -> None:
    microphone = microphone_file("What do you see?", tmp_path_factory.mktemp("none") / "mic.wav")
    async with running() as gateway, browser(microphone) as started, visiting(started, gateway.url) as opened:
        await opened.until("body[data-ready]")
        await opened.page.click(TALK)
        assert await opened.number(MODEL, "latency") >= 0
        assert await opened.page.inner_text("#transport") == "Sound by WebSocket"
        assert await opened.page.inner_text("#notices") == ""
        assert opened.complaints == []
