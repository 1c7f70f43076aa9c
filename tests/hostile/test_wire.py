"""No connection costs more than a request's head, and none lasts without end."""

import asyncio
import time
from collections.abc import Callable

import pytest
from prometheus_client import REGISTRY

from tests.hostile.conftest import CONNECTIONS, KEY, STALL_S
from tests.hostile.meter import MAX_HELD_S, MIB, metered
from tests.hostile.table import WIRE
from tests.hostile.wire import Answer, Wire, ask, head
from tests.support.systems.gateway import Running

MAX_RISE_MIB = 16
KEYED = {"host": "localhost", "authorization": f"Bearer {KEY}"}
POST = head("POST /v1/chat/completions", {**KEYED, "content-length": "100"})
CHUNKED = head("POST /tokenize", {"host": "localhost", "transfer-encoding": "chunked"})
SOCKET = {"host": "localhost", "connection": "upgrade", "upgrade": "websocket", "sec-websocket-version": "13"}
SOCKET["sec-websocket-key"] = "dGhlIHNhbXBsZSBub25jZQ=="
GET = head("GET /openapi.json", {"host": "localhost"})


def endless(begin: bytes, piece: bytes, most: int = 16 * MIB) -> Callable[[Wire], None]:
    """Sends `piece` again and again, until the gateway has closed the connection."""

    def send(wire: Wire) -> None:
        wire.send(begin)
        pieces = piece * (65_536 // len(piece))
        sent = 0
        while wire.send(pieces):
            sent += len(pieces)
            assert sent < most, "the gateway takes more and more"

    return send


ATTACKS: dict[str, Callable[[Wire], object]] = {
    "a target without end": endless(b"GET /", b"x"),
    "a header without end": endless(b"GET / HTTP/1.1\r\na: ", b"x"),
    "headers without end": endless(b"GET / HTTP/1.1\r\n", b"a:b\r\n"),
    "many headers": lambda wire: wire.send(b"GET / HTTP/1.1\r\n" + b"a:b\r\n" * 201 + b"\r\n"),
    "trailers without end": endless(CHUNKED + b"0\r\n", b"a:b\r\n"),
    "blank lines without end": endless(b"", b"\r\n"),
    "requests behind one that runs": lambda wire: wire.send(POST + b"x" * 100 + GET * 1000),
    "a slow head": lambda wire: wire.send(b"GET /v1/models HTTP/1.1\r\nhost: loc"),
    "a slow body": lambda wire: wire.send(POST + b'{"model": '),
    "a body that nobody reads": lambda wire: wire.send(head("POST /v1/responses", {"content-length": "100"}) + b"{"),
    "an answer that nobody reads": lambda wire: wire.send(GET * 16),
    "a WebSocket's long header": lambda wire: wire.send(head("GET /v1/realtime", {**SOCKET, "cookie": "x" * 9000})),
}


SLOW = ("a slow head", "a slow body", "a body that nobody reads", "an answer that nobody reads")  # stopped by a time


def answer_of(url: str, attack: Callable[[Wire], object], waits_s: float) -> Answer:
    wire = Wire(url, receive_buffer=4096 if waits_s else None)
    try:
        attack(wire)
        if waits_s:
            time.sleep(waits_s)
        answer = wire.read()
        assert wire.is_closed()
        return answer
    finally:
        wire.close()


@pytest.mark.parametrize("attacks", [SLOW, *((what,) for what in WIRE if what not in SLOW)], ids="; ".join)
async def test_it_is_stopped(gateway: Running, attacks: tuple[str, ...]):
    def attack(what: str) -> Answer:
        waits_s = STALL_S + 1 if what == "an answer that nobody reads" else 0
        try:
            return answer_of(gateway.url, ATTACKS[what], waits_s)
        except TimeoutError:
            return Answer(-1, b"nothing came")

    with metered() as cost:
        answers = await asyncio.gather(*(asyncio.to_thread(attack, what) for what in attacks))
    for what, answer in zip(attacks, answers, strict=True):
        print(what, answer.status, answer.body[:100], cost)
        assert answer.status in WIRE[what].answers, (what, answer)
        if answer.status == 408:  # not the endpoint's own limit of time, which an endpoint without a body lacks
            assert b"The request's" in answer.body
    assert (cost.held_s < MAX_HELD_S, cost.rise_mib < MAX_RISE_MIB) == (True, True), cost
    assert (await gateway.http.get("/health")).status_code == 200


def test_all_attacks_are_in_the_table():
    assert set(ATTACKS) == set(WIRE)


async def test_a_websockets_long_line_is_answered(gateway: Running):
    answer = await asyncio.to_thread(ask, gateway.url, f"GET /v1/realtime?model={'x' * 9000}", SOCKET)
    assert answer.status == 414


async def test_a_new_connection_takes_the_place_of_an_idle_one(gateway: Running):
    idle = [Wire(gateway.url) for _ in range(CONNECTIONS)]
    try:
        answer = await asyncio.to_thread(ask, gateway.url, "GET /health", {})
        assert answer.status == 200
        assert await asyncio.to_thread(idle[0].is_closed)
        assert (await gateway.http.get("/health")).status_code == 200
    finally:
        for wire in idle:
            wire.close()


async def test_requests_that_run_keep_their_connections(gateway: Running):
    body = b'{"model": "scripted", "messages": [{"role": "user", "content": "hi"}], "stream": true}'
    headers = {**KEYED, "connection": "close", "content-length": str(len(body))}
    request = head("POST /v1/chat/completions", headers) + body
    gateway.scripts["thinker"].hold = True
    busy = [Wire(gateway.url) for _ in range(CONNECTIONS)]
    try:
        for wire in busy:
            wire.send(request)
        await gateway.until(lambda: gateway.app.state.gateway.admission.in_flight == CONNECTIONS)
        refused = await asyncio.to_thread(ask, gateway.url, "GET /health", {})
        assert (refused.status, b"too many connections" in refused.body) == (503, True)
        gateway.scripts["thinker"].go_on()
        answers = await asyncio.gather(*(asyncio.to_thread(wire.read) for wire in busy))
        assert [answer.status for answer in answers] == [200] * CONNECTIONS
    finally:
        for wire in busy:
            wire.close()


async def test_a_client_that_leaves_ends_the_request_that_others_wait_behind(gateway: Running):
    body = b'{"model": "scripted", "messages": [{"role": "user", "content": "hi"}]}'

    def ended() -> float:
        """Requests that ended so, and not at `request_timeout_s`."""
        labels = {"path": "/v1/chat/completions", "status": "499"}
        return REGISTRY.get_sample_value("quartet_gateway_requests_total", labels) or 0.0

    before = ended()
    gateway.scripts["thinker"].hold = True
    wire = Wire(gateway.url)
    try:
        wire.send(head("POST /v1/chat/completions", {**KEYED, "content-length": str(len(body))}) + body + GET)
        await gateway.until(lambda: gateway.scripts["thinker"].requests)
    finally:
        wire.close()
    await gateway.until(lambda: gateway.scripts["thinker"].ended == ["cancelled"])
    await gateway.until(lambda: gateway.app.state.gateway.admission.in_flight == 0)
    await gateway.until(lambda: ended() == before + 1)


async def test_nothing_is_written_into_an_answer_that_has_begun(gateway: Running):
    """By requests that are too many behind it."""
    body = b'{"model": "scripted", "messages": [{"role": "user", "content": "hi"}], "stream": true}'
    gateway.scripts["thinker"].hold, gateway.scripts["thinker"].after = True, 1
    wire = Wire(gateway.url)
    try:
        wire.send(head("POST /v1/chat/completions", {**KEYED, "content-length": str(len(body))}) + body)
        answer = await asyncio.to_thread(wire.socket.recv, 65_536)
        wire.send(GET * 40)
        while piece := await asyncio.to_thread(wire.socket.recv, 65_536):
            answer += piece
    finally:
        wire.close()
    assert answer.startswith(b"HTTP/1.1 200")
    assert answer.count(b"HTTP/1.1") == 1, answer
