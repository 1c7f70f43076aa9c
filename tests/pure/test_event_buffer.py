"""What waits for a client that is behind: joined where it can be told as one, and bounded."""

import asyncio

import pytest

from gateway.pipeline.event_buffer import EventBuffer
from gateway.pipeline.events import AudioDelta, Event, TextDelta, TextEnd
from quartet.v1 import thinker_pb2


def text(said: str = "", *, thought: str = "", token: int = 0, call: str = "") -> TextDelta:
    delta = thinker_pb2.GenerateDelta(text=said, reasoning=thought, token_ids=[token])
    delta.logprobs.add(token_id=token, logprob=-0.5)
    if call:
        delta.tool_calls.add(index=0, arguments_json=call)
    return TextDelta(delta)


async def taken(*put: tuple[int, Event]) -> list[tuple[int, Event]]:
    """What a reader finds that looks only after all was put."""
    buffer = EventBuffer()
    for index, event in put:
        await buffer.put(index, event)
    found = []
    while (event := buffer.take()) is not None:
        found.append(event)
    return found


async def test_tokens_that_wait_together_are_one_delta():
    (joined,) = await taken((0, text(thought="Hm. ", token=1)), (0, text("Hel", token=2)), (0, text("lo", token=3)))
    index, event = joined
    assert isinstance(event, TextDelta)
    delta = event.delta
    assert (index, delta.reasoning, delta.text, list(delta.token_ids)) == (0, "Hm. ", "Hello", [1, 2, 3])
    assert [token.token_id for token in delta.logprobs] == [1, 2, 3]


async def test_sound_that_waits_is_joined_up_to_a_size():
    found = await taken(*((0, AudioDelta(bytes([i]) * 12_000)) for i in range(5)))
    sizes = [len(event.pcm16) for _, event in found if isinstance(event, AudioDelta)]
    assert sizes == [24_000, 24_000, 12_000]
    sound = b"".join(event.pcm16 for _, event in found if isinstance(event, AudioDelta))
    assert sound == b"".join(bytes([i]) * 12_000 for i in range(5))


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ((0, text("a")), (1, text("b"))),  # of two answers
        ((0, text("a")), (0, AudioDelta(b"ab"))),
        ((0, AudioDelta(b"ab")), (0, text("a"))),
        ((0, text("a")), (0, text(thought="b"))),  # told together, the thought would come first
        ((0, text(call="{")), (0, text(call="}"))),
        ((0, text("a")), (0, TextEnd(thinker_pb2.GenerateSummary()))),
    ],
)
async def test_what_is_not_the_same_is_told_by_itself_and_in_order(first: tuple[int, Event], second: tuple[int, Event]):
    assert await taken(first, second) == [first, second]


async def test_text_is_joined_up_to_a_bound():
    """Each join copies: an answer for a client that reads nothing must not cost the square of its length."""
    buffer, sizes = EventBuffer(), []
    for i in range(1000):
        buffer.put_now(0, text("a", token=i))
    while (event := buffer.take()) is not None:
        assert isinstance(event[1], TextDelta)
        sizes.append(len(event[1].delta.token_ids))
    assert sum(sizes) == 1000
    assert 3 < len(sizes) < 10


async def test_writers_wait_for_a_reader_that_is_behind():
    buffer, put = EventBuffer(), 0

    async def write() -> None:
        nonlocal put
        for _ in range(1000):
            await buffer.put(0, AudioDelta(bytes(2)))
            put += 1

    writing = asyncio.create_task(write())
    await asyncio.sleep(0)
    most = put
    assert 0 < most < 1000
    heard = 0
    while heard < 2000:
        await buffer.wait(lambda: False)
        event = buffer.take()
        assert event is not None
        assert isinstance(event[1], AudioDelta)
        heard += len(event[1].pcm16)
        assert 2 * put - heard <= 2 * most
    await writing


async def test_a_reader_hears_that_nothing_follows():
    buffer, over = EventBuffer(), asyncio.Event()
    reading = asyncio.create_task(buffer.wait(over.is_set))
    await asyncio.sleep(0)
    buffer.wake()  # for nothing: it goes on waiting
    await asyncio.sleep(0)
    assert not reading.done()
    over.set()
    buffer.wake()
    await reading
    assert buffer.take() is None
