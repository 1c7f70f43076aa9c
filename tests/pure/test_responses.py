"""The Responses API, asked with OpenAI's own client; the stages behind it follow a script."""

import asyncio
import base64
import json
from pathlib import Path
from typing import Any

import openai
import pytest
from pydantic import BaseModel

from services.common.errors import ContextTooLong, InternalError, QueueFull, StageLost
from tests.support.clients.responses import client, create, events_of, kinds, prompt, refusal, stream
from tests.support.samples.media import png
from tests.support.scripted.code2wav import PCM16
from tests.support.scripted.thinker import PIECES
from tests.support.systems.gateway import Running

pytestmark = pytest.mark.asyncio(loop_scope="module")
TEXT = "".join(PIECES)
CODEX = Path(__file__).parents[1] / "support/clients/codex_exchange.json"
LAMP = {"type": "function", "name": "lamp", "parameters": {"type": "object"}}
CALLED = {"type": "function_call", "call_id": "c1", "name": "lamp", "arguments": "{}"}


@pytest.fixture
def gateway(speech_gateway: Running) -> Running:
    return speech_gateway


def output(call_id: str, given: Any = "on") -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": call_id, "output": given}


async def test_a_text_is_answered(gateway: Running) -> None:
    response = await create(gateway, instructions="be kind", metadata={"a": "b"})
    assert (response.output_text, response.status, response.object) == (TEXT, "completed", "response")
    assert (response.usage.input_tokens, response.usage.output_tokens, response.usage.total_tokens) == (10, 3, 13)
    assert response.usage.input_tokens_details.cached_tokens == 2
    assert response.metadata == {"a": "b"}
    assert prompt(gateway) == [("system", "be kind"), ("user", "hi")]
    (message,) = response.output
    assert message.id.startswith("msg_")
    assert response.id.startswith("resp_")


async def test_it_says_how_it_was_sampled(gateway: Running) -> None:
    """By the request, else by the checkpoint, as the thinker says it; Open Responses wants numbers."""
    names = ("temperature", "top_p", "presence_penalty", "frequency_penalty")
    sent = ({}, {"temperature": 0.5, "presence_penalty": 0.25}, {"stream_options": {"include_obfuscation": False}})
    said = [
        (await gateway.http.post("/v1/responses", json={"model": "scripted", "input": "hi"} | members)).json()
        for members in sent
    ]
    assert [[each[name] for name in names] for each in said] == [
        [0.75, 0.875, 0, 0],
        [0.5, 0.875, 0.25, 0],
        [0.75, 0.875, 0, 0],
    ]


async def test_the_events_of_a_stream_are_in_order_and_agree_with_its_end(gateway: Running) -> None:
    gateway.scripts["thinker"].thought = ["Let me", " see."]
    events = await stream(gateway, include=["reasoning.encrypted_content"])
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    item = ["output_item.added", "content_part.added", "{}.delta", "{}.done", "content_part.done", "output_item.done"]
    thought, message = ([name.format(kind) for name in item] for kind in ("reasoning_text", "output_text"))
    assert kinds(events) == ["created", "in_progress", *thought, *message, "completed"]
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert events[-1]["response"]["output"] == done
    assert base64.b64decode(done[0]["encrypted_content"]).decode() == "Let me see."
    assert [part["text"] for item in done for part in item["content"]] == ["Let me see.", TEXT]
    assert events[-1]["response"]["usage"]["output_tokens_details"]["reasoning_tokens"] == 2


async def test_openais_client_puts_a_stream_together(gateway: Running) -> None:
    gateway.scripts["thinker"].calls = [("lamp", '{"on": true}')]
    async with client(gateway).responses.stream(model="scripted", input="hi", tools=[LAMP]) as events:
        async for _ in events:
            pass
        response = await events.get_final_response()
    (call,) = response.output
    assert (call.type, call.name, call.call_id, call.arguments) == (
        "function_call",
        "lamp",
        "call_lamp",
        '{"on": true}',
    )
    assert json.loads(gateway.scripts["thinker"].requests[0].tools[0].parameters_json) == LAMP["parameters"]

    answered = [{"role": "user", "content": "hi"}, call.model_dump(), output("call_lamp")]
    assert (await create(gateway, answered, tools=[LAMP])).output_text == TEXT
    assert [role for role, _ in prompt(gateway)] == ["user", "assistant", "tool"]
    asked = gateway.scripts["thinker"].requests[-1].messages
    assert (asked[1].tool_calls[0].id, asked[2].tool_call_id) == ("call_lamp", "call_lamp")


async def test_a_schema_is_followed(gateway: Running) -> None:
    class Lamp(BaseModel):
        on: bool

    with pytest.raises(ValueError, match="Lamp"):  # the script's answer is no JSON
        await client(gateway).responses.parse(model="scripted", input="hi", text_format=Lamp)
    sampling = gateway.scripts["thinker"].requests[-1].sampling
    assert json.loads(sampling.json_schema)["properties"]["on"]["type"] == "boolean"


async def test_speech_beside_the_text(gateway: Running) -> None:
    events = await stream(gateway, modalities=["text", "audio"], audio={"voice": "ethan"})
    sound = b"".join(base64.b64decode(event["delta"]) for event in events if event["type"] == "response.audio.delta")
    said = "".join(event["delta"] for event in events if event["type"] == "response.audio.transcript.delta")
    assert (sound, said) == (PCM16, TEXT)
    whole = (await create(gateway, extra_body={"modalities": ["text", "audio"]})).model_dump(warnings=False)
    text, audio = whole["output"][0]["content"]
    assert (text["text"], audio["type"], audio["format"]) == (TEXT, "output_audio", "wav")
    assert base64.b64decode(audio["data"]).startswith(b"RIFF")
    assert whole["usage"]["output_tokens_details"]["audio_tokens"] == 3
    await create(gateway, "and", previous_response_id=whole["id"])
    assert prompt(gateway)[1] == ("assistant", TEXT)


async def test_later_turns_have_the_earlier_ones_and_not_their_instructions(gateway: Running) -> None:
    first = await create(gateway, "one", instructions="once")
    second = await create(gateway, "two", previous_response_id=first.id)
    await create(gateway, "three", previous_response_id=second.id)
    said = [("user", "one"), ("assistant", TEXT), ("user", "two"), ("assistant", TEXT), ("user", "three")]
    assert prompt(gateway) == said

    assert (await client(gateway).responses.retrieve(second.id)).output_text == TEXT
    items = await client(gateway).responses.input_items.list(second.id)
    assert [item.content[0].text for item in items.data] == ["two"]

    await client(gateway).responses.delete(first.id)
    for gone in (first, second):
        with pytest.raises(openai.BadRequestError) as raised:
            await create(gateway, "four", previous_response_id=gone.id)
        assert raised.value.code == "previous_response_not_found"


async def test_what_is_not_stored_cannot_be_got(gateway: Running) -> None:
    response = await create(gateway, store=False)
    with pytest.raises(openai.NotFoundError):
        await client(gateway).responses.retrieve(response.id)


async def test_a_conversation_grows(gateway: Running) -> None:
    conversations = client(gateway).conversations
    made = await conversations.create(items=[{"role": "user", "content": "zero"}], metadata={"topic": "x"})
    await create(gateway, "one", conversation=made.id)
    await create(gateway, "two", conversation={"id": made.id}, store=False)
    assert [text for _, text in prompt(gateway)] == ["zero", "one", TEXT, "two"]
    items = (await conversations.items.list(made.id, order="asc")).data
    assert [item.content[0].text for item in items] == ["zero", "one", TEXT, "two", TEXT]
    page = await gateway.http.get(f"/v1/conversations/{made.id}/items?limit=2&order=asc&after={items[0].id}")
    assert [item["id"] for item in page.json()["data"]] == [item.id for item in items[1:3]]
    assert page.json()["has_more"]
    assert (await conversations.items.retrieve(items[1].id, conversation_id=made.id)).id == items[1].id
    await conversations.items.delete(items[0].id, conversation_id=made.id)
    added = await conversations.items.create(made.id, items=[{"role": "user", "content": "more"}])
    assert added.data[0].content[0].text == "more"
    assert (await conversations.update(made.id, metadata={"topic": "y"})).metadata == {"topic": "y"}
    assert (await conversations.retrieve(made.id)).metadata == {"topic": "y"}
    assert len((await conversations.items.list(made.id)).data) == 5
    await conversations.delete(made.id)
    with pytest.raises(openai.NotFoundError):
        await create(gateway, "three", conversation=made.id)


async def test_items_are_named_by_reference(gateway: Running) -> None:
    first = await create(gateway, "one")
    await create(gateway, [{"type": "item_reference", "id": first.output[0].id}, {"role": "user", "content": "two"}])
    assert prompt(gateway) == [("assistant", TEXT), ("user", "two")]


async def test_images_sounds_and_files_are_read(gateway: Running) -> None:
    picture = f"data:image/png;base64,{base64.b64encode(png()).decode()}"
    text = base64.b64encode("grüß dich".encode()).decode()
    parts = [
        {"type": "input_text", "text": "see"},
        {"type": "input_image", "image_url": picture, "detail": "auto"},
        {"type": "input_file", "filename": "a.md", "file_data": f"data:text/markdown;base64,{text}"},
        {"type": "input_file", "filename": "b.png", "file_data": picture.partition(",")[2]},
    ]
    await create(gateway, [{"role": "user", "content": parts}])
    sent = gateway.scripts["thinker"].requests[-1].messages[0].content
    assert [part.WhichOneof("content") for part in sent] == ["text", "media", "text", "media"]
    assert sent[2].text == "a.md:\ngrüß dich"
    assert sent[1].media.data == sent[3].media.data == png()
    assert sent[1].media.field == "messages[0].content[1]"


async def test_codex_is_answered_and_its_call_too(gateway: Running) -> None:
    """The requests of a turn of its, recorded, less the words: its model calls a function, and says something."""
    thinker, (first, second) = gateway.scripts["thinker"], json.loads(CODEX.read_text())
    thinker.thought, thinker.calls = ["Hm"], [("exec_command", '{"cmd":"echo hi"}')]
    called = await stream(gateway, first.pop("input"), **first)
    done = [event["item"] for event in called if event["type"] == "response.output_item.done"]
    assert [item["type"] for item in done] == ["reasoning", "function_call"]
    assert (done[1]["name"], done[1]["arguments"]) == ("exec_command", '{"cmd":"echo hi"}')
    assert (called[-1]["type"], called[-1]["response"]["usage"]["total_tokens"]) == ("response.completed", 14)
    assert base64.b64decode(done[0]["encrypted_content"]).decode() == "Hm"

    answered = await stream(gateway, second.pop("input"), **second)
    assert answered[-1]["response"]["output"][-1]["content"][0]["text"] == TEXT
    roles = ["system", "system", "user", "user", "assistant", "tool"]
    assert [role for role, _ in prompt(gateway)] == roles
    start = thinker.requests[-1]
    assert (start.messages[4].reasoning, start.messages[4].tool_calls[0].name) == ("Hm", "exec_command")
    names = ["exec_command", "multi_agent_v1__close_agent"]  # its other tools are none of ours
    assert [tool.name for tool in start.tools] == names
    assert [tool["type"] for tool in answered[-1]["response"]["tools"]] == ["function", "namespace"]


async def test_items_of_other_servers_tools_are_left_out(gateway: Running) -> None:
    others = [{"type": "web_search_call", "status": "completed"}, {"type": "custom_tool_call_output", "call_id": "c2"}]
    await create(gateway, [*others, {"role": "user", "content": "hi"}])
    assert prompt(gateway) == [("user", "hi")]


async def test_guidellm_and_others_send_vllms_members(gateway: Running) -> None:
    response = await create(
        gateway, extra_body={"stop": None, "ignore_eos": True, "seed": 3, "top_k": 5, "priority": 1}
    )
    assert response.status == "completed"
    sampling = gateway.scripts["thinker"].requests[0].sampling
    assert (sampling.ignore_eos, sampling.seed, sampling.top_k) == (True, 3, 5)


def raw(text: str, tokens: list[int] | None = None) -> dict[str, Any]:
    """A prompt or output as vLLM's server has it. The scripted prompts have an id for each character."""
    return {"message": text, "tokens": [*map(ord, text)] if tokens is None else tokens, "type": "raw_message_tokens"}


async def test_prompt_and_output_as_token_ids(gateway: Running) -> None:
    for members in ({}, {"enable_response_messages": False}):
        plain = await create(gateway, extra_body=members)
        assert not {"input_messages", "output_messages"} & plain.model_extra.keys()
    asked: dict[str, Any] = {"enable_response_messages": True}
    told = {"input_messages": [raw("hi")], "output_messages": [raw("\0\1\2", [0, 1, 2])]}
    whole = await create(gateway, extra_body=asked)
    assert {name: whole.model_extra[name] for name in told} == told
    events = await stream(gateway, **asked)
    assert all("input_messages" not in event["response"] for event in events[:2])
    assert told.items() <= events[-1]["response"].items()
    later = await create(gateway, "and", previous_response_id=whole.id, extra_body=asked | {"background": True})
    while later.status in ("queued", "in_progress"):
        later = await client(gateway).responses.retrieve(later.id)
    assert later.model_extra["input_messages"] == [raw(f"hi{TEXT}and")]
    status, param, _ = await refusal(gateway, **asked, include_reasoning=False)
    assert (status, param) == (400, "enable_response_messages")


async def test_the_most_tokens_make_it_incomplete(gateway: Running) -> None:
    gateway.scripts["thinker"].too_long = True
    events = await stream(gateway, max_output_tokens=3)
    end = events[-1]["response"]
    assert (events[-1]["type"], end["status"]) == ("response.incomplete", "incomplete")
    assert end["incomplete_details"] == {"reason": "max_output_tokens"}
    assert end["output"][0]["status"] == "incomplete"
    assert gateway.scripts["thinker"].requests[0].sampling.max_tokens == 3


async def test_a_prompt_that_is_too_long_is_cut_if_the_client_allows(gateway: Running) -> None:
    thinker = gateway.scripts["thinker"]
    history = [*({"role": "user", "content": str(i)} for i in range(8)), CALLED, output("c1")]
    thinker.error = ContextTooLong("messages", "the prompt has 9 tokens; the limit is 8")
    status, param, _ = await refusal(gateway, input=history)
    assert (status, param) == (400, "input")

    asking = asyncio.create_task(create(gateway, history, truncation="auto"))
    await gateway.until(lambda: len(thinker.requests) >= 3)
    thinker.error = None
    assert (await asking).status == "completed"
    lengths = [len(start.messages) for start in thinker.requests[1:]]
    assert lengths[0] == 10
    assert sorted(set(lengths), reverse=True) == lengths
    assert prompt(gateway)[-1] == ("tool", "on")


async def test_a_queue_that_is_full_and_a_stage_that_fails(gateway: Running) -> None:
    thinker = gateway.scripts["thinker"]
    thinker.error = QueueFull("it is", 1.0)
    assert (await refusal(gateway, stream=True))[0] == 429
    thinker.error, thinker.after, thinker.hold = InternalError("oh"), 2, True
    body, text = {"model": "scripted", "input": "hi", "stream": True}, ""
    async with gateway.http.stream("POST", "/v1/responses", json=body) as response:
        async for piece in response.aiter_text():
            text += piece
            if "output_text.delta" in text:  # a failure overtakes what no client has read
                thinker.go_on()
    events = events_of(text)
    assert (events[-1]["type"], events[-1]["response"]["error"]["code"]) == ("response.failed", "server_error")
    assert events[-2]["item"]["status"] == "incomplete"
    assert (await refusal(gateway))[0] == 500
    failed = await client(gateway).responses.retrieve(events[-1]["response"]["id"])
    assert (failed.status, failed.output_text) == ("failed", PIECES[0])


async def test_a_client_that_leaves_ends_the_work(gateway: Running) -> None:
    thinker = gateway.scripts["thinker"]
    thinker.hold, thinker.after = True, 2
    body = {"model": "scripted", "input": "hi", "stream": True}
    async with gateway.http.stream("POST", "/v1/responses", json=body) as response:
        async for line in response.aiter_lines():
            if "output_text.delta" in line:
                break
    await gateway.until(lambda: thinker.ended == ["cancelled"])


async def test_a_response_in_the_background_is_followed_left_and_got(gateway: Running) -> None:
    thinker, responses = gateway.scripts["thinker"], client(gateway).responses
    thinker.hold, thinker.after = True, 2
    seen = []
    async for event in await create(gateway, background=True, stream=True):
        seen.append(event)
        if event.type == "response.output_text.delta":
            break
    assert [event.type.removeprefix("response.") for event in seen[:2]] == ["created", "queued"]
    made = seen[0].response
    assert (await responses.retrieve(made.id)).status == "in_progress"
    with pytest.raises(openai.BadRequestError, match="has not finished"):
        await create(gateway, previous_response_id=made.id)
    thinker.go_on()
    rest = [e async for e in await responses.retrieve(made.id, stream=True, starting_after=seen[-1].sequence_number)]
    numbers = [event.sequence_number for event in (*seen, *rest)]
    assert numbers == list(range(len(numbers)))
    assert rest[-1].type == "response.completed"
    assert (await responses.retrieve(made.id)).output_text == TEXT
    assert gateway.app.state.responses.background.get(made.id).task.exception() is None
    again = [event async for event in await responses.retrieve(made.id, stream=True)]
    assert len(again) == len(numbers)
    await gateway.until(lambda: gateway.app.state.gateway.admission.in_flight == 0)


async def test_a_response_in_the_background_is_cancelled(gateway: Running) -> None:
    thinker, responses = gateway.scripts["thinker"], client(gateway).responses
    thinker.hold, thinker.after = True, 2
    made = await create(gateway, background=True)
    assert made.status == "queued"
    await thinker.holding.wait()
    cancelled = await responses.cancel(made.id)
    assert cancelled.status == "cancelled"
    assert gateway.app.state.responses.background.get(made.id).task.cancelled()
    await gateway.until(lambda: thinker.ended == ["cancelled"])
    assert (await responses.cancel(made.id)).status == "cancelled"
    assert gateway.app.state.gateway.admission.in_flight == 0
    thinker.go_on()
    other = await create(gateway)
    with pytest.raises(openai.BadRequestError, match="background"):
        await responses.cancel(other.id)
    thinker.hold = True
    failing = await create(gateway, background=True)
    thinker.error = StageLost("thinker", "gone")
    thinker.go_on()
    await gateway.until(lambda: gateway.app.state.gateway.admission.in_flight == 0)
    ended = await responses.retrieve(failing.id)
    assert ended.status in ("failed", "completed")
