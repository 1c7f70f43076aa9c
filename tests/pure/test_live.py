"""Conversations of the WebSocket `/v1/live/sessions`, with scripted stages, and loudness for speech."""

import asyncio
import json
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from openai.lib.live import TranscriptGrouper
from openai.types.live import ServerEvent
from pydantic import TypeAdapter

from gateway.dialects.live import transcripts
from gateway.dialects.realtime import g711, session_handler
from services.common.errors import InternalError
from tests.support.clients.live_client import LiveClient, live, tone
from tests.support.clients.realtime_client import base64_of
from tests.support.samples.espeak import recording
from tests.support.samples.loudness import Ears
from tests.support.scripted.code2wav import SAMPLE_RATE_HZ, SAMPLES_PER_FRAME
from tests.support.scripted.thinker import PIECES
from tests.support.systems.gateway import Running

pytestmark = pytest.mark.asyncio(loop_scope="module")
ANSWER = "".join(PIECES)
NUMBERS = "one two three four five six seven eight nine ten eleven twelve thirteen"
LONG = [f"{word} " for word in NUMBERS.split()]
LONG_FRAMES = 500  # 40 s: something is left to interrupt, also on a busy machine, which hears the user late
FRAME_S = SAMPLES_PER_FRAME / SAMPLE_RATE_HZ
PARAMETERS = {"type": "object", "properties": {"on": {"type": "boolean"}}}
LAMP = {"type": "function", "name": "lamp", "parameters": PARAMETERS}
BACKEND = {"type": "responses", "responses": {"model": "gpt-5.6-luna", "tools": [LAMP]}}


@pytest.fixture
def gateway(speech_gateway: Running, monkeypatch: pytest.MonkeyPatch) -> Iterator[Running]:
    monkeypatch.setattr(transcripts, "HOLD_S", 600.0)  # a busy machine writes the user's words down in seconds
    before = speech_gateway.app.state.gateway.detectors
    speech_gateway.app.state.gateway.detectors = Ears()
    yield speech_gateway
    speech_gateway.app.state.gateway.detectors = before


@pytest.fixture(scope="module")
def sentence() -> bytes:
    """What the user says, and silence: PCM of 24 kHz."""
    return tone(0.4, 0) + recording(1.5, [0.2]).pcm16_at(24_000) + tone(0.8, 0)


async def speak(client: LiveClient, sound: bytes) -> None:
    for begin in range(0, len(sound), 4800):
        await client.send("session.input_audio.append", audio=base64_of(sound[begin : begin + 4800]))


def read(gateway: Running) -> list[tuple[str, str]]:
    """(role, text) of the messages that the thinker's last request for an answer has; sound is ""."""
    asked = [each for each in gateway.scripts["thinker"].requests if "Transcribe" not in str(each)]
    return [(message.role, "".join(part.text for part in message.content)) for message in asked[-1].messages]


def resets(client: LiveClient) -> list[str]:
    """Why OpenAI's own grouper of transcripts has ended turns."""
    reasons, grouper = [], TranscriptGrouper()
    grouper.on("segment.closed", lambda closed: reasons.append(closed.reason))
    for event in client.events:
        if event["type"].endswith("_transcript.delta"):
            grouper.push(TypeAdapter[ServerEvent](ServerEvent).validate_python(event))
    grouper.close()
    return reasons


async def test_a_turn_and_its_answer(gateway: Running, sentence: bytes) -> None:
    async with live(gateway, instructions="Be kind.") as client:
        begun = time.monotonic()
        gateway.scripts["code2wav"].frames = 20
        await speak(client, sentence)
        await client.answer(ANSWER)
        closed = await client.ask("session.close", "session.closed")
        took_s = time.monotonic() - begun
        await client.socket.wait_closed()
        assert client.socket.close_code == 1000
    assert (closed["reason"], closed["session"]["id"]) == ("close_requested", client.started["id"])
    assert client.said("input") == ANSWER
    told = [kind for kind in client.kinds() if kind.endswith("_transcript.delta")]
    assert told[0] == "session.input_transcript.delta"
    assert resets(client)
    assert "timestamp_reset" not in resets(client)
    sound_s = len(client.sound) / 2 / 24_000
    assert sound_s > 20 * FRAME_S - 0.11  # and more, if it was late: gaps are filled
    assert took_s >= sound_s - 0.21  # in real time
    assert read(gateway) == [("system", "Be kind."), ("user", "")]
    assert not gateway.app.state.live_sessions


async def test_an_answer_that_is_interrupted_ends_where_it_was_heard(gateway: Running, sentence: bytes) -> None:
    gateway.scripts["thinker"].pieces, gateway.scripts["code2wav"].frames = LONG, LONG_FRAMES
    async with live(gateway) as client:
        await speak(client, sentence)
        while len(client.sound) / 2 / 24_000 < 1.5 or not client.said("output"):
            await client.event()
        await gateway.until(lambda: gateway.scripts["code2wav"].ended == ["done"])  # all is made before
        gateway.scripts["thinker"].pieces, gateway.scripts["code2wav"].frames = (), 13  # the next one is short
        await speak(client, sentence)
        await client.until("session.input_transcript.delta")
        heard, samples = client.said("output"), np.frombuffer(bytes(client.sound), "<i2")
        await client.answer(ANSWER)
    whole = "".join(LONG)
    assert whole.startswith(heard)
    assert 0 < len(heard) < len(whole) * 0.7
    assert np.count_nonzero(samples) < 24_000 * LONG_FRAMES * FRAME_S * 0.7  # the rest is silence, which goes on
    assert read(gateway) == [("user", ""), ("assistant", heard), ("user", "")]
    assert "timestamp_reset" not in resets(client)


async def test_a_cough_does_not_interrupt(gateway: Running, sentence: bytes) -> None:
    gateway.scripts["code2wav"].frames = 20
    async with live(gateway) as client:
        await speak(client, sentence)
        await client.until("session.output_audio.delta")
        await speak(client, tone(0.15, 8000) + tone(1, 0))
        await client.answer(ANSWER)
        assert client.said("input") == ANSWER
        assert len(gateway.scripts["code2wav"].ended) == 1


async def test_the_client_takes_a_task(gateway: Running, sentence: bytes) -> None:
    gateway.scripts["thinker"].calls = [("delegate", "{}")]
    async with live(gateway) as client:
        assert client.started["delegation"] == {"type": "client"}
        await speak(client, sentence)
        created = await client.until("session.delegation.created")
        assert created["delegation"]["target"] == "client"
        assert client.said("input") == ANSWER  # the client takes the task from it
        id = created["delegation"]["id"]
        await client.ask("session.thinking.append", "session.thinking.appended", content="Mind:", delegation_id=id)
        for piece in ("It rains ", "in Rome."):
            await client.ask(
                "session.commentary.append", "session.commentary.appended", content=piece, delegation_id=id
            )
        await client.answer(ANSWER)
        assert read(gateway)[-1] == ("tool", "Mind:\nIt rains in Rome.")
        for refused in (("response.create", {}), ("response.item.create", {"item": _output("call_1")})):
            error = await client.refusal(refused[0], **refused[1])
            assert "requires Responses delegation" in error["message"]


def _output(call_id: str) -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": call_id, "output": "done"}


async def test_who_speaks_is_answered_before_what_the_client_wants_said(
    gateway: Running, sentence: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session_handler, "_SOUND_STOPS_S", 60)
    gateway.scripts["thinker"].calls = [("delegate", "{}")]
    gateway.scripts["thinker"].ids_reusable = False
    async with live(gateway) as client:
        await speak(client, sentence)
        id = (await client.until("session.delegation.created"))["delegation"]["id"]
        await speak(client, tone(0.6, 8000))  # and goes on
        await client.ask(
            "session.commentary.append", "session.commentary.appended", content="It rains.", delegation_id=id
        )
        await asyncio.sleep(0.2)
        await speak(client, tone(1, 0))
        await client.answer(ANSWER)
        await client.answer(ANSWER)
        asked = [each for each in read(gateway) if each[1] or each[0] == "user"]
        assert asked == [("user", ""), ("user", ""), ("assistant", ANSWER), ("tool", "It rains.")]


async def test_a_turn_whose_sound_stops_holds_nothing_up(gateway: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_handler, "_SOUND_STOPS_S", 0.1)
    async with live(gateway) as client:
        await speak(client, tone(0.6, 8000))
        await client.send("session.commentary.append", content="Greet.", delegation_id=None)
        await client.answer(ANSWER)


async def test_functions_of_the_client_are_called_by_events_of_responses(gateway: Running, sentence: bytes) -> None:
    gateway.scripts["thinker"].calls = [("lamp", '{"on": true}')]
    async with live(gateway, delegation=BACKEND) as client:
        await speak(client, sentence)
        created = await client.until("session.delegation.created")
        assert created["delegation"]["target"] == "responses"
        done = await client.wrapped("response.output_item.done")
        call = done["event"]["item"]
        assert (call["name"], json.loads(call["arguments"])) == ("lamp", {"on": True})
        missing = await client.refusal("response.create")
        assert missing["code"] == "function_call_outputs_required"
        assert (await client.refusal("response.item.create", item=_output("call_x")))["param"] == "item.call_id"
        await client.send("response.item.create", item=_output(call["call_id"]))
        await client.send("response.create")
        await client.answer(ANSWER)
    told = [event for event in client.events if event["type"] == "response.event"]
    assert {event["delegation_id"] for event in told} == {created["delegation"]["id"]}
    kinds = [event["event"]["type"] for event in told]
    assert [kind for kind in kinds if "arguments.delta" not in kind] == [
        "response.created",
        "response.output_item.added",
        "response.function_call_arguments.done",
        "response.output_item.done",
        "response.completed",
        "response.created",
        "response.completed",
    ]
    assert created["delegation"]["response_id"] == told[0]["event"]["response"]["id"]
    assert told[-1]["event"]["response"]["usage"]["total_tokens"] > 0
    assert read(gateway)[-1] == ("tool", "done")


async def test_what_is_asked_for_twice_is_answered_once(gateway: Running) -> None:
    """As in Realtime; but what has come since an answer began may be asked for while that is being made."""
    thinker = gateway.scripts["thinker"]
    thinker.hold = True

    def item(text: str) -> dict[str, Any]:
        return {"type": "message", "role": "user", "content": [{"type": "input_text", "text": text}]}

    async with live(gateway, delegation=BACKEND) as client:
        await client.send("response.item.create", item=item("Hello."))
        await client.send("response.create")
        waits = await client.refusal("response.create")
        async with asyncio.timeout(60):
            await thinker.holding.wait()  # the answer is being made
        is_made = await client.refusal("response.create")
        for refused in (waits, is_made):
            assert refused["code"] == "conversation_already_has_active_response"
        await client.send("response.item.create", item=item("And now?"))
        await client.send("response.create")
        assert (await client.refusal("response.create"))["code"] == "conversation_already_has_active_response"
        thinker.go_on()
        await client.answer(ANSWER)
        await client.answer(ANSWER)
        assert ("user", "And now?") in read(gateway)
        assert len(thinker.requests) == 2
        await client.send("response.create")  # nothing is new, and nothing is being made
        await client.answer(ANSWER)
        assert len(thinker.requests) == 3


async def test_an_answer_to_outputs_that_is_interrupted_is_no_error_of_the_clients_model(
    gateway: Running, sentence: bytes
) -> None:
    gateway.scripts["thinker"].calls = [("lamp", '{"on": true}')]
    async with live(gateway, delegation=BACKEND) as client:
        await speak(client, sentence)
        call = (await client.wrapped("response.output_item.done"))["event"]["item"]
        await client.wrapped("response.completed")
        gateway.scripts["code2wav"].hold = True
        await client.send("response.item.create", item=_output(call["call_id"]))
        await client.send("response.create")
        await client.wrapped("response.created")
        await speak(client, sentence)
        assert (await client.until("response.event"))["event"]["type"] == "response.completed"


async def test_what_the_client_has_said_and_what_it_lets_the_model_know(gateway: Running) -> None:
    past = [
        {"role": "user", "content": [{"type": "input_text", "text": "I am Ada."}]},
        {"role": "assistant", "content": [{"type": "output_text", "text": "Hello Ada."}]},
    ]
    async with live(gateway, input=past) as client:
        await client.ask("session.instructions.append", "session.instructions.appended", content="Be brief.")
        await client.ask("session.thinking.append", "session.thinking.appended", content="It rains.")
        await client.ask("session.commentary.append", "session.commentary.appended", content="Greet.")
        await client.answer(ANSWER)
        told = read(gateway)
        assert told[:4] == [
            ("user", "I am Ada."),
            ("assistant", "Hello Ada."),
            ("system", "Be brief."),
            ("system", "It rains."),
        ]
        assert told[4][0] == "system"
        assert told[4][1].endswith("Greet.")


async def test_tools_change_and_what_has_started_does_not(gateway: Running, sentence: bytes) -> None:
    async with live(gateway, delegation=BACKEND) as client:
        more = {"type": "responses", "responses": {"tools": []}}
        updated = await client.ask("session.update", "session.updated", session={"delegation": more})
        assert updated["session"]["delegation"]["responses"] == {
            "model": "gpt-5.6-luna",
            "instructions": "",
            "tool_choice": "auto",
            "tools": [],
        }
        for session, param in (
            ({"instructions": "x"}, "session.instructions"),
            ({"delegation": {"type": "client"}}, "session.delegation.type"),
        ):
            assert (await client.refusal("session.update", session=session))["param"] == param
        await speak(client, sentence)
        await client.answer(ANSWER)
        assert not gateway.scripts["thinker"].requests[0].tools


async def test_who_is_muted_is_not_heard(gateway: Running, sentence: bytes) -> None:
    async with live(gateway) as client:
        await client.ask("session.input_audio.mute", "session.input_audio.muted")
        await speak(client, sentence)
        await client.ask("session.input_audio.unmute", "session.input_audio.unmuted")
        assert not gateway.scripts["thinker"].requests
        await speak(client, sentence)
        await client.answer(ANSWER)


async def test_the_server_plays_a_sound_of_the_clients(gateway: Running) -> None:
    async with live(gateway) as client:
        sound = tone(0.4, 8000)
        await client.send("session.output_audio.fixture.play", audio=base64_of(sound))
        await client.until("session.output_audio.fixture.playing")
        refused = await client.refusal("session.input_audio.append", audio=base64_of(sound))
        assert refused["code"] == "input_audio_unavailable"
        await client.until("session.output_audio.fixture.played")
        assert bytes(client.sound) == sound
        await client.hear(0.1, 0)


@pytest.mark.parametrize(
    ("audio_format", "bytes_per_s"),
    [
        ({"type": "audio/pcm", "rate": 16_000}, 32_000),
        ({"type": "audio/pcmu", "rate": 8000}, 8000),
        ({"type": "audio/pcma"}, 8000),
    ],
)
async def test_other_formats_of_sound(gateway: Running, sentence: bytes, audio_format: dict, bytes_per_s: int) -> None:
    voice = recording(1.5, [0.2]).pcm16_at(bytes_per_s // 2 if bytes_per_s > 8000 else 8000)
    if bytes_per_s == 8000:
        voice = g711.encode(np.frombuffer(voice, "<i2"), "mu" if audio_format["type"] == "audio/pcmu" else "a")
    silence = {"audio/pcmu": b"\xff", "audio/pcma": b"\xd5"}.get(audio_format["type"], b"\0") * bytes_per_s
    gateway.scripts["code2wav"].frames = 10
    async with live(gateway, audio={"format": audio_format}) as client:
        assert client.started["audio"]["format"]["type"] == audio_format["type"]
        sound = silence[: bytes_per_s // 2] + voice + silence
        for begin in range(0, len(sound), bytes_per_s // 10):
            piece = base64_of(sound[begin : begin + bytes_per_s // 10])
            await client.send("session.input_audio.append", audio=piece)
        await client.answer(ANSWER)
        assert len(client.sound) / bytes_per_s > 10 * FRAME_S - 0.12
        while client.said("input") != ANSWER:  # it is not waited for for long
            await client.event()


async def test_a_stage_that_fails_is_an_error_and_the_session_goes_on(gateway: Running, sentence: bytes) -> None:
    async with live(gateway) as client:
        gateway.scripts["code2wav"].error = InternalError("broken")
        await speak(client, sentence)
        error = (await client.until("error"))["error"]
        assert error["type"] == "server_error"
        gateway.scripts["code2wav"].error = None
        await speak(client, sentence)
        await client.answer(ANSWER)


async def test_a_client_that_leaves_ends_its_answer(gateway: Running, sentence: bytes) -> None:
    gateway.scripts["code2wav"].hold = True
    async with live(gateway) as client:
        await speak(client, sentence)
        await gateway.until(lambda: gateway.scripts["code2wav"].running == 1)
    await gateway.until(lambda: not any(script.running for script in gateway.scripts.values()))
    await gateway.until(lambda: gateway.app.state.gateway.realtime_sessions == 0)
    await gateway.until(lambda: not any("Pacer.run" in repr(task) for task in asyncio.all_tasks()))
