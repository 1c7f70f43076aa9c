"""What the user says in `/v1/realtime`, written down, with scripted stages."""

import pytest

from gateway.dialects.realtime import session_handler
from services.common.errors import QueueFull
from tests.support.clients.realtime_client import RealtimeClient, base64_of, kinds, session
from tests.support.samples.espeak import recording
from tests.support.scripted.thinker import PIECES
from tests.support.systems.gateway import Running

pytestmark = pytest.mark.asyncio(loop_scope="module")
EVENTS = "conversation.item.input_audio_transcription"
SAID = "".join(PIECES)


@pytest.fixture(scope="module")
def sentence() -> bytes:
    """A sentence, PCM of 24 kHz."""
    return recording(2.0, [0.2]).pcm16_at(24_000)


async def commit(client: RealtimeClient, sound: bytes) -> str:
    """The item's id."""
    await client.send("input_audio_buffer.append", audio=base64_of(sound))
    return (await client.ask("input_audio_buffer.commit", "input_audio_buffer.committed"))["item_id"]


async def manual(client: RealtimeClient, **transcription: object) -> None:
    audio = {"input": {"turn_detection": None, "transcription": {"model": "gpt-4o-mini-transcribe", **transcription}}}
    await client.ask("session.update", "session.updated", session={"audio": audio})


async def test_a_turn_is_written_down(speech_gateway: Running, sentence: bytes) -> None:
    async with session(speech_gateway) as client:
        await manual(client, language="de", prompt="Quartet")
        item_id = await commit(client, sentence)
        events = [e for e in await client.until(f"{EVENTS}.completed") if e["type"].startswith(EVENTS)]
        assert kinds(events) == [f"{EVENTS}.delta", f"{EVENTS}.completed"]
        assert {(event["item_id"], event["content_index"]) for event in events} == {(item_id, 0)}
        assert "".join(event["delta"] for event in events[:-1]) == events[-1]["transcript"] == SAID
        assert events[-1]["usage"]["type"] == "tokens"
        item = (await client.ask("conversation.item.retrieve", "conversation.item.retrieved", item_id=item_id))["item"]
        assert item["content"][0]["transcript"] == SAID
    (asked,) = speech_gateway.scripts["thinker"].requests
    assert asked.messages[0].content[1].text == (
        "Transcribe the German audio into text. Names and terms in it may be: Quartet"
    )


@pytest.mark.parametrize(
    ("hints", "expected"),
    [
        ({"languages": ["de"], "keywords": ["Quartet", "Talker"]}, "the German audio into text. Names and terms"),
        ({"languages": ["de", "en"], "keywords": []}, "the audio into text."),
    ],
)
async def test_hints_of_newer_models_count(
    speech_gateway: Running, sentence: bytes, hints: dict, expected: str
) -> None:
    async with session(speech_gateway) as client:
        await manual(client, **hints)
        await commit(client, sentence)
        await client.until(f"{EVENTS}.completed")
    (asked,) = speech_gateway.scripts["thinker"].requests
    text = asked.messages[0].content[1].text
    assert text.startswith(f"Transcribe {expected}")
    assert text.endswith(", ".join(hints["keywords"]))


async def test_a_language_that_is_not_known_is_found_by_the_model(speech_gateway: Running, sentence: bytes) -> None:
    async with session(speech_gateway) as client:
        await manual(client, language="Klingon")
        await commit(client, sentence)
        await client.until(f"{EVENTS}.completed")


async def test_silence_has_an_empty_transcript(speech_gateway: Running) -> None:
    async with session(speech_gateway) as client:
        await manual(client)
        await commit(client, bytes(48_000))
        assert (await client.until(f"{EVENTS}.completed"))[-1]["transcript"] == ""
    assert not speech_gateway.scripts["thinker"].requests


async def test_a_transcript_that_fails_is_told_and_the_session_goes_on(speech_gateway: Running, sentence: bytes):
    thinker = speech_gateway.scripts["thinker"]
    async with session(speech_gateway) as client:
        await manual(client)
        thinker.error = QueueFull("is full", 1.0)
        await commit(client, sentence)
        failed = (await client.until(f"{EVENTS}.failed"))[-1]
        assert failed["error"]["code"] == "queue_full"
        thinker.error = None
        await commit(client, sentence)
        assert (await client.until(f"{EVENTS}.completed"))[-1]["transcript"] == SAID


async def test_transcripts_come_in_order_and_end_with_the_session(speech_gateway: Running, sentence: bytes) -> None:
    thinker = speech_gateway.scripts["thinker"]
    async with session(speech_gateway) as client:
        await manual(client)
        ids = [await commit(client, sentence) for _ in range(3)]
        done = [(await client.until(f"{EVENTS}.completed"))[-1]["item_id"] for _ in ids]
        assert done == ids
        thinker.hold = True
        await commit(client, sentence)
        await speech_gateway.until(lambda: thinker.running == 1)
    await speech_gateway.until(lambda: thinker.ended[-1] == "cancelled")


async def test_a_session_that_only_writes_down(speech_gateway: Running, sentence: bytes) -> None:
    async with session(speech_gateway, None, query="intent=transcription") as client:
        assert client.created["session"]["object"] == "realtime.transcription_session"
        update = {"type": "transcription", "audio": {"input": {"turn_detection": None}}}
        told = (await client.ask("session.update", "session.updated", session=update))["session"]
        assert told["type"] == "transcription"
        for _ in range(3):
            await commit(client, sentence)
            assert (await client.until(f"{EVENTS}.completed"))[-1]["transcript"] == SAID
        assert (await client.refusal("response.create"))["code"] == "invalid_value"


async def test_the_oldest_turns_go_where_only_their_text_counts(speech_gateway: Running, monkeypatch) -> None:
    monkeypatch.setattr(session_handler, "MAX_ITEMS", 2)
    async with session(speech_gateway, None, query="intent=transcription") as client:
        audio = {"input": {"turn_detection": None}}
        await client.ask("session.update", "session.updated", session={"type": "transcription", "audio": audio})
        first, *_ = [await commit(client, bytes(9600)) for _ in range(3)]
        error = await client.refusal("conversation.item.retrieve", item_id=first)
        assert error["code"] == "item_retrieve_invalid_item_id"


async def test_what_was_only_written_down_is_read_by_the_model(speech_gateway: Running, sentence: bytes) -> None:
    async with session(speech_gateway, None, query="intent=transcription") as client:
        audio = {"input": {"turn_detection": None}}
        await client.ask("session.update", "session.updated", session={"type": "transcription", "audio": audio})
        await commit(client, sentence)
        await client.until(f"{EVENTS}.completed")
        await client.ask("session.update", "session.updated", session={"type": "realtime"})
        assert (await client.respond(output_modalities=["text"]))[-1]["response"]["status"] == "completed"
    asked = speech_gateway.scripts["thinker"].requests[-1]
    assert [part.text for part in asked.messages[0].content] == [SAID]


async def test_sound_that_waits_to_be_written_down_is_bounded(speech_gateway: Running, sentence: bytes, monkeypatch):
    thinker = speech_gateway.scripts["thinker"]
    async with session(speech_gateway) as client:
        await manual(client)
        thinker.hold = True
        ids = [await commit(client, sentence) for _ in range(2)]
        await speech_gateway.until(lambda: thinker.running == 1)
        await client.ask("conversation.item.delete", "conversation.item.deleted", item_id=ids[1])
        monkeypatch.setattr(speech_gateway.app.state.gateway.settings, "max_realtime_bytes", 1024)
        last = await commit(client, sentence)
        failed = (await client.until(f"{EVENTS}.failed"))[-1]
        assert (failed["item_id"], failed["error"]["code"]) == (last, "transcription_queue_full")
        thinker.go_on()
        assert (await client.until(f"{EVENTS}.completed"))[-1]["item_id"] == ids[0]
    assert len(thinker.requests) == 1
