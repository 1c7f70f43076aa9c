"""A real Chromium that uses the gateway's page, with a file as its microphone."""

import os
import shutil
import wave
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from tests.support.samples.espeak import speaker_or_skip

if TYPE_CHECKING:
    from playwright.async_api import Browser, ConsoleMessage, Page

CHROMIUM = "QUARTET_TEST_CHROMIUM"  # names the command, where it is none of these
_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
_FLAGS = ("--no-sandbox", "--disable-gpu", "--disable-background-networking")
_QUIET_BEFORE_S, _QUIET_AFTER_S = 1.0, 20.0
GUARD_MS = 240_000  # against hanging; no claim about speed


def chromium() -> str:
    """The command. Skips the test where there is none."""
    pytest.importorskip("playwright", reason="playwright is not installed")
    names = (os.environ[CHROMIUM],) if os.environ.get(CHROMIUM) else _NAMES
    found = next(filter(None, map(shutil.which, names)), None)
    if found is None:
        pytest.skip(f"no {' or '.join(names)} here: scripts/install_chromium.sh installs one, {CHROMIUM} names one")
    return found


def microphone_file(text: str, file: Path) -> Path:
    """Writes what the microphone hears: a second of silence, `text`, and silence. Skips without espeak-ng."""
    speaker = speaker_or_skip()
    samples, rate_hz = speaker.say(text), speaker.rate_hz
    before, after = (np.zeros(round(length_s * rate_hz), np.int16) for length_s in (_QUIET_BEFORE_S, _QUIET_AFTER_S))
    with wave.open(str(file), "wb") as out:
        out.setparams((1, 2, rate_hz, 0, "NONE", ""))
        out.writeframes(np.concatenate([before, samples, after]).astype("<i2").tobytes())
    return file


@asynccontextmanager
async def browser(microphone: Path | None = None) -> "AsyncIterator[Browser]":
    """A running Chromium. Each time that a page opens the microphone, it hears the file from its beginning; without one
    a beep. It makes calls to this machine, too."""
    from playwright.async_api import async_playwright

    media = (
        "--use-fake-ui-for-media-stream",
        "--use-fake-device-for-media-stream",
        *([f"--use-file-for-fake-audio-capture={microphone}%noloop"] if microphone else []),
        "--allow-loopback-in-peer-connection",
        "--autoplay-policy=no-user-gesture-required",
    )
    command = chromium()
    async with async_playwright() as playwright:
        started = await playwright.chromium.launch(executable_path=command, args=[*_FLAGS, *media])
        try:
            yield started
        finally:
            await started.close()


@dataclass
class Visit:
    """An open page.

    Attributes:
        page: of playwright.
        complaints: what the browser found wrong: errors of scripts, what the Content-Security-Policy forbids, and
            what else it writes to its console as an error.
    """

    page: "Page"
    complaints: list[str] = field(default_factory=list)

    async def until(self, selector: str) -> Any:
        """Waits for an element that is shown."""
        return await self.page.wait_for_selector(selector, timeout=GUARD_MS)

    async def number(self, selector: str, name: str) -> float:
        """The page's own number `name` at an element, when it has it."""
        element = await self.until(f"{selector}[data-{name}]")
        return float(await element.get_attribute(f"data-{name}"))

    def _note(self, message: "ConsoleMessage") -> None:
        if message.type == "error":
            self.complaints.append(message.text)


@asynccontextmanager
async def visiting(
    started: "Browser", url: str, key: str | None = None, options: Mapping[str, Any] | None = None
) -> AsyncIterator[Visit]:
    """The gateway's page in a profile of its own.

    Args:
        started: the browser.
        url: of the gateway.
        key: that the user has entered in this tab.
        options: of playwright's `new_context`, e.g. the viewport.
    """
    context = await started.new_context(**(options or {}))
    context.set_default_timeout(GUARD_MS)
    try:
        if key is not None:
            await context.add_init_script(f"sessionStorage.setItem('quartet-api-key', '{key}')")
        visit = Visit(await context.new_page())
        visit.page.on("console", visit._note)
        visit.page.on("pageerror", lambda error: visit.complaints.append(str(error)))
        await visit.page.goto(url)
        yield visit
    finally:
        await context.close()
