"""A model without speech that thinks before it answers, over HTTP and in realtime; its stage follows a script."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from gateway.pipelines import pipeline_file
from tests.support.clients.realtime_client import session
from tests.support.scripted.thinker import PIECES
from tests.support.systems.gateway import Running, running

pytestmark = pytest.mark.asyncio(loop_scope="module")
ASK = {"model": "scripted", "messages": [{"role": "user", "content": "hi"}]}
TEXT, THOUGHT = "".join(PIECES), ["Let me", " see."]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running_gateway() -> AsyncIterator[Running]:
    async with running(pipeline_file(Path("text"))) as gateway:
        yield gateway


@pytest_asyncio.fixture(loop_scope="module")
async def gateway(running_gateway: Running) -> AsyncIterator[Running]:
    running_gateway.scripts["thinker"].thought = THOUGHT
    yield running_gateway
    await running_gateway.reset()


async def test_a_thought_is_told_beside_the_answer(gateway: Running) -> None:
    whole = await gateway.openai.chat.completions.create(**ASK)
    message = whole.choices[0].message.model_dump()
    assert (message["reasoning_content"], message["content"]) == ("".join(THOUGHT), TEXT)
    assert whole.usage.completion_tokens == 5
    assert whole.usage.completion_tokens_details.reasoning_tokens == 2

    events = await gateway.events(ASK | {"stream_options": {"include_usage": True}})
    deltas = [event["choices"][0]["delta"] for event in events if event["choices"]]
    thoughts = [i for i, delta in enumerate(deltas) if "reasoning_content" in delta]
    said = [i for i, delta in enumerate(deltas) if delta.get("content")]
    assert "".join(deltas[i]["reasoning_content"] for i in thoughts) == "".join(THOUGHT)
    assert "".join(deltas[i]["content"] for i in said) == TEXT
    assert max(thoughts) <= min(said)  # who reads a chunk that has both reads the thought first
    assert events[-1]["usage"]["completion_tokens_details"]["reasoning_tokens"] == 2


async def test_without_a_thought_no_member_is_sent(gateway: Running) -> None:
    gateway.scripts["thinker"].thought = ()
    body = (await gateway.chat(ASK)).json()
    assert "reasoning_content" not in body["choices"][0]["message"]
    assert body["usage"]["completion_tokens_details"]["reasoning_tokens"] == 0


@pytest.mark.parametrize("member", ["reasoning_content", "reasoning"])
async def test_earlier_thoughts_and_the_priority_go_to_the_thinker(gateway: Running, member: str) -> None:
    earlier = {"role": "assistant", "content": None, member: "so"}
    asked = ASK | {"messages": [*ASK["messages"], earlier, *ASK["messages"]], "priority": -3}
    assert (await gateway.chat(asked)).status_code == 200
    (start,) = gateway.scripts["thinker"].requests
    assert [message.reasoning for message in start.messages] == ["", "so", ""]
    assert start.priority == -3
    status, error = await gateway.refusal(ASK | {"priority": 2**31})
    assert (status, error["param"]) == (400, "priority")


async def test_speech_is_refused_by_its_name(gateway: Running) -> None:
    status, error = await gateway.refusal(ASK | {"modalities": ["text", "audio"]})
    assert (status, error["param"]) == (400, "modalities")
    assert "this model has no speech" in error["message"]
    response = await gateway.http.post("/v1/audio/speech", json={"model": "scripted", "input": "hi", "voice": "x"})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "model")
    assert "nothing here makes speech" in response.json()["error"]["message"]
    (model,) = (await gateway.http.get("/v1/models")).json()["data"]
    assert model["quartet"]["output_modalities"] == ["text"]


async def test_a_realtime_session_answers_in_text_and_refuses_speech(gateway: Running) -> None:
    async with session(gateway, "scripted") as client:
        assert client.created["session"]["output_modalities"] == ["text"]
        asked = {"type": "realtime", "output_modalities": ["audio"]}
        error = await client.refusal("session.update", session=asked)
        assert error["param"] == "session.output_modalities"
        assert "no speech" in error["message"]
        await client.say("hi")
        done = (await client.respond())[-1]["response"]
    (part,) = done["output"][0]["content"]
    assert (part["type"], part["text"]) == ("output_text", TEXT)
