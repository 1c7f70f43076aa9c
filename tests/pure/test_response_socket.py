"""The WebSocket `/v1/responses`, with scripted stages: by OpenAI's own client where it can say it."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest
import structlog
from openai.types.responses.responses_server_event import ResponsesServerEvent
from pydantic import TypeAdapter
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import InvalidStatus
from websockets.typing import Origin

from gateway.access.api_keys import digest
from gateway.dialects.responses import socket as response_socket
from gateway.dialects.responses.socket import SocketRequest
from services.common.errors import InternalError, QueueFull
from tests.support.clients.responses import kinds, prompt, stream
from tests.support.clock import put_forward
from tests.support.scripted.thinker import PIECES
from tests.support.systems.gateway import Running, running

pytestmark = pytest.mark.asyncio(loop_scope="module")
TEXT = "".join(PIECES)
ASK = {"type": "response.create", "model": "scripted", "input": "hi"}
UNSTORED = ASK | {"store": False}
LAMP = {"type": "function", "name": "lamp", "parameters": {"type": "object"}}
LAST = ("response.completed", "response.incomplete", "response.failed", "error")
EVENT: TypeAdapter[Any] = TypeAdapter(ResponsesServerEvent)


@pytest.fixture
def gateway(speech_gateway: Running) -> Running:
    return speech_gateway


class Client:
    """The raw connection, whose events are as OpenAI's client knows them."""

    def __init__(self, socket: ClientConnection) -> None:
        self.socket = socket

    async def send(self, *messages: Any) -> None:
        for message in messages:
            await self.socket.send(message if isinstance(message, str | bytes) else json.dumps(message))

    async def event(self) -> dict[str, Any]:
        async with asyncio.timeout(60):
            event = json.loads(await self.socket.recv())
        EVENT.validate_python(event)
        return event

    async def answer(self, message: Any = ASK) -> list[dict[str, Any]]:
        """Events up to the last one."""
        await self.send(message)
        events = [await self.event()]
        while events[-1]["type"] not in (
            "error",
            *(f"response.{end}" for end in ("completed", "incomplete", "failed")),
        ):
            events.append(await self.event())
        return events

    async def response(self, message: Any = ASK) -> dict[str, Any]:
        last = (await self.answer(message))[-1]
        assert last["type"] == "response.completed", last
        return last["response"]

    async def refusal(self, message: Any) -> tuple[int, str | None, str | None]:
        (event,) = await self.answer(message)
        assert event["type"] == "error"
        return event["status"], event["error"]["param"], event["error"]["code"]


@asynccontextmanager
async def connected(gateway: Running, **options: Any) -> AsyncIterator[Client]:
    url = gateway.url.replace("http", "ws") + "/v1/responses"
    async with connect(url, open_timeout=60, max_size=None, **options) as socket:
        yield Client(socket)


def without_ids(events: list[dict[str, Any]]) -> str:
    """What one run has in common with another."""
    varying = ("item_id", "response", "item")
    return json.dumps([{name: value for name, value in event.items() if name not in varying} for event in events])


async def test_openais_own_client_takes_turns_that_nobody_stores(gateway):
    thinker = gateway.scripts["thinker"]
    thinker.calls = [("lamp", '{"on": true}')]
    async with asyncio.timeout(60), gateway.openai.responses.connect() as connection:
        events = await turn(connection, input="Light!", store=False, tools=[LAMP])
        (call,) = events[-1].response.output
        assert (call.type, call.name, call.arguments) == ("function_call", "lamp", '{"on": true}')
        output = {"type": "function_call_output", "call_id": call.call_id, "output": "done"}
        events = await turn(
            connection, input=[output], store=False, tools=[LAMP], previous_response_id=events[-1].response.id
        )
        assert events[-1].response.output_text == TEXT
        last = events[-1].response.id
        events = await turn(connection, input="And now?", store=False, previous_response_id=last)
    assert [event.sequence_number for event in events] == list(range(len(events)))
    roles = [role for role, _ in prompt(gateway)]
    assert roles == ["user", "assistant", "tool", "assistant", "user"]
    assert [text for _, text in prompt(gateway)][2:] == ["done", TEXT, "And now?"]
    assert (await gateway.http.get(f"/v1/responses/{last}")).status_code == 404


async def turn(connection: Any, **members: Any) -> list[Any]:
    await connection.response.create(model="scripted", **members)
    events = []
    async for event in connection:
        events.append(event)
        if event.type in ("response.completed", "error"):
            return events
    raise AssertionError("the connection was closed")


async def test_the_events_are_those_of_the_stream(gateway):
    gateway.scripts["thinker"].thought = ["Let me", " see."]
    members = {"include": ["reasoning.encrypted_content"], "instructions": "be kind", "metadata": {"a": "b"}}
    async with connected(gateway) as client:
        events = await client.answer(ASK | members | {"stream": True})
    told = await stream(gateway, **members)
    assert kinds(events) == kinds(told)
    assert prompt(gateway) == prompt(gateway, -2)
    assert events[-1]["response"]["metadata"] == {"a": "b"}
    assert without_ids(events) == without_ids(told)


async def test_what_is_stored_is_stored_as_over_http(gateway):
    async with connected(gateway) as client:
        first = await client.response()
    stored = (await gateway.http.get(f"/v1/responses/{first['id']}")).json()
    assert stored["output"] == first["output"]
    async with connected(gateway) as client:
        second = await client.response(ASK | {"input": "more", "previous_response_id": first["id"]})
        assert [text for _, text in prompt(gateway)] == ["hi", TEXT, "more"]
        await gateway.openai.responses.delete(second["id"])
        refused = await client.refusal(ASK | {"previous_response_id": second["id"]})
        assert refused == (400, "previous_response_id", "previous_response_not_found")


async def test_only_the_last_response_of_a_connection_is_held(gateway):
    async with connected(gateway) as client, connected(gateway) as other:
        first = await client.response(UNSTORED)
        again = UNSTORED | {"previous_response_id": first["id"]}
        refused = (400, "previous_response_id", "previous_response_not_found")
        assert await other.refusal(again) == refused
        assert await client.refusal(again | {"temprature": 1}) == (400, "temprature", "unknown_parameter")
        second = await client.response(again)  # a refusal costs nothing
        assert await client.refusal(again) == refused
        stored = await client.response(ASK | {"previous_response_id": second["id"]})
        await client.response(UNSTORED | {"previous_response_id": stored["id"], "input": "last"})
        assert [text for _, text in prompt(gateway)] == ["hi", TEXT] * 3 + ["last"]


async def test_streams_of_a_connection_have_each_their_own_last_response(gateway):
    async with connected(gateway) as client:
        lanes = {name: await client.answer(UNSTORED | {"stream_id": name, "input": name}) for name in ("a", "b")}
        for name, events in lanes.items():
            assert {event["stream_id"] for event in events} == {name}
        for name, events in lanes.items():
            await client.response(UNSTORED | {"stream_id": name, "previous_response_id": events[-1]["response"]["id"]})
            assert [text for _, text in prompt(gateway)] == [name, TEXT, "hi"]
        refused = await client.answer(UNSTORED | {"stream_id": "a", "temperature": "hot"})
        assert (refused[-1]["type"], refused[-1]["stream_id"]) == ("error", "a")


async def test_what_is_held_has_a_limit():
    async with running(max_realtime_bytes=1024) as gateway, connected(gateway) as client:
        first = await client.response(UNSTORED)
        second = await client.response(UNSTORED | {"previous_response_id": first["id"], "input": "x" * 1024})
        refused = await client.refusal(UNSTORED | {"previous_response_id": second["id"]})
        assert refused == (400, "previous_response_id", "previous_response_not_found")


async def test_a_response_without_an_answer_can_be_continued(gateway):
    async with connected(gateway) as client:
        events = await client.answer(UNSTORED | {"instructions": "be kind", "generate": False})
        assert kinds(events) == ["created", "in_progress", "completed"]
        warm = events[-1]["response"]
        assert (warm["status"], warm["output"]) == ("completed", [])
        assert gateway.scripts["thinker"].requests[-1].count_only
        await client.response(UNSTORED | {"previous_response_id": warm["id"], "input": "more"})
        assert prompt(gateway) == [("user", "hi"), ("user", "more")]
        assert await client.refusal(UNSTORED | {"generate": False, "input": []}) == (
            400,
            "input",
            "missing_required_parameter",
        )


async def test_one_after_another(gateway):
    thinker = gateway.scripts["thinker"]
    thinker.hold, thinker.after = True, 2
    async with connected(gateway) as client:
        await client.send(ASK, ASK | {"input": "next"})
        await thinker.holding.wait()
        assert thinker.running == 1
        thinker.go_on()
        names = []
        while names.count("response.completed") < 2:
            names.append((await client.event())["type"])
        assert names.index("response.completed") < len(names) - names[::-1].index("response.created") - 1
    assert [prompt(gateway, i)[-1][1] for i in (-2, -1)] == ["hi", "next"]


@pytest.mark.parametrize(("limit", "most"), [("_MOST_WAITING", 2), ("_MOST_WAITING_CHARACTERS", 100)])
async def test_messages_that_wait_have_a_limit(gateway, monkeypatch, limit, most):
    monkeypatch.setattr(response_socket, limit, most)
    thinker = gateway.scripts["thinker"]
    thinker.hold = True
    async with connected(gateway) as client:
        await client.send(ASK)
        await gateway.until(lambda: thinker.running == 1)
        await client.send(ASK, ASK, ASK)
        refused = await client.event()
        while refused["type"] != "error":
            refused = await client.event()
        assert (refused["status"], refused["error"]["code"]) == (429, "too_many_messages")
        thinker.go_on()


@pytest.mark.parametrize("begun", [True, False])
async def test_a_client_that_leaves_ends_its_response(gateway, begun):
    thinker = gateway.scripts["thinker"]
    thinker.hold, thinker.after = True, 2 if begun else 0
    with structlog.testing.capture_logs() as logs:
        async with connected(gateway) as client:
            await client.send(ASK, ASK)
            await thinker.holding.wait()
        await gateway.until(lambda: thinker.ended == ["cancelled"])
        await gateway.until(lambda: gateway.app.state.gateway.admission.in_flight == 0)
        await gateway.until(lambda: any(line["event"] == "request" for line in logs))
    assert gateway.app.state.gateway.realtime_sessions == 0
    assert len(thinker.requests) == 1
    assert [line["status"] for line in logs if line["event"] == "request"] == [499]
    (line,) = [line for line in logs if line["event"] == "response"]
    assert (line["status"], line["response_id"][:5]) == ("cancelled", "resp_")


BAD: list[tuple[Any, tuple[str | None, str]]] = [
    ("{", (None, "invalid_json")),
    ("[]", (None, "invalid_type")),
    ({}, ("type", "missing_required_parameter")),
    ({"type": "session.update"}, ("type", "invalid_value")),
    (b"{}", ("type", "invalid_value")),
    (ASK | {"background": True}, ("background", "invalid_value")),
    (ASK | {"model": "gpt"}, ("model", "model_not_found")),
    (ASK | {"generate": "no"}, ("generate", "invalid_value")),
    ({"type": "response.create"}, ("input", "missing_required_parameter")),
    (ASK | {"input": [{"type": "message", "role": "robot", "content": "x"}]}, ("input[0].role", "invalid_value")),
    ({"type": "response.steer", "input": "x"}, ("previous_response_id", "missing_required_parameter")),
]


async def test_errors_name_the_member_and_the_connection_goes_on(gateway):
    async with connected(gateway) as client:
        for message, (param, code) in BAD:
            status, *found = await client.refusal(message)
            assert (status, *found) == (404 if code == "model_not_found" else 400, param, code), message
        for name in SocketRequest.model_fields:
            typo = name[0] + name
            assert await client.refusal(ASK | {typo: "x"}) == (400, typo, "unknown_parameter")
        await client.response()
    for member in ("generate", "stream_id", "type"):  # of the WebSocket alone
        refused = await gateway.http.post("/v1/responses", json={"model": "scripted", "input": "hi", member: None})
        assert refused.json()["error"]["code"] == "unknown_parameter"


async def test_more_input_for_a_running_response_comes_back(gateway):
    async with connected(gateway) as client:
        await client.send({"type": "response.steer", "input": "stop", "previous_response_id": "resp_1"})
        event = await client.event()
    assert (event["type"], event["error"]["code"]) == ("response.steer.failed", "steering_not_supported")
    assert event["steer"] == {"input": "stop", "previous_response_id": "resp_1"}


async def test_errors_of_a_stage(gateway, monkeypatch):
    thinker = gateway.scripts["thinker"]
    async with connected(gateway) as client:
        thinker.error, thinker.after = QueueFull("full", 3), 0
        (event,) = await client.answer()
        assert (event["status"], event["error"]["code"], event["error"]["headers"]) == (
            429,
            "queue_full",
            {"retry-after": "3"},
        )
        thinker.error, thinker.after = InternalError("x"), 2
        *_, last = await client.answer()
        assert (last["type"], last["response"]["status"]) == ("response.failed", "failed")
        thinker.error = None

        async def broken(*_: Any) -> None:
            raise RuntimeError("a bug")

        with monkeypatch.context() as patched:
            patched.setattr(gateway.app.state.responses, "ask", broken)
            assert (await client.refusal(ASK))[0] == 500
        await client.response()


async def test_limits_are_those_of_each_response(tmp_path, monkeypatch):
    monkeypatch.setattr("gateway.access.api_keys.CHECK_INTERVAL_S", 0.02)
    file = tmp_path / "keys.yaml"
    file.write_text(f"keys:\n  - name: alice\n    sha256: {digest('secret')}\n    max_concurrent_requests: 1\n")
    bearer = {"authorization": "Bearer secret"}
    async with running(api_keys_file=file, max_running_requests=2) as gateway:
        with pytest.raises(InvalidStatus) as refused:
            async with connected(gateway):
                pass
        assert refused.value.response.status_code == 403
        made = await gateway.http.post("/v1/realtime/client_secrets", json={}, headers=bearer)
        secret = {"authorization": f"Bearer {made.json()['value']}"}
        with pytest.raises(InvalidStatus):  # it keeps what belongs to the key
            async with connected(gateway, additional_headers=secret):
                pass
        options = {"additional_headers": bearer, "origin": Origin("https://elsewhere.example")}
        async with connected(gateway, **options) as one, connected(gateway, **options) as other:
            thinker = gateway.scripts["thinker"]
            thinker.hold, thinker.after = True, 0
            await one.send(ASK)
            await thinker.holding.wait()
            assert (await other.refusal(ASK))[::2] == (429, "rate_limit_exceeded")
            await one.socket.close()
            await gateway.until(lambda: thinker.running == 0)
            thinker.go_on()
            first = await other.response()
            stored = await gateway.http.get(f"/v1/responses/{first['id']}", headers=bearer)
            assert stored.status_code == 200

            file.write_text(f"keys:\n  - name: alice\n    sha256: {digest('another')}\n")
            async with asyncio.timeout(60):
                await other.socket.wait_closed()
            assert other.socket.close_code == 1008


async def test_a_place_of_the_gateway_is_taken_only_while_it_answers():
    async with (
        running(max_running_requests=1, max_realtime_sessions=2) as gateway,
        connected(gateway) as one,
        connected(gateway) as other,
    ):
        await one.response()
        await other.response()
        thinker = gateway.scripts["thinker"]
        thinker.hold, thinker.after = True, 0
        await one.send(ASK)
        await thinker.holding.wait()
        assert (await other.refusal(ASK))[::2] == (429, "queue_full")
        async with connected(gateway) as third:
            assert (await third.event())["error"]["code"] == "session_limit"
            await third.socket.wait_closed()
            assert third.socket.close_code == 1013


async def test_times_are_limited():
    async with running(request_timeout_s=0.3) as gateway, connected(gateway) as client:
        gateway.scripts["thinker"].hold = True
        assert (await client.refusal(ASK))[::2] == (504, "deadline_exceeded")
    async with running(realtime_session_s=0.3) as gateway, connected(gateway) as client:
        event = await client.event()
        assert (event["status"], event["error"]["code"]) == (400, "websocket_connection_limit_reached")
        await client.socket.wait_closed()
        assert client.socket.close_code == 1001


async def test_a_connection_on_which_nothing_comes_ends():
    async with running(realtime_idle_s=3) as gateway, connected(gateway) as client:
        thinker = gateway.scripts["thinker"]
        thinker.hold = True
        await client.send(ASK)
        await thinker.holding.wait()
        put_forward(4)  # a response keeps it
        thinker.go_on()
        while (event := await client.event())["type"] != "error":
            pass
        assert (event["status"], event["error"]["code"]) == (400, "session_idle")
        await client.socket.wait_closed()
        assert client.socket.close_code == 1001


async def test_who_reads_nothing_does_not_keep_a_place(gateway, monkeypatch):
    async def never(*_: Any) -> None:
        await asyncio.Event().wait()

    state = gateway.app.state.gateway
    async with connected(gateway) as client:
        monkeypatch.setattr(response_socket, "LAST_WORD_S", 0.1 - state.settings.request_timeout_s)
        monkeypatch.setattr("starlette.websockets.WebSocket.send_text", never)  # as long as the connection is full
        await client.send(ASK)
        await gateway.until(lambda: state.realtime_sessions == 0)
        await gateway.until(lambda: state.admission.in_flight == 0)


async def test_a_page_of_another_site_is_refused(gateway):
    async with connected(gateway, origin=Origin("http://elsewhere.example")) as client:
        assert (await client.event())["error"]["code"] == "foreign_origin"
        await client.socket.wait_closed()
    assert client.socket.close_code == 1008
    async with connected(gateway, origin=Origin(gateway.url)) as client:
        await client.response()


async def test_it_is_counted_and_logged(gateway):
    with structlog.testing.capture_logs() as logs:
        async with connected(gateway) as client:
            first = await client.response(ASK | {"client_metadata": {}})
            await client.refusal(ASK | {"modle": "x"})
        await gateway.until(lambda: any(line["event"] == "request" for line in logs))
    answered, refused = [line for line in logs if line["event"] == "response"]
    assert (answered["response_id"], answered["status"], answered["text_tokens"]) == (first["id"], "completed", 3)
    assert answered["ttft_ms"] <= answered["duration_ms"]
    assert (refused["status"], refused["code"]) == ("failed", "unknown_parameter")
    (request,) = [line for line in logs if line["event"] == "request"]
    assert (request["method"], request["path"], request["status"]) == ("WEBSOCKET", "/v1/responses", 101)
    metrics = (await gateway.http.get("/metrics")).text
    assert 'quartet_gateway_ignored_members_total{member="client_metadata",path="/v1/responses"}' in metrics
    trace = (await gateway.http.get(f"/v1/quartet/trace/{first['id']}")).json()
    (span,) = trace["spans"]  # scripted stages have none
    assert (span["stage"], span["request_id"]) == ("gateway", first["id"])


async def test_a_gateway_that_stops_says_so():
    async with AsyncExitStack() as connections:
        async with running() as gateway:
            client = await connections.enter_async_context(connected(gateway))
        await client.socket.wait_closed()
        assert client.socket.close_code == 1012
