"""No message of a WebSocket costs more than its length, and the session goes on."""

import asyncio
import json
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect

from gateway.dialects.live.events import LIVE_EVENT_TYPES
from gateway.dialects.openai import speech_stream
from gateway.dialects.realtime.events import CLIENT_EVENT_TYPES
from tests.hostile.bodies import FEWER, MANY, TEXT, items, members
from tests.hostile.conftest import KEY, MAX_REALTIME_BYTES, OTHER_KEY
from tests.hostile.meter import MAX_HELD_S, MIB, metered
from tests.hostile.table import EVENTS, LIVE, SOCKETS
from tests.support.systems.gateway import Running

MAX_RISE_MIB, MAX_CPU_S = 96, 1.0
VALUES = {
    "8 MiB of objects": items("{}", MANY),
    "objects": items("{}", FEWER),
    "numbers": items("0", FEWER),
    "messages": items('{"type":"input_text","text":"x"}', 10_000),
    "tools": items('{"type":"function","name":"x"}', 10_000),
    "members": members(30_000),
    "fewer members": members(2000, "null"),
    "brackets": "[" * 300_000 + "]" * 300_000,
    "a text": json.dumps(TEXT),
    "digits": "9" * MIB,
}


def test_every_socket_and_event_is_in_the_table(gateway: Running):
    routes = {route.path for route in gateway.app.routes if "WebSocket" in type(route).__name__}
    assert routes == set(SOCKETS)
    assert set(EVENTS["/v1/realtime"]) == set(CLIENT_EVENT_TYPES)
    assert set(EVENTS[LIVE]) == set(LIVE_EVENT_TYPES)
    assert set(EVENTS["/v1/audio/speech/stream"]) == set(speech_stream._MESSAGES)


def event(kind: str, place: str, value: str) -> str:
    """A message with `value` at `place`."""
    whole: dict[str, Any] = {"type": kind}
    *steps, last = place.split(".")
    holder = whole
    for step in steps:
        holder = holder.setdefault(step, {"type": "message", "role": "user"} if step == "item" else {})
    holder[last] = "@"
    return json.dumps(whole).replace('"@"', value)


def exchange(gateway: Running, path: str, text: str, fragments: int = 0) -> tuple[dict[str, Any], int | None]:
    """(the first answer, {} if there is none; the code by which the connection was closed) in a session of its own."""
    url = gateway.url.replace("http", "ws") + path
    with connect(url, additional_headers={"authorization": f"Bearer {KEY}"}, max_size=None) as socket:
        answer: dict[str, Any] = {}
        try:
            if path == LIVE and "session.start" not in text[:40]:
                socket.send('{"type": "session.start", "session": {"model": "gpt-live-1"}}')
                assert json.loads(socket.recv(timeout=60))["type"] == "session.started"
            socket.send(iter([text[:1], *[""] * fragments, text[1:]]) if fragments else text)
            while not answer or answer["type"] == "session.created":
                answer = json.loads(socket.recv(timeout=60))
        except (ConnectionClosed, TimeoutError):
            answer = {}
    return answer, socket.protocol.close_code


def cases() -> Iterator[tuple[str, str]]:
    for path, kinds in EVENTS.items():
        yield from ((path, kind) for kind in kinds)


@pytest.mark.parametrize(("path", "kind"), cases())
async def test_a_message_costs_its_length(gateway: Running, path: str, kind: str):
    for place in EVENTS[path][kind]:
        for what, value in VALUES.items():
            text = event(kind, place, value)
            with metered() as cost:
                answer, _ = await asyncio.to_thread(exchange, gateway, path, text)
            print(kind, place, what, len(text), answer.get("type"), answer.get("error"), cost)
            assert cost.held_s < MAX_HELD_S, (kind, place, what, cost)
            assert (cost.rise_mib < MAX_RISE_MIB, cost.cpu_s < MAX_CPU_S) == (True, True), (kind, place, what, cost)
            assert answer, (kind, place, what)
            code = answer["error"]["code"] if answer["type"] == "error" else None
            assert code != "internal_error", (kind, place, what, answer)
            if what.startswith("8 MiB"):
                assert code == "json_too_large", (kind, place, what, answer)


async def test_a_message_of_empty_frames_ends_its_connection(gateway: Running):
    text = '{"type":"input_audio_buffer.clear"}'
    answer, code = await asyncio.to_thread(exchange, gateway, "/v1/realtime", text, 20_000)
    assert answer == {}
    assert code in (1009, 1006)  # 1006: of a client that still sends


def filled(gateway: Running, key: str, exits: ExitStack) -> int:
    """Bytes of texts that a new session takes, which stays open."""
    url = f"{gateway.url.replace('http', 'ws')}/v1/realtime"
    socket = exits.enter_context(connect(url, additional_headers={"authorization": f"Bearer {key}"}, max_size=None))
    taken = 0
    for size in (MIB, 100_000):
        content = [{"type": "input_text", "text": "x" * size}]
        item = {"type": "message", "role": "user", "content": content}
        while True:
            socket.send(json.dumps({"type": "conversation.item.create", "item": item}))
            while (answer := json.loads(socket.recv(timeout=60)))["type"] not in ("error", "conversation.item.added"):
                pass
            if answer["type"] == "error":
                assert answer["error"]["code"] == "conversation_too_long"
                break
            taken += size
    return taken


async def test_many_conversations_are_bounded_in_sum(gateway: Running):
    exits = ExitStack()
    try:
        taken = [await asyncio.to_thread(filled, gateway, KEY, exits) for _ in range(4)]
        assert MAX_REALTIME_BYTES * 0.8 < sum(taken) < MAX_REALTIME_BYTES * 1.5, taken
        others = await asyncio.to_thread(filled, gateway, OTHER_KEY, exits)
        assert others > MAX_REALTIME_BYTES / 3, (taken, others)
        await asyncio.to_thread(exits.close)
        await gateway.until(lambda: gateway.app.state.gateway.realtime_sessions == 0)
        assert await asyncio.to_thread(filled, gateway, KEY, exits) > MAX_REALTIME_BYTES * 0.8
    finally:
        await asyncio.to_thread(exits.close)
