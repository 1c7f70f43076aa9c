"""Sessions of the WebSocket `/v1/realtime`, with scripted stages: who has one, what ends it, what is refused."""

import asyncio
import io
from contextlib import AsyncExitStack

import pytest
import soundfile
from websockets.asyncio.client import connect
from websockets.typing import Origin

from gateway.access.api_keys import digest
from gateway.dialects.realtime import session_handler
from tests.support.clients.realtime_client import TONE, RealtimeClient, base64_of, session
from tests.support.scripted.thinker import PIECES
from tests.support.systems.gateway import Running, running

pytestmark = pytest.mark.asyncio(loop_scope="module")
ANSWER = "".join(PIECES)


@pytest.fixture
def gateway(speech_gateway: Running) -> Running:
    return speech_gateway


async def test_errors_do_not_end_the_session(gateway):
    async with session(gateway) as client:
        for message in ("{", "[]", '{"type": "response.done"}', b"{}"):
            await client.socket.send(message)
            assert (await client.event())["type"] == "error"
        assert (await client.refusal("input_audio_buffer.commit"))["code"] == "input_audio_buffer_commit_empty"
        assert (await client.refusal("input_audio_buffer.append", audio="?"))["param"] == "audio"
        wrong = await client.refusal("conversation.item.create", item={"type": "message", "role": "user"})
        assert wrong["param"] == "item.content"
        image = [{"type": "input_image", "image_url": "data:image/png;base64,AAAA"}]
        item = {"type": "message", "role": "user", "content": image}
        assert (await client.refusal("conversation.item.create", item=item))["param"] == "item.content[0].image_url"
        await client.say("Hi", id="one")
        content = [{"type": "input_text", "text": "Hi"}]
        twice = {"id": "one", "type": "message", "role": "user", "content": content}
        again = await client.refusal("conversation.item.create", item=twice)
        assert again["code"] == "item_create_duplicate_item_id"
        assert (await client.refusal("response.create", response={"conversation": "x"}))["param"]
        done = (await client.respond(output_modalities=["text"]))[-1]
        assert done["response"]["status"] == "completed"


async def test_a_client_that_leaves_ends_its_answer(gateway):
    gateway.scripts["code2wav"].hold = True
    async with session(gateway) as client:
        await client.say("Hi")
        await client.send("response.create")
        await gateway.until(lambda: gateway.scripts["code2wav"].running == 1)
    await gateway.until(lambda: not any(script.running for script in gateway.scripts.values()))
    await gateway.until(lambda: gateway.app.state.gateway.realtime_sessions == 0)


@pytest.mark.parametrize("model", ["gpt-realtime", "gpt-4o-mini-realtime-preview-2024-12-17", "scripted", None])
async def test_a_session_of_the_model_whatever_openai_calls_it(gateway, model):
    async with session(gateway, model, subprotocols=["realtime", "openai-insecure-api-key.x"]) as client:
        assert client.socket.subprotocol == "realtime"
        assert client.created["session"]["model"] == "scripted"


async def test_a_model_that_is_not_here_is_refused(gateway):
    async with connect(f"{gateway.url.replace('http', 'ws')}/v1/realtime?model=llama") as socket:
        client = RealtimeClient(socket)
        assert (await client.event())["error"]["code"] == "model_not_found"
        await socket.wait_closed()
        assert socket.close_code == 1008


async def test_azures_clients_find_it(gateway):
    async with session(gateway, None, "/openai/v1/realtime", query="deployment=scripted") as client:
        assert (await client.respond(instructions="Say hi."))[-1]["response"]["status"] == "completed"


async def test_a_session_has_no_place_among_requests_but_its_answers_have(tmp_path):
    file = tmp_path / "keys.yaml"
    file.write_text(f"keys:\n  - name: alice\n    sha256: {digest('secret')}\n    max_concurrent_requests: 1\n")
    bearer = {"authorization": "Bearer secret"}
    async with (
        running(api_keys_file=file) as gateway,
        session(gateway, additional_headers=bearer) as one,
        session(gateway, additional_headers=bearer) as other,
    ):
        gateway.scripts["code2wav"].hold = True
        for client in (one, other):
            await client.say("Hi")
        await one.send("response.create")
        await gateway.until(lambda: gateway.scripts["code2wav"].running == 1)
        refused = (await other.respond())[-1]["response"]
        assert refused["status_details"]["error"]["type"] == "rate_limit_error"
        gateway.scripts["code2wav"].go_on()
        assert (await one.until("response.done"))[-1]["response"]["status"] == "completed"
        assert (await other.respond())[-1]["response"]["status"] == "completed"


async def test_a_session_ends_when_its_time_is_over():
    async with running(realtime_session_s=0.5) as gateway, session(gateway) as client:
        *_, last = await client.until("error")
        assert last["error"]["code"] == "session_expired"
        await client.socket.wait_closed()
        assert client.socket.close_code == 1001
        await gateway.until(lambda: gateway.app.state.gateway.realtime_sessions == 0)


async def test_there_are_no_more_sessions_and_items_than_are_allowed(monkeypatch):
    monkeypatch.setattr(session_handler, "MAX_ITEMS", 2)
    async with running(max_realtime_sessions=1) as gateway, session(gateway) as client:
        async with connect(gateway.url.replace("http", "ws") + "/v1/realtime") as socket:
            refused = RealtimeClient(socket)
            assert (await refused.event())["error"]["code"] == "session_limit"
            await socket.wait_closed()
            assert socket.close_code == 1013
        await client.say("one")
        assert (await client.respond(output_modalities=["text"]))[-1]["response"]["status"] == "completed"
        item = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "three"}]}
        assert (await client.refusal("conversation.item.create", item=item))["code"] == "conversation_too_long"


async def told_to_connect_again(client: RealtimeClient) -> list[dict]:
    """All events of a session before its gateway stops."""
    *events, last = await client.until("error")
    assert (last["error"]["type"], last["error"]["code"]) == ("server_error", "gateway_stopping")
    assert "connect again" in last["error"]["message"]
    await client.socket.wait_closed()
    assert client.socket.close_code == 1012  # "service restart": clients connect again
    return events


async def test_a_gateway_that_stops_says_so_once_an_answer_is_complete():
    async with AsyncExitStack() as sessions, AsyncExitStack() as exits:
        gateway = await exits.enter_async_context(running())
        idle, answered = [await sessions.enter_async_context(session(gateway)) for _ in range(2)]
        gateway.scripts["code2wav"].hold, gateway.scripts["code2wav"].after = True, 1
        await answered.say("Hi")
        await answered.send("response.create")
        begun = await answered.until("response.output_audio.delta")
        stopping = asyncio.create_task(exits.aclose())
        assert await told_to_connect_again(idle) == []
        with pytest.raises(ConnectionRefusedError):
            await connect(gateway.url.replace("http", "ws") + "/v1/realtime")
        await answered.send("response.create")  # nothing new begins
        gateway.scripts["code2wav"].go_on()
        rest = await told_to_connect_again(answered)
        assert rest[-1]["response"]["status"] == "completed"
        assert [event["type"] for event in [*begun, *rest]].count("response.done") == 1
        await stopping


async def test_an_answer_that_takes_too_long_does_not_keep_the_gateway():
    async with AsyncExitStack() as sessions:
        async with running(drain_timeout_s=0.5) as gateway:
            client = await sessions.enter_async_context(session(gateway))
            gateway.scripts["thinker"].hold = True
            await client.say("Hi")
            await client.send("response.create")
            await gateway.until(lambda: gateway.scripts["thinker"].running == 1)
        await told_to_connect_again(client)


async def test_a_client_that_leaves_while_the_gateway_stops_is_not_waited_for():
    async with AsyncExitStack() as sessions, AsyncExitStack() as exits:
        gateway = await exits.enter_async_context(running())
        idle, client = [await sessions.enter_async_context(session(gateway)) for _ in range(2)]
        gateway.scripts["code2wav"].hold, gateway.scripts["code2wav"].after = True, 1
        await client.say("Hi")
        await client.send("response.create")
        await client.until("response.output_audio.delta")
        stopping = asyncio.create_task(exits.aclose())
        await told_to_connect_again(idle)
        client.socket.transport.abort()
        await gateway.until(lambda: not gateway.scripts["code2wav"].running)
        await stopping


async def test_who_reads_nothing_does_not_keep_a_session(gateway, monkeypatch):
    async def never(*_) -> None:
        await asyncio.Event().wait()

    state = gateway.app.state.gateway
    async with session(gateway) as client:
        monkeypatch.setattr("gateway.dialects.realtime.output.outbox.SEND_S", 0.1)
        monkeypatch.setattr("starlette.websockets.WebSocket.send_text", never)  # as long as the connection is full
        await client.send("input_audio_buffer.clear")
        await gateway.until(lambda: state.realtime_sessions == 0)


async def test_a_page_of_another_site_is_refused(gateway):
    url = gateway.url.replace("http", "ws") + "/v1/realtime"
    async with connect(url, origin=Origin("http://elsewhere.example")) as socket:
        assert (await RealtimeClient(socket).event())["error"]["code"] == "foreign_origin"
        await socket.wait_closed()
    assert socket.close_code == 1008
    async with session(gateway, origin=Origin(gateway.url)) as client:
        await client.say("Hi")


async def test_openais_own_client(gateway):
    client = gateway.openai.with_options(websocket_base_url=gateway.url.replace("http", "ws") + "/v1")
    async with asyncio.timeout(60), client.realtime.connect(model="scripted") as connection:
        await connection.session.update(session={"type": "realtime", "output_modalities": ["text"]})
        content = [{"type": "input_text", "text": "Hi"}]
        await connection.conversation.item.create(item={"type": "message", "role": "user", "content": content})
        await connection.response.create()
        text = ""
        async for event in connection:
            if event.type == "response.output_text.delta":
                text += event.delta
            elif event.type == "response.done":
                break
    assert text == ANSWER


@pytest.mark.parametrize(
    ("item", "param"),
    [
        ({"type": []}, "item.type"),
        ({"type": "message", "role": {}, "content": []}, "item.role"),
        ({"role": "user", "content": [{"type": []}]}, "item.content[0].type"),
        ({"role": "user", "content": [{"type": "input_text", "text": ""}] * 257}, "item.content"),
        ({"type": "function_call", "name": "lamp", "arguments": "{}", "call_id": [[]]}, "item.call_id"),
    ],
)
async def test_an_item_that_is_none_is_refused_and_the_session_goes_on(gateway, item, param):
    async with session(gateway) as client:
        error = await client.refusal("conversation.item.create", item=item)
        assert (error["param"], error["code"]) == (param, "invalid_value")
        await client.say("Hi")


async def test_a_fault_of_ours_is_an_error_of_one_event(gateway, monkeypatch):
    def broken(*_) -> None:
        raise ZeroDivisionError

    async with session(gateway) as client:
        monkeypatch.setattr("gateway.dialects.realtime.conversation.conversation.Conversation.delete", broken)
        error = await client.refusal("conversation.item.delete", item_id="x")
        assert (error["type"], error["code"]) == ("server_error", "internal_error")
        await client.say("Hi")


async def test_a_commit_that_is_refused_loses_nothing(gateway, monkeypatch):
    monkeypatch.setattr(session_handler, "MAX_ITEMS", 1)
    async with session(gateway) as client:
        said = (await client.say("Hi"))["item"]["id"]
        await client.send("input_audio_buffer.append", audio=base64_of(TONE))
        assert (await client.refusal("input_audio_buffer.commit"))["code"] == "conversation_too_long"
        await client.ask("conversation.item.delete", "conversation.item.deleted", item_id=said)
        await client.ask("input_audio_buffer.commit", "conversation.item.done")
        await client.respond(output_modalities=["text"])
    (asked,) = gateway.scripts["thinker"].requests
    sound = asked.messages[0].content[0].media.data
    assert soundfile.info(io.BytesIO(sound)).duration == pytest.approx(1.0, abs=0.06)
