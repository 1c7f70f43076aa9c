"""Turns that the server finds in `/v1/realtime`, with scripted stages, and loudness for speech."""

import io
from contextlib import asynccontextmanager

import numpy as np
import pytest
import soundfile
from prometheus_client import REGISTRY

from services.common.errors import QueueFull
from tests.support.clients.realtime_client import RealtimeClient, base64_of, kinds, session
from tests.support.samples.loudness import Ears
from tests.support.systems.gateway import Running

pytestmark = pytest.mark.asyncio(loop_scope="module")
VAD = {"type": "server_vad", "prefix_padding_ms": 300, "silence_duration_ms": 500}


@asynccontextmanager
async def listening(gateway: Running, **rules):
    gateway.app.state.gateway.detectors = Ears()
    async with session(gateway) as client:
        audio = {"input": {"turn_detection": VAD | rules}}
        await client.ask("session.update", "session.updated", session={"output_modalities": ["text"], "audio": audio})
        yield client


async def send(client: RealtimeClient, seconds: float, level: int) -> None:
    """A tone, or silence, in pieces of 100 ms."""
    for _ in range(round(seconds * 10)):
        tone = level * np.sin(np.arange(2400) * 2 * np.pi * 440 / 24_000)
        await client.send("input_audio_buffer.append", audio=base64_of(tone.astype("<i2").tobytes()))


def heard_s(gateway: Running) -> list[float]:
    """How long the last message of each request sounds."""
    files = [request.messages[-1].content[0].media.data for request in gateway.scripts["thinker"].requests]
    return [soundfile.info(io.BytesIO(file)).duration for file in files]


async def test_a_turn_is_answered_before_its_end_is_sure(speech_gateway):
    async with listening(speech_gateway) as client:
        await send(client, 0.5, 0)
        await send(client, 1.0, 8000)
        await send(client, 0.3, 0)  # the first pause
        await speech_gateway.until(lambda: speech_gateway.scripts["thinker"].ended == ["done"])
        await send(client, 0.5, 0)
        events = await client.until("response.done")
    assert kinds(events)[:6] == [
        "input_audio_buffer.speech_started",
        "input_audio_buffer.speech_stopped",
        "input_audio_buffer.committed",
        "conversation.item.added",
        "conversation.item.done",
        "response.created",
    ]
    assert events[0]["audio_start_ms"] == pytest.approx(200, abs=64)
    assert events[0]["item_id"] == events[2]["item_id"] == events[3]["item"]["id"]
    assert events[-1]["response"]["status"] == "completed"
    assert len(speech_gateway.scripts["thinker"].requests) == 1
    assert heard_s(speech_gateway) == [pytest.approx(0.3 + 1.0 + 0.16, abs=0.07)]


async def test_an_answer_to_half_a_turn_is_dropped(speech_gateway):
    thinker = speech_gateway.scripts["thinker"]
    async with listening(speech_gateway) as client:
        await send(client, 0.5, 8000)
        await send(client, 0.3, 0)
        await speech_gateway.until(lambda: len(thinker.requests) == 1)
        await send(client, 0.5, 8000)
        await send(client, 0.8, 0)
        events = await client.until("response.done")
        told = [event["type"] for event in events]
        assert (told.count("response.created"), told.count("input_audio_buffer.speech_started")) == (1, 1)
        item, *more = events[-1]["response"]["output"]
        assert not more
        await client.send("conversation.item.retrieve", item_id=item["id"])
        await client.until("conversation.item.retrieved")
    first_s, second_s = heard_s(speech_gateway)
    assert second_s == pytest.approx(first_s + 0.8, abs=0.1)


async def test_who_speaks_interrupts_the_answer(speech_gateway):
    thinker = speech_gateway.scripts["thinker"]
    async with listening(speech_gateway) as client:
        await client.say("Hi")
        thinker.hold, thinker.after = True, 2
        await client.send("response.create")
        await client.until("response.output_text.delta")
        await send(client, 0.5, 8000)
        done = (await client.until("response.done"))[-1]["response"]
        assert done["status_details"] == {"type": "cancelled", "reason": "turn_detected"}


async def test_turns_without_answers(speech_gateway):
    async with listening(speech_gateway, create_response=False) as client:
        await send(client, 0.5, 8000)
        await send(client, 0.8, 0)
        await client.until("conversation.item.done")
        assert not speech_gateway.scripts["thinker"].requests
        assert (await client.respond())[-1]["response"]["status"] == "completed"
    assert heard_s(speech_gateway) == [pytest.approx(0.5 + 0.16, abs=0.07)]


async def test_what_the_client_changes_in_a_pause_counts(speech_gateway):
    thinker = speech_gateway.scripts["thinker"]
    async with listening(speech_gateway) as client:
        await send(client, 0.5, 8000)
        await send(client, 0.3, 0)
        await speech_gateway.until(lambda: thinker.ended == ["done"])
        await client.ask("session.update", "session.updated", session={"instructions": "Be kind."})
        await send(client, 0.5, 0)
        assert (await client.until("response.done"))[-1]["response"]["status"] == "completed"
    first, second = thinker.requests
    assert [message.role for message in first.messages] == ["user"]
    assert [message.role for message in second.messages] == ["system", "user"]


async def test_the_client_may_commit_before_the_turn_ends(speech_gateway):
    async with listening(speech_gateway) as client:
        await send(client, 0.5, 8000)
        await client.send("input_audio_buffer.commit")
        events = await client.until("conversation.item.done")
        assert kinds(events)[:2] == ["input_audio_buffer.speech_started", "input_audio_buffer.committed"]
        await send(client, 0.8, 0)
        assert (await client.respond())[-1]["response"]["status"] == "completed"
    assert heard_s(speech_gateway) == [pytest.approx(0.5, abs=0.04)]  # and the silence that ends every sound


def counted(name: str, **labels: str) -> float:
    return REGISTRY.get_sample_value(f"quartet_gateway_{name}", labels) or 0.0


async def test_who_pauses_often_is_answered_once_and_what_was_begun_in_vain_is_counted(speech_gateway):
    thinker = speech_gateway.scripts["thinker"]
    before = {outcome: counted("speculations_total", outcome=outcome) for outcome in ("used", "wasted")}
    async with listening(speech_gateway) as client:
        for pause in range(5):
            await send(client, 0.5, 8000)
            await send(client, 0.3, 0)
            begun = min(pause + 1, 3)
            await speech_gateway.until(lambda begun=begun: len(thinker.requests) == begun)
        await send(client, 0.5, 0)
        told = [event["type"] for event in await client.until("response.done")]
    assert told.count("response.created") == 1
    assert len(thinker.requests) == 4  # three in pauses, one at the end
    wasted = counted("speculations_total", outcome="wasted") - before["wasted"]
    used = counted("speculations_total", outcome="used") - before["used"]
    assert (wasted, used) == (3, 0)


async def test_what_is_saved_is_measured(speech_gateway):
    saved = counted("speculation_saved_seconds_sum"), counted("speculation_saved_seconds_count")
    async with listening(speech_gateway) as client:
        await send(client, 0.5, 8000)
        await send(client, 0.8, 0)
        await client.until("response.done")
    assert counted("speculation_saved_seconds_sum") > saved[0]
    assert counted("speculation_saved_seconds_count") == saved[1] + 1


@pytest.mark.parametrize("reason", ["setting", "load"])
async def test_nothing_is_begun_in_a_pause(speech_gateway, monkeypatch, reason):
    gateway = speech_gateway.app.state.gateway
    if reason == "setting":
        monkeypatch.setattr(gateway.settings, "realtime_speculation", False)
    else:
        monkeypatch.setattr(type(gateway.pipeline), "has_room", property(lambda self: False))
    async with listening(speech_gateway) as client:
        await send(client, 0.5, 8000)
        await send(client, 0.4, 0)
        await client.ask("session.update", "session.updated", session={})  # all sound before it was heard
        assert not speech_gateway.scripts["thinker"].requests
        await send(client, 0.4, 0)
        assert (await client.until("response.done"))[-1]["response"]["status"] == "completed"


async def test_an_answer_that_was_refused_in_a_pause_is_asked_for_again(speech_gateway):
    thinker = speech_gateway.scripts["thinker"]
    async with listening(speech_gateway) as client:
        thinker.error = QueueFull("is full", 1.0)
        await send(client, 0.5, 8000)
        await send(client, 0.3, 0)
        await speech_gateway.until(lambda: len(thinker.requests) == 1 and not counted("running_requests"))
        await client.ask("conversation.item.retrieve", "error", item_id="none")  # the gateway has gone on
        thinker.error = None
        await send(client, 0.5, 0)
        assert (await client.until("response.done"))[-1]["response"]["status"] == "completed"


async def test_an_answer_that_the_client_does_not_know_of_cannot_be_cancelled(speech_gateway):
    thinker = speech_gateway.scripts["thinker"]
    async with listening(speech_gateway) as client:
        await send(client, 0.5, 8000)
        await send(client, 0.3, 0)
        await speech_gateway.until(lambda: thinker.ended == ["done"])
        assert (await client.refusal("response.cancel"))["code"] == "response_cancel_not_active"
        await send(client, 0.5, 0)
        assert (await client.until("response.done"))[-1]["response"]["status"] == "completed"


async def test_a_user_who_says_nothing_is_asked(speech_gateway):
    async with listening(speech_gateway, idle_timeout_ms=400) as client:
        await send(client, 1.0, 0)  # before the first answer nobody is late
        await client.say("Hi")
        await client.respond()
        await send(client, 0.8, 0)
        events = await client.until("response.done")
        await send(client, 0.2, 8000)
        await client.until("input_audio_buffer.speech_started")
    assert kinds(events)[:3] == [
        "input_audio_buffer.timeout_triggered",
        "input_audio_buffer.committed",
        "conversation.item.added",
    ]
    timeout, committed = events[:2]
    assert timeout["item_id"] == committed["item_id"]
    assert timeout["audio_end_ms"] - timeout["audio_start_ms"] == pytest.approx(400, abs=40)
    assert len(speech_gateway.scripts["thinker"].requests) == 2


async def test_all_sound_is_heard_by_the_detector_whatever_else_is_done_with_it(speech_gateway):
    """Turns begin where they should after many commits, each of which takes what the resampler held back."""
    async with listening(speech_gateway, create_response=False) as client:
        for _ in range(20):
            await send(client, 0.1, 0)
            await client.ask("input_audio_buffer.commit", "conversation.item.done")
        await send(client, 0.5, 8000)
        started = (await client.until("input_audio_buffer.speech_started"))[-1]
    assert started["audio_start_ms"] == pytest.approx(2000, abs=33)  # not before what was committed


async def test_the_voice_may_change_until_something_was_heard(speech_gateway):
    thinker = speech_gateway.scripts["thinker"]
    voices = [{"audio": {"output": {"voice": name}}} for name in ("chelsie", "ethan")]
    async with listening(speech_gateway) as client:
        await client.ask("session.update", "session.updated", session={"output_modalities": ["audio"]})
        await send(client, 0.5, 8000)
        await send(client, 0.3, 0)
        await speech_gateway.until(lambda: len(thinker.requests) == 1)
        await client.ask("session.update", "session.updated", session=voices[1])  # what was begun is dropped, unheard
        await send(client, 0.5, 0)
        await client.until("response.done")
        assert (await client.refusal("session.update", session=voices[0]))["code"] == "cannot_update_voice"


def of_sockets(name: str) -> float:
    return counted(name, transport="websocket")


async def test_the_wait_for_an_answers_sound_is_counted_from_the_last_word(speech_gateway):
    count, total_s = of_sockets("first_sound_seconds_count"), of_sockets("first_sound_seconds_sum")
    async with listening(speech_gateway) as client:
        await client.ask("session.update", "session.updated", session={"output_modalities": ["audio"]})
        await send(client, 1.0, 8000)
        await client.until("input_audio_buffer.speech_started")
        assert of_sockets("users_speaking") == 1
        await send(client, 0.6, 0)
        await client.until("response.done")
        assert of_sockets("users_speaking") == 0
        assert of_sockets("first_sound_seconds_count") == count + 1
        assert of_sockets("first_sound_seconds_sum") - total_s > 0.5  # the silence is a part of what the user waits for
        await client.say("Hi")  # of what was written nobody knows the last word
        await client.respond()
        assert of_sockets("first_sound_seconds_count") == count + 1
        await send(client, 0.5, 8000)
        await client.until("input_audio_buffer.speech_started")
        assert of_sockets("users_speaking") == 1
    await speech_gateway.until(lambda: of_sockets("users_speaking") == 0)
