"""Bodies of many requests take no more memory than one may have."""

import asyncio

from gateway.http.bodies import FREE_BYTES
from tests.hostile.conftest import KEY, MAX_BODY_BYTES, OTHER_KEY
from tests.hostile.meter import MIB, metered
from tests.hostile.wire import Answer, Wire, ask, head
from tests.support.systems.gateway import Running

SIZE = MAX_BODY_BYTES * 2 // 3
LINE = "POST /v1/chat/completions"
FULL = (503, "too_many_large_bodies")


def headers(key: str, size: int = SIZE) -> dict[str, str]:
    given = {"host": "localhost", "authorization": f"Bearer {key}", "content-type": "application/json"}
    return given | {"content-length": str(size)}


async def large(gateway: Running, key: str) -> tuple[int, str]:
    answer = await asyncio.to_thread(ask, gateway.url, LINE, headers(key), b"[" * SIZE)
    return answer.status, answer.error["code"]


async def begun(gateway: Running, key: str, size: int = SIZE) -> Wire:
    """A request whose last byte does not come."""
    wire = Wire(gateway.url)
    await asyncio.to_thread(wire.send, head(LINE, headers(key, size + 1)) + b" " * size)
    return wire


async def test_who_has_most_gives_way(gateway: Running):
    held = gateway.app.state.bodies
    slow = await begun(gateway, KEY)
    try:
        await gateway.until(lambda: held.size > SIZE - MIB)
        assert await large(gateway, KEY) == FULL
        assert await large(gateway, OTHER_KEY) == (400, "json_too_large")
        dropped: Answer = await asyncio.to_thread(slow.read)
        assert (dropped.status, dropped.error["code"]) == FULL
    finally:
        slow.close()
    await gateway.until(lambda: held.size == 0)
    assert await large(gateway, KEY) == (400, "json_too_large")


async def test_many_large_texts_cost_what_one_does(gateway: Running):
    text = b'{"model": "scripted", "messages": [{"role": "user", "content": "' + b"x" * SIZE + b'"}]}'
    with metered() as cost:
        asked = [asyncio.to_thread(ask, gateway.url, LINE, headers(KEY, len(text)), text) for _ in range(12)]
        answers = await asyncio.gather(*asked)
    assert {answer.status for answer in answers} <= {200, 503}, answers
    assert [answer.error["code"] for answer in answers if answer.status == 503].count(FULL[1]) >= 6
    assert cost.rise_mib < 16 * MAX_BODY_BYTES / MIB, cost  # of it 8 are copies that the clients send


async def test_small_bodies_need_no_room(gateway: Running):
    most = MAX_BODY_BYTES - SIZE
    slow = [await begun(gateway, KEY, SIZE + FREE_BYTES), await begun(gateway, OTHER_KEY, most + FREE_BYTES)]
    try:
        await gateway.until(lambda: gateway.app.state.bodies.size > MAX_BODY_BYTES - FREE_BYTES)
        body = {"model": "scripted", "messages": [{"role": "user", "content": "x" * 200_000}]}
        response = await gateway.http.post(
            "/v1/chat/completions", json=body, headers={"authorization": f"Bearer {KEY}"}
        )
        assert response.status_code == 200
        assert gateway.app.state.bodies.size > MAX_BODY_BYTES - FREE_BYTES
    finally:
        for wire in slow:
            wire.close()
