"""Deltas of many answers in one stream, from a scripted thinker to the gateway."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from functools import partial

import pytest

from gateway.pipeline.replica import Replica
from quartet.v1 import thinker_pb2
from services.common.errors import InvalidInput, Unavailable
from services.thinker import delta_streams
from services.thinker.delta_streams import DeltaStreams
from tests.support.scripted.thinker import PIECES
from tests.support.systems.gateway import Running, running

pytestmark = pytest.mark.asyncio(loop_scope="module")
SAID = "".join(PIECES)
CHAT = {"model": "scripted", "messages": [{"role": "user", "content": "Hi"}], "modalities": ["text"]}


def thinker_of(gateway: Running) -> Replica:
    (replica,) = gateway.app.state.gateway.pipeline.by_name["thinker"].replicas.values()
    return replica


async def opened(gateway: Running) -> None:
    """Returns when deltas come by a stream: the first answer has it opened."""
    await said(gateway)
    replica = thinker_of(gateway)
    await gateway.until(lambda: replica._deltas is not None and replica._deltas.is_open)


async def said(gateway: Running) -> str:
    """The text of a streamed answer."""
    events = await gateway.events(CHAT)
    assert events[0]["choices"][0]["delta"]["role"] == "assistant"
    assert events[-1]["choices"][0]["finish_reason"] == "stop"
    return "".join(event["choices"][0]["delta"].get("content", "") for event in events)


async def test_answers_by_a_stream_are_those_by_their_calls(speech_gateway: Running) -> None:
    assert await said(speech_gateway) == SAID
    await opened(speech_gateway)
    assert await asyncio.gather(*(said(speech_gateway) for _ in range(40))) == [SAID] * 40
    asked = speech_gateway.scripts["thinker"].requests[-40:]
    assert len({(start.deltas_to.stream_id, start.deltas_to.answer) for start in asked}) == 40
    assert len({start.deltas_to.stream_id for start in asked}) == 1


async def test_deltas_come_as_they_are_written(speech_gateway: Running) -> None:
    await opened(speech_gateway)
    thinker = speech_gateway.scripts["thinker"]
    thinker.hold, thinker.after = True, 3  # the prompt and two deltas
    text = ""
    async with aclosing(await speech_gateway.openai.chat.completions.create(**CHAT, stream=True)) as chunks:
        async for chunk in chunks:
            text += chunk.choices[0].delta.content or "" if chunk.choices else ""
            if text == "".join(PIECES[:2]):
                thinker.go_on()
    assert text == SAID


async def test_an_answer_is_cancelled_and_the_others_go_on(speech_gateway: Running) -> None:
    await opened(speech_gateway)
    thinker = speech_gateway.scripts["thinker"]
    thinker.hold, thinker.after = True, 2
    left, stays = (asyncio.create_task(said(speech_gateway)) for _ in range(2))
    await speech_gateway.until(lambda: thinker.running == 2)
    left.cancel()
    await speech_gateway.until(lambda: thinker.running == 1)
    thinker.go_on()
    assert await stays == SAID


async def test_a_prompts_logprobs_come_in_the_call_and_before_its_text(speech_gateway: Running) -> None:
    await opened(speech_gateway)
    body = {"model": "scripted", "prompt": "Hi", "echo": True, "logprobs": 1}
    answer = await speech_gateway.http.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    assert not speech_gateway.scripts["thinker"].requests[-1].HasField("deltas_to")


async def test_a_thinker_that_dies_ends_its_answers_and_is_asked_again() -> None:
    async with running() as gateway:
        await opened(gateway)
        thinker = gateway.scripts["thinker"]
        thinker.hold, thinker.after = True, 2
        answers = [asyncio.create_task(gateway.chat(CHAT)) for _ in range(3)]
        await gateway.until(lambda: thinker.running == 3)
        await gateway.stages.servers["thinker"].stop(grace=None)
        assert [answer.status_code for answer in await asyncio.gather(*answers)] == [503] * 3
        thinker.go_on()
        await gateway.stages.start("thinker")
        await gateway.until(lambda: gateway.app.state.gateway.pipeline.ready)
        await opened(gateway)
        assert await said(gateway) == SAID
        assert thinker.requests[-1].HasField("deltas_to")


async def test_a_stream_that_breaks_alone_fails_its_answers_only(speech_gateway: Running) -> None:
    await opened(speech_gateway)
    thinker, replica = speech_gateway.scripts["thinker"], thinker_of(speech_gateway)
    thinker.hold, thinker.after = True, 2
    answer = asyncio.create_task(speech_gateway.chat(CHAT))
    await speech_gateway.until(lambda: thinker.running == 1)
    assert replica._deltas is not None
    replica._deltas._reading.cancel()
    assert (await answer).status_code == 503
    thinker.go_on()
    await speech_gateway.until(lambda: speech_gateway.app.state.gateway.pipeline.ready)
    await opened(speech_gateway)
    assert await said(speech_gateway) == SAID


async def test_a_stream_has_a_name_of_its_own() -> None:
    streams = DeltaStreams()
    async with aclosing(streams.serve("one")) as messages:
        assert not (await anext(messages)).deltas
        for name in ("", "one"):
            with pytest.raises(InvalidInput, match="stream_id"):
                await anext(streams.serve(name))
    told = [part async for part in streams.redirected(_answer(), thinker_pb2.DeltaDestination(stream_id="one"))]
    assert [part.WhichOneof("message") for part in told] == ["delta", "delta", "summary"]  # in the call


async def test_a_summary_says_how_many_deltas_went_to_the_stream() -> None:
    streams = DeltaStreams()
    async with aclosing(streams.serve("one")) as messages:
        await anext(messages)
        told = [part async for part in streams.redirected(_answer(), thinker_pb2.DeltaDestination(stream_id="one"))]
    assert [part.summary.streamed_deltas for part in told] == [2]


async def _answer() -> AsyncGenerator[thinker_pb2.GenerateResponse]:
    for text in ("a", "b"):
        yield thinker_pb2.GenerateResponse(delta=thinker_pb2.GenerateDelta(text=text))
    yield thinker_pb2.GenerateResponse(summary=thinker_pb2.GenerateSummary())


async def test_answers_wait_for_a_slow_reader_and_end_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delta_streams, "_MOST_WAITING", 2)
    streams, delta = DeltaStreams(), thinker_pb2.GenerateDelta(text="a")
    async with aclosing(streams.serve("one")) as messages:
        await anext(messages)
        put = partial(streams._open["one"].put, 7, delta)
        for _ in range(2):
            await put()
        waits = asyncio.create_task(put())
        await asyncio.sleep(0)
        assert not waits.done()
        assert [told.answer for told in (await anext(messages)).deltas] == [7, 7]
        await waits
        await put()
        ends = asyncio.create_task(put())
        await asyncio.sleep(0)
    with pytest.raises(Unavailable):
        await ends
    with pytest.raises(Unavailable):
        await put()
