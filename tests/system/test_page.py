"""The page at `/` as people use it: a real Chromium, a file as its microphone, and the real stages."""

import httpx
import pytest
import pytest_asyncio

from tests.support.clients.browser import browser, chromium, microphone_file, visiting

pytestmark = [pytest.mark.e2e, pytest.mark.long]
PHONE = {"viewport": {"width": 360, "height": 740}, "is_mobile": True, "has_touch": True, "color_scheme": "dark"}
TALK = "#microphone"
MODEL, USER = ".turn.assistant", ".turn.user"


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def chrome(stack, tmp_path_factory):
    chromium()  # or skips, before anything is started
    microphone = microphone_file("What do you see in this picture?", tmp_path_factory.mktemp("page") / "mic.wav")
    async with browser(microphone) as started:
        yield started


@pytest_asyncio.fixture(loop_scope="session")
async def visit(chrome, stack):
    """The page with the key entered. Nothing on it may have gone wrong at the end."""
    async with visiting(chrome, stack.url, stack.key) as opened:
        await opened.until("body[data-ready]")
        yield opened
        assert await opened.page.inner_text("#notices") == ""
        assert opened.complaints == []


async def test_a_spoken_turn(visit):
    await visit.page.click(TALK)
    assert await visit.number(MODEL, "latency") >= 0
    await visit.page.click(TALK)
    assert await visit.number(MODEL, "played") > 0
    assert await visit.page.inner_text(f"{MODEL} .text")
    assert await visit.page.locator(USER).count() == 1
    assert await visit.page.get_attribute(TALK, "aria-pressed") == "false"


async def test_speech_interrupts_an_answer(visit):
    for turn in range(3):  # a random model may have said all before the user speaks
        await visit.page.fill("#message", "Tell me of the sea.")
        await visit.page.press("#message", "Enter")
        answer = f":nth-match({MODEL}, {2 * turn + 1})"
        await visit.number(answer, "latency")
        await visit.page.click(TALK)
        await visit.until(f":nth-match({MODEL}, {2 * turn + 2})")
        await visit.page.click(TALK)
        facts = await visit.page.inner_text(f"{answer} .facts")
        if "interrupted after" in facts:
            break
    assert "interrupted after" in facts
    played_ms = float(await visit.page.get_attribute(answer, "data-played") or 0)
    assert 0 < played_ms < 60_000
    await visit.until(".unheard")  # what the server says was heard of it is less than it had said


async def test_everything_is_done_with_the_keyboard(visit, media):
    page = visit.page

    async def tab_to(selector: str) -> None:
        for _ in range(40):
            if await page.evaluate("(selector) => document.activeElement.matches(selector)", selector):
                return
            await page.keyboard.press("Tab")
        raise AssertionError(f"Tab does not lead to {selector}")

    await page.set_input_files("#pick", {"name": "sea.png", "mimeType": "image/png", "buffer": media.image})
    await tab_to("#message")
    await page.keyboard.type("What is this?")
    await page.keyboard.press("Enter")
    assert await visit.number(MODEL, "latency") >= 0
    await page.keyboard.press("Escape")
    assert await visit.number(MODEL, "played") >= 0
    assert await page.locator(f"{USER} img").count() == 1
    assert await page.is_hidden("nav a[href='#make']")  # nothing here makes pictures
    await page.evaluate("document.activeElement.blur()")
    await tab_to("nav a[href='#stages']")
    await page.keyboard.press("Enter")
    await visit.until("#stage-table tbody tr")
    assert await page.locator("#stage-table td.good").count() == 3


async def test_a_film_is_answered_and_stays_in_the_conversation(visit, media):
    page = visit.page
    await page.set_input_files("#pick", {"name": "waves.mp4", "mimeType": "video/mp4", "buffer": media.video})
    await page.click("#send")
    assert await visit.number(MODEL, "latency") >= 0
    await page.keyboard.press("Escape")
    await visit.until(f"{MODEL}[aria-busy=false]")
    assert await page.inner_text(f"{USER} .files") == "waves.mp4"
    async with page.expect_request("**/v1/chat/completions") as asked:
        await page.fill("#message", "And the sound?")
        await page.click("#send")
    messages = (await asked.value).post_data_json["messages"]
    assert [part["type"] for part in messages[0]["content"]] == ["video_url"]
    assert await visit.number(f":nth-match({MODEL}, 2)", "latency") >= 0


async def test_the_key_is_asked_for_and_kept_in_the_tab(chrome, stack):
    async with visiting(chrome, stack.url) as opened:
        page = opened.page
        await opened.until("#key-dialog[open]")
        await page.keyboard.type("sk-quartet-wrong")
        await page.keyboard.press("Enter")
        await opened.until("#key-reason:has-text('not known')")
        await page.keyboard.type(stack.key)
        await page.keyboard.press("Enter")
        await opened.until("body[data-ready]")
        assert await page.evaluate("Object.values(sessionStorage)") == [stack.key]
        assert await page.evaluate("localStorage.length + document.cookie.length") == 0
        assert all("401" in complaint for complaint in opened.complaints)


async def test_it_fits_a_phone(chrome, stack):
    async with visiting(chrome, stack.url, stack.key, PHONE) as opened:
        await opened.until("body[data-ready]")
        await opened.page.click("#settings summary")
        for section in ("talk", "voices", "stages"):
            await opened.page.click(f"nav a[href='#{section}']")
            await opened.until(f"#{section}")
            assert await opened.page.evaluate("[document.documentElement.scrollWidth, innerWidth]") == [360, 360]
        assert opened.complaints == []


def test_what_the_page_may_do(stack):
    response = httpx.get(stack.url)
    assert response.headers["content-type"].startswith("text/html")
    policy = response.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
