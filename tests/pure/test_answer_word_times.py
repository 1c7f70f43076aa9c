"""What is kept of an answer that is interrupted, by the times of its words; scripted stages and a scripted aligner."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
import yaml

from services.common.errors import InternalError
from tests.support.clients.live_client import live
from tests.support.clients.realtime_client import session
from tests.support.scripted.aligner import WORD_MS
from tests.support.systems.gateway import SPEECH, Running, running

pytestmark = pytest.mark.asyncio(loop_scope="module")
WORDS = ["one,", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]
TEXT = " ".join(WORDS)
FRAMES = 50  # 4 s, of which the scripted aligner says that the last three are silent


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def started(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Running]:
    pipeline = yaml.safe_load(SPEECH.read_text())
    pipeline["stages"]["aligner"] = {"kind": "aligner", "address": "h:9"}
    pipeline["outputs"]["words"] = "aligner"
    file: Path = tmp_path_factory.mktemp("words") / "words.yaml"
    file.write_text(yaml.safe_dump(pipeline))
    async with running(file) as gateway:
        yield gateway


@pytest_asyncio.fixture(loop_scope="module")
async def gateway(started: Running) -> AsyncIterator[Running]:
    started.scripts["thinker"].pieces, started.scripts["code2wav"].frames = [f"{word} " for word in WORDS], FRAMES
    yield started
    await started.reset()


async def timed(gateway: Running) -> None:
    """Returns when the session has what the aligner said."""
    await gateway.until(lambda: gateway.scripts["aligner"].requests)
    await gateway.until(lambda: not any("WordTimer" in repr(task) for task in asyncio.all_tasks()))


@pytest.mark.parametrize(
    ("end_ms", "heard"),
    [(0, ""), (49, ""), (50, "one,"), (340, "one, two three"), (350, "one, two three four"), (3999, TEXT)],
)
async def test_a_client_cuts_between_words(gateway: Running, end_ms: int, heard: str) -> None:
    async with session(gateway) as client:
        await client.say("Count.")
        done = (await client.respond())[-1]["response"]
        await timed(gateway)
        (item,) = done["output"]
        cut = {"item_id": item["id"], "content_index": 0, "audio_end_ms": end_ms}
        await client.ask("conversation.item.truncate", "conversation.item.truncated", **cut)
        kept = await client.ask("conversation.item.retrieve", "conversation.item.retrieved", item_id=item["id"])
        assert kept["item"]["content"][0]["transcript"].strip() == heard
    (asked,) = gateway.scripts["aligner"].requests
    assert asked.text.strip() == TEXT
    assert len(asked.pcm16) == pytest.approx(FRAMES * 0.08 * 32_000, rel=0.01)


async def test_words_are_told_when_they_are_heard(gateway: Running) -> None:
    async with live(gateway) as client:
        await client.ask("session.commentary.append", "session.commentary.appended", content="Count.")
        while "ten" not in client.said("output"):
            await client.event()
        told_ms = client.events[-1]["end_ms"] - next(
            event["start_ms"] for event in client.events if event["type"] == "session.output_transcript.delta"
        )
        assert told_ms <= len(WORDS) * WORD_MS + 300  # of 4 s
        assert len(client.sound) / 48 < FRAMES * 80 * 0.7


async def test_without_an_aligner_that_works_words_are_estimated(gateway: Running) -> None:
    gateway.scripts["aligner"].error = InternalError("broken")
    async with session(gateway) as client:
        await client.say("Count.")
        (item,) = (await client.respond())[-1]["response"]["output"]
        await timed(gateway)
        cut = {"item_id": item["id"], "content_index": 0, "audio_end_ms": 2000}
        await client.ask("conversation.item.truncate", "conversation.item.truncated", **cut)
        kept = await client.ask("conversation.item.retrieve", "conversation.item.retrieved", item_id=item["id"])
        assert 0 < len(kept["item"]["content"][0]["transcript"]) < len(TEXT) * 0.7


async def test_a_client_that_leaves_ends_the_aligners_work(gateway: Running) -> None:
    gateway.scripts["aligner"].hold = True
    async with session(gateway) as client:
        await client.say("Count.")
        await client.respond()
        await gateway.until(lambda: gateway.scripts["aligner"].running == 1)
    await gateway.until(lambda: not gateway.scripts["aligner"].running)
    assert gateway.scripts["aligner"].ended == ["cancelled"]
