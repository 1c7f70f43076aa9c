"""The check of the order of realtime events refuses what is out of order."""

import pytest
import pytest_asyncio

from tests.support.clients.realtime_client import session
from tests.support.clients.realtime_order import Event, Order

pytestmark = pytest.mark.asyncio(loop_scope="module")


def check(events: list[Event]) -> Order:
    order = Order()
    for event in events:
        order.see(event)
    return order


def is_in_order(events: list[Event]) -> bool:
    try:
        return check(events).idle
    except (AssertionError, LookupError, ValueError):
        return False


@pytest_asyncio.fixture(loop_scope="module")
async def told(speech_gateway) -> list[Event]:
    """The events of a spoken answer."""
    async with session(speech_gateway) as client:
        events = [{"type": "session.created", "event_id": "first"}]
        await client.send(
            "conversation.item.create",
            item={"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
        )
        events += await client.until("conversation.item.done")
        return events + await client.respond()


async def test_an_answer_is_in_order(told: list[Event]):
    order = check(told)
    assert order.idle
    assert len(order.responses) == 1


async def test_every_event_has_its_place(told: list[Event]):
    """An event that comes twice, is missing, or comes before the one before it, is noticed: but among deltas, and the
    ends of text and sound, which go their own ways."""
    free = {number for number, event in enumerate(told) if event["type"].startswith("response.output_audio")}
    for number, event in enumerate(told):
        again = event | {"event_id": "again"}
        if not event["type"].endswith(".delta"):
            assert not is_in_order([*told[: number + 1], again, *told[number + 1 :]]), f"{event['type']} twice"
            assert not is_in_order([*told[:number], *told[number + 1 :]]), f"no {event['type']}"
        if number and not {number, number - 1} <= free:
            swapped = [*told[: number - 1], event, told[number - 1], *told[number + 1 :]]
            assert not is_in_order(swapped), f"{event['type']} before {told[number - 1]['type']}"
