"""Calls by WebRTC as browsers make them: OpenAI's Agents SDK in a real Chromium, unmodified but for the URL.

Three turns, in which the model calls a function, and the user interrupts an answer; over good networks and bad ones."""

import asyncio
import contextlib
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
import uvicorn
from starlette.applications import Starlette
from starlette.responses import HTMLResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from gateway.media.encode import encode_audio
from tests.support.clients.browser import GUARD_MS, browser, chromium
from tests.support.clients.environments import node_with_packages
from tests.support.network.lossy import Network
from tests.support.samples.espeak import spoken
from tests.support.scripted import code2wav
from tests.support.systems.calls import CallServer, call_server

pytestmark = pytest.mark.long
RATE_HZ, ANSWER_S = 24_000, 3.0
TURNS = {
    "first": "Please turn on the lamp.",
    "second": "Wait, tell me about the boats.",
    "third": "And what is the sea like today?",
}
_BUNDLE = Path("node_modules/@openai/agents-realtime/dist/bundle")
_PAGE = "<!doctype html><body></body>"


@pytest_asyncio.fixture(loop_scope="session")
async def pages(tmp_path: Path) -> AsyncIterator[str]:
    """The origin of a site with the program."""
    chromium()
    home = tmp_path
    node_with_packages(home)
    for file in (home / _BUNDLE).glob("*.mjs"):
        shutil.copy(file, home)
    for name, text in TURNS.items():
        (home / f"{name}.wav").write_bytes(encode_audio(spoken(text, RATE_HZ), RATE_HZ, "wav"))
    app = Starlette(routes=[Route("/", lambda _: HTMLResponse(_PAGE)), Mount("/", StaticFiles(directory=home))])
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_config=None))
    server.capture_signals = contextlib.nullcontext  # pyright: ignore[reportAttributeAccessIssue]
    task = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.01)
    yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    server.should_exit = True
    await task


@pytest.fixture
def long_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers of which something is left to interrupt."""
    times = np.arange(round(ANSWER_S * code2wav.SAMPLE_RATE_HZ)) / code2wav.SAMPLE_RATE_HZ
    tone = (8000 * np.sin(2 * np.pi * 300 * times)).astype("<i2")
    monkeypatch.setattr(code2wav, "sound", lambda frames: tone.tobytes())


async def _talk(server: CallServer, pages: str) -> dict[str, Any]:
    """What the program reports."""
    thinker = server.gateway.scripts["thinker"]
    thinker.calls = [("lamp", '{"on": true}'), None]
    secret = (await server.gateway.http.post("/v1/realtime/client_secrets", json={})).json()["value"]
    speech = {name: f"{name}.wav" for name in TURNS}
    async with browser() as chrome:
        page = await chrome.new_page()
        page.set_default_timeout(GUARD_MS)
        await page.goto(pages)
        program = "async (given) => (await import('./agents_call.mjs')).call(...given)"
        url = f"{server.gateway.url}/v1/realtime/calls"
        async with asyncio.timeout(GUARD_MS / 1000):
            return await page.evaluate(program, [url, secret, speech, GUARD_MS / 2])


@pytest.mark.usefixtures("long_answers")
@pytest.mark.parametrize(
    "network", [None, Network(loss=0.03), Network(jitter_s=0.1)], ids=["good", "3 % lost", "100 ms of jitter"]
)
async def test_the_agents_sdk_in_a_browser(pages: str, network: Network | None) -> None:
    async with call_server(network, realtime_speculation=False, allowed_origins=[pages]) as server:
        report = await _talk(server, pages)
        assert report["errors"] == [], report["events"]
        assert report["calls"] == [{"on": True}]
        assert report["done"][2:] == ["completed"] * 2
        assert set(report["done"][:2]) <= {"completed", "turn_detected"}  # most are done long before they are heard
        assert report["buffer"] == ["started", "cleared", "started", "stopped", "started", "stopped"]
        cut_ms, *unheard_ms = report["truncated_ms"]  # the talker speaks beside the call, too
        assert 300 < cut_ms < 1000 * ANSWER_S
        assert set(unheard_ms) <= {0}
        first_ms, *whole_ms = report["heard_ms"]
        assert 300 < first_ms < 1000 * ANSWER_S
        assert all(700 * ANSWER_S < each < 1400 * ANSWER_S for each in whole_ms)
        assert report["callId"].startswith("rtc_")
        await server.all_gone()
