"""What vLLM's clients add to OpenAI's requests, over HTTP; the thinker follows a script."""

import base64
import json
import re
from pathlib import Path
from typing import Any

import pytest

from gateway.answers import harmless, meter
from gateway.dialects.openai.answer import Form, StreamedAnswer
from gateway.pipeline.events import TextDelta
from quartet.v1 import thinker_pb2
from services.common.errors import InvalidInput, TooManyLogprobs
from tests.support.clients.responses import create
from tests.support.samples.media import mp4
from tests.support.scripted.thinker import PIECES
from tests.support.systems.gateway import Running

pytestmark = pytest.mark.asyncio(loop_scope="module")
TEXT = "".join(PIECES)
USER = {"role": "user", "content": "hi"}
BEGUN = {"role": "assistant", "content": [{"type": "text", "text": "Well, "}, {"type": "text", "text": "so"}]}
ASK: dict[str, Any] = {"model": "scripted", "messages": [USER]}
CONTINUED: dict[str, Any] = {"model": "scripted", "messages": [USER, BEGUN], "continue_final_message": True}
CHATS, RESPONSES, COMPLETIONS, GENERATE = (
    *("/v1/chat/completions", "/v1/responses", "/v1/completions"),
    "/inference/v1/generate",
)


@pytest.fixture
def gateway(speech_gateway: Running) -> Running:
    return speech_gateway


def body(path: str, **members: Any) -> dict[str, Any]:
    """A request for text with `members`."""
    needed = {
        CHATS: ASK,
        RESPONSES: {"model": "scripted", "input": "hi"},
        COMPLETIONS: {"model": "scripted", "prompt": "hi"},
        GENERATE: {"token_ids": [5]},
    }[path]
    return needed | ({"sampling_params": members} if path == GENERATE else members)


async def posted(gateway: Running, path: str, asked: dict[str, Any]) -> dict[str, Any]:
    response = await gateway.http.post(path, json=asked)
    assert response.status_code == 200, response.text
    return response.json()


def last(gateway: Running) -> thinker_pb2.GenerateStart:
    return gateway.scripts["thinker"].requests[-1]


SCHEMA = {"type": "object", "properties": {"b": {"type": "string"}, "a": {"type": "number"}}}
TAG = {"type": "structural_tag", "format": {"type": "const_string", "value": "yes"}}
CONSTRAINTS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"json": SCHEMA}, {"json_schema": json.dumps(SCHEMA)}),
    ({"json": json.dumps(SCHEMA)}, {"json_schema": json.dumps(SCHEMA)}),
    ({"json_object": True}, {"json_object": True}),
    ({"regex": "[a-z]+"}, {"regex": "[a-z]+"}),
    ({"grammar": 'root ::= "a"'}, {"grammar": 'root ::= "a"'}),
    ({"choice": ["yes", "no"]}, {"choice": thinker_pb2.TextChoice(texts=["yes", "no"])}),
    ({"structural_tag": TAG}, {"structural_tag": json.dumps(TAG)}),
    ({"structural_tag": json.dumps(TAG)}, {"structural_tag": json.dumps(TAG)}),
    # as vLLM's dataclass becomes a dictionary
    ({"regex": "a", "json": None, "disable_any_whitespace": False, "whitespace_pattern": None}, {"regex": "a"}),
]


@pytest.mark.parametrize("path", [CHATS, RESPONSES, COMPLETIONS, GENERATE])
async def test_a_structure_of_the_text(gateway: Running, path: str) -> None:
    for given, expected in CONSTRAINTS:
        await posted(gateway, path, body(path, structured_outputs=given))
        sampling = last(gateway).sampling
        kind = sampling.WhichOneof("structure")
        assert {kind: getattr(sampling, str(kind))} == expected, given


async def test_a_structural_tag_is_a_response_format(gateway: Running) -> None:
    older = {"type": "structural_tag", "structures": [{"begin": "<a>", "schema": {}, "end": "</a>"}], "triggers": ["<"]}
    for tag in (TAG, older):
        await posted(gateway, CHATS, ASK | {"response_format": tag})
        assert json.loads(last(gateway).sampling.structural_tag) == tag


FIELDS = {
    "json": ("sampling.json_schema", {}),
    "regex": ("sampling.regex", "a"),
    "choice": ("sampling.choice", ["a"]),
    "grammar": ("sampling.grammar", "a"),
    "json_object": ("sampling.json_object", True),
    "structural_tag": ("sampling.structural_tag", {}),
}


@pytest.mark.parametrize("path", [CHATS, RESPONSES, COMPLETIONS, GENERATE])
async def test_what_the_thinker_refuses_of_a_structure_is_named(gateway: Running, path: str) -> None:
    prefix = "sampling_params." if path == GENERATE else ""
    for kind, (field, value) in FIELDS.items():
        gateway.scripts["thinker"].error = InvalidInput(field, "no text fits it")
        response = await gateway.http.post(path, json=body(path, structured_outputs={kind: value}))
        error = response.json()["error"]
        named = f"{prefix}structured_outputs.{kind}"
        assert (response.status_code, error["param"]) == (400, named)
        assert error["message"] == f"{named}: no text fits it"
    gateway.scripts["thinker"].error = InvalidInput("sampling.structural_tag", "no")
    if path in (CHATS, COMPLETIONS):
        refused = await gateway.http.post(path, json=body(path, response_format=TAG))
        assert refused.json()["error"]["param"] == "response_format"


@pytest.mark.parametrize("path", [CHATS, RESPONSES, COMPLETIONS, GENERATE])
async def test_special_tokens_are_kept_in_the_text(gateway: Running, path: str) -> None:
    for given in ({}, {"skip_special_tokens": True}, {"skip_special_tokens": False}):
        given |= {"spaces_between_special_tokens": False} if given else {}
        await posted(gateway, path, body(path, **given))
        sampling = last(gateway).sampling
        names = ("skip_special_tokens", "spaces_between_special_tokens")
        assert {name: getattr(sampling, name) for name in names if sampling.HasField(name)} == given


@pytest.mark.parametrize("path", [CHATS, RESPONSES, COMPLETIONS, GENERATE])
async def test_what_may_be_written(gateway: Running, path: str) -> None:
    given = {"allowed_token_ids": [5, 7], "bad_words": ["sea"], "include_stop_str_in_output": True}
    given["thinking_token_budget"] = 7
    await posted(gateway, path, body(path, **given))
    sampling = last(gateway).sampling
    assert {name: getattr(sampling, name) for name in given} == given


async def test_chats_have_token_ids(gateway: Running) -> None:
    whole = await posted(gateway, CHATS, ASK | {"return_token_ids": True, "n": 2})
    assert whole["prompt_token_ids"] == list(map(ord, "hi"))
    assert [choice["token_ids"] for choice in whole["choices"]] == [[0, 1, 2]] * 2
    first, *events = await gateway.events(ASK | {"return_token_ids": True})
    assert first["prompt_token_ids"] == list(map(ord, "hi"))
    assert not [event for event in events if "prompt_token_ids" in event]
    assert [token_id for each in events for token_id in each["choices"][0].get("token_ids") or ()] == [0, 1, 2]
    plain = await posted(gateway, CHATS, ASK)
    assert (plain["prompt_token_ids"], plain["choices"][0]["token_ids"]) == (None, None)
    assert not last(gateway).wants_prompt_token_ids


@pytest.mark.parametrize("path", [CHATS, COMPLETIONS])
async def test_what_was_not_wanted_is_null_and_the_stop_string_is_named(gateway: Running, path: str) -> None:
    """A client of vLLM reads these members by their names, and an absent one is an error in OpenAI's client."""
    for stop in ("", "sea"):
        gateway.scripts["thinker"].stop = stop
        whole = await posted(gateway, path, body(path))
        (choice,) = whole["choices"]
        assert choice["stop_reason"] == (stop or None)
        streamed = await gateway.http.post(path, json=body(path, stream=True))
        *_, end, _ = [line for line in streamed.text.split("\n\n") if line]
        assert json.loads(end.removeprefix("data: "))["choices"][0]["stop_reason"] == (stop or None)
    told = whole | choice | choice.get("message", {})
    names = {"prompt_token_ids", "token_ids", "prompt_logprobs"} | ({"reasoning"} if path == CHATS else set())
    assert {name: told[name] for name in names} == dict.fromkeys(names)


@pytest.mark.parametrize("path", [CHATS, COMPLETIONS, RESPONSES])
async def test_no_model_is_the_one_that_answers(gateway: Running, path: str) -> None:
    for model in ({}, {"model": None}, {"model": ""}):
        asked = {name: value for name, value in body(path).items() if name != "model"} | model
        assert (await posted(gateway, path, asked))["model"] == "scripted"


async def test_one_call_at_most(gateway: Running) -> None:
    tools = [{"type": "function", "function": {"name": name}} for name in ("one", "two")]
    flat = [{"type": "function", "name": name} for name in ("one", "two")]
    for parallel, expected in ((None, ["one", "two"]), (True, ["one", "two"]), (False, ["one"])):
        given = {"parallel_tool_calls": parallel}
        called = [("one", '{"a": 1}'), ("two", "{}")]
        gateway.scripts["thinker"].calls = [called] * 3
        (choice,) = (await posted(gateway, CHATS, ASK | given | {"tools": tools}))["choices"]
        assert [call["function"]["name"] for call in choice["message"]["tool_calls"]] == expected
        assert choice["finish_reason"] == "tool_calls"
        deltas = [event["choices"][0]["delta"] for event in await gateway.events(ASK | given | {"tools": tools})]
        calls = [call for delta in deltas for call in delta.get("tool_calls", ())]
        assert [call["function"]["name"] for call in calls if "id" in call] == expected
        assert "".join(call["function"]["arguments"] for call in calls if not call["index"]) == '{"a": 1}'
        response = await posted(gateway, RESPONSES, body(RESPONSES, tools=flat, **given))
        assert [item["name"] for item in response["output"] if item["type"] == "function_call"] == expected


async def test_functions_of_a_namespace(gateway: Running) -> None:
    """The model reads them under one name, the client gets both: Codex has the tools of MCP servers in namespaces."""
    look = {"type": "function", "name": "look", "parameters": {"type": "object"}}
    tools = [{"type": "namespace", "name": "home", "tools": [look, {"type": "custom", "name": "x"}]}, look]
    gateway.scripts["thinker"].calls = [[("home__look", "{}"), ("look", "{}")], None]
    told = await posted(gateway, RESPONSES, body(RESPONSES, tools=tools, tool_choice={"type": "function", **look}))
    assert [tool.name for tool in last(gateway).tools] == ["home__look", "look"]
    assert last(gateway).tool_choice.name == "look"
    inner, outer = (item for item in told["output"] if item["type"] == "function_call")
    assert (inner["namespace"], inner["name"], outer["name"]) == ("home", "look", "look")
    assert ("namespace" in outer, told["tools"]) == (False, [tools[0], {"strict": True, "description": None, **look}])
    results = [{"type": "function_call_output", "call_id": call["call_id"], "output": "x"} for call in (inner, outer)]
    for before in ({"previous_response_id": told["id"], "input": results}, {"input": [inner, outer, *results]}):
        await posted(gateway, RESPONSES, body(RESPONSES) | before | {"tools": tools})
        calls = [call.name for message in last(gateway).messages for call in message.tool_calls]
        assert calls == ["home__look", "look"]
    await posted(gateway, RESPONSES, body(RESPONSES, tools=tools[:1], tool_choice={"type": "function", "name": "look"}))
    assert last(gateway).tool_choice.name == "home__look"
    long = [{"type": "namespace", "name": "n" * 40, "tools": [look | {"name": "f" * 40}]}]
    refused = await gateway.http.post(RESPONSES, json=body(RESPONSES, tools=long))
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "tools[0].tools[0].name")


async def test_a_token_without_text_has_a_chunk() -> None:
    answer, delta = StreamedAnswer(0, "", 0), TextDelta(thinker_pb2.GenerateDelta(token_ids=[5]))
    assert not list(answer.chunks(delta))
    answer.form = Form(token_ids=True)
    assert [chunk["choices"][0]["token_ids"] for chunk in answer.chunks(delta)] == [[5]]


async def test_tokens_are_told_as_ids(gateway: Running) -> None:
    gateway.scripts["thinker"].logprobs = True
    as_ids = {"return_tokens_as_token_ids": True}
    chat = ASK | as_ids | {"logprobs": True, "top_logprobs": 1}
    names, top = [f"token_id:{i}" for i in range(3)], "token_id:120"
    whole = (await posted(gateway, CHATS, chat))["choices"][0]["logprobs"]["content"]
    events = await gateway.events(chat)
    streamed = [token for each in events for token in (each["choices"][0]["logprobs"] or {}).get("content", ())]
    for told in (whole, streamed):
        assert [token["token"] for token in told] == names
        assert [bytes(token["bytes"]).decode() for token in told] == list(PIECES)
        assert {token["top_logprobs"][0]["token"] for token in told} == {top}
    completion = {"model": "scripted", "prompt": "ab", "logprobs": 1} | as_ids
    told = (await posted(gateway, COMPLETIONS, completion))["choices"][0]["logprobs"]
    assert told["tokens"] == names
    assert [list(each) for each in told["top_logprobs"]] == [[name, top] for name in names]  # its own is first
    assert told["text_offset"] == [0, len(PIECES[0]), len(PIECES[0] + PIECES[1])]


async def test_a_thought_is_left_out(gateway: Running) -> None:
    thinker, info = gateway.scripts["thinker"], gateway.app.state.gateway.pipeline.info("thinker")
    thinker.thought, thinker.logprobs = ["Let me", " see."], True
    told = ASK | {"include_reasoning": False, "logprobs": True, "return_token_ids": True}
    for reasons in (False, True):
        info.reasons = reasons
        (choice,) = (await posted(gateway, CHATS, told))["choices"]
        assert (choice["message"]["content"], choice["message"]["reasoning"]) == (TEXT, None)
        assert "reasoning_content" not in choice["message"]
        events = [event["choices"][0] for event in await gateway.events(told)]
        assert "".join(event["delta"].get("content", "") for event in events) == TEXT
        assert not [event for event in events if {"reasoning", "reasoning_content"} & event["delta"].keys()]
        for each in (choice, *events):  # a thought could be read from its tokens
            assert not reasons or (each["logprobs"], each.get("token_ids")) == (None, None)
        streamed = [token_id for event in events for token_id in event.get("token_ids") or ()]
        assert streamed == (choice["token_ids"] or []) == ([] if reasons else [9, 9, 0, 1, 2])
    info.reasons = False
    whole = (await posted(gateway, CHATS, ASK))["choices"][0]["message"]
    deltas = [event["choices"][0]["delta"] for event in await gateway.events(ASK)]
    for name in ("reasoning", "reasoning_content"):  # vLLM's name, and that of most others
        assert (whole[name], "".join(delta.get(name, "") for delta in deltas)) == ("Let me see.", "Let me see.")
    response = await create(gateway, "hi", extra_body={"include_reasoning": False})
    assert [item.type for item in response.output] == ["message"]
    assert [item.type for item in (await create(gateway, "hi")).output] == ["reasoning", "message"]


async def test_the_last_message_is_continued(gateway: Running) -> None:
    for given, continues, ends in (
        (CONTINUED, True, False),
        (CONTINUED | {"add_generation_prompt": False}, True, True),
        (ASK, False, False),
        (ASK | {"add_generation_prompt": True}, False, False),
        (ASK | {"add_generation_prompt": False}, False, True),
    ):
        await posted(gateway, CHATS, given)
        start = last(gateway)
        assert (start.continue_final_message, start.no_generation_prompt) == (continues, ends)
        tokenized = {name: value for name, value in given.items() if name != "model"}
        await posted(gateway, "/tokenize", tokenized)
        asked = gateway.scripts["thinker"].requests[-1]
        assert (asked.continue_final_message, asked.no_generation_prompt) == (continues, ends)


ECHOES: list[tuple[dict[str, Any], str, str]] = [
    (CONTINUED, "Well, so", "assistant"),
    (ASK | {"messages": [USER, BEGUN]}, "Well, so", "assistant"),
    (ASK, "", "assistant"),
    (ASK | {"add_generation_prompt": False}, "hi", "user"),
    (ASK | {"messages": [USER, {"role": "assistant", "content": None}]}, "", "assistant"),
]


@pytest.mark.parametrize(("asked", "echoed", "role"), ECHOES)
async def test_the_last_message_is_before_the_answer(
    gateway: Running, asked: dict[str, Any], echoed: str, role: str
) -> None:
    for echo in (True, False):
        (choice,) = (await posted(gateway, CHATS, asked | {"echo": echo}))["choices"]
        expected = (role, (echoed if echo else "") + TEXT)
        assert (choice["message"]["role"], choice["message"]["content"]) == expected
        deltas = [event["choices"][0]["delta"] for event in await gateway.events(asked | {"echo": echo})]
        assert (deltas[0]["role"], "".join(delta.get("content", "") for delta in deltas)) == expected


@pytest.mark.parametrize("path", [CHATS, COMPLETIONS])
async def test_a_long_prompt_is_cut(gateway: Running, path: str) -> None:
    sides = {None: 0, "left": thinker_pb2.TRUNCATION_SIDE_LEFT, "right": thinker_pb2.TRUNCATION_SIDE_RIGHT}
    for side, expected in sides.items():
        await posted(gateway, path, body(path, truncate_prompt_tokens=-1, truncation_side=side))
        start = last(gateway)
        assert (start.truncate_prompt_tokens, start.truncation_side) == (-1, expected)
    await posted(gateway, path, body(path))
    assert not last(gateway).HasField("truncate_prompt_tokens")


@pytest.mark.parametrize("path", [CHATS, COMPLETIONS])
async def test_log_probabilities_of_the_prompt(gateway: Running, path: str) -> None:
    whole = await posted(gateway, path, body(path, prompt_logprobs=1, n=2))
    own = {"logprob": -1.0, "rank": 2, "decoded_token": "i"}
    expected = [None, {"105": own, "120": {"logprob": -0.125, "rank": 1, "decoded_token": "x"}}]
    holders = [whole] if path == CHATS else whole["choices"]
    assert [each["prompt_logprobs"] for each in holders] == [expected] * len(holders)
    asked = [start.sampling.HasField("prompt_logprobs") for start in gateway.scripts["thinker"].requests]
    assert sorted(asked) == [False, True]
    plain = await posted(gateway, path, body(path))
    assert (plain if path == CHATS else plain["choices"][0])["prompt_logprobs"] is None
    gateway.scripts["thinker"].error = InvalidInput("sampling.prompt_logprobs", "are not told")
    refused = await gateway.http.post(path, json=body(path, prompt_logprobs=0))
    assert refused.json()["error"]["param"] == "prompt_logprobs"


MANY_LOGPROBS: list[tuple[str, dict[str, Any]]] = [
    (CHATS, {"prompt_logprobs": 20}),
    (CHATS, {"logprobs": True, "top_logprobs": 1, "n": 8}),
    (COMPLETIONS, {"prompt": ["one", "two", "three"], "prompt_logprobs": 4}),
    (COMPLETIONS, {"prompt": "twenty-one", "echo": True, "logprobs": 1, "stream": True}),
    (GENERATE, {"token_ids": [5] * 12, "sampling_params": {"prompt_logprobs": 1}}),
]


@pytest.mark.parametrize(("path", "members"), MANY_LOGPROBS)
async def test_log_probabilities_of_a_request_are_limited(
    gateway: Running, path: str, members: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each takes 500 bytes of the gateway, and 128 prompts may have millions."""
    gateway.scripts["thinker"].logprobs = True
    monkeypatch.setattr(meter, "MAX_LOGPROBS", 18)
    refused = await gateway.http.post(path, json=body(path) | members)
    if "stream" not in members:
        assert refused.status_code == 400
    *_, error = refused.text.removeprefix("data: ").split("\n\ndata: ")
    assert json.loads(error)["error"]["code"] == "too_many_logprobs"
    assert json.loads(error)["error"]["message"].startswith("more than 18 log-probabilities; ask for fewer")


@pytest.mark.parametrize("path", [CHATS, COMPLETIONS])
async def test_the_likeliest_answers_of_a_search(gateway: Running, path: str) -> None:
    gateway.scripts["thinker"].logprobs = True
    given = {"use_beam_search": True, "n": 2, "length_penalty": 0.5, "temperature": 0.7, "seed": 3}
    given |= {"logprobs": True, "top_logprobs": 1} if path == CHATS else {"logprobs": 1}
    whole = await posted(gateway, path, body(path, **given))
    (start,) = gateway.scripts["thinker"].requests
    assert start.beams == thinker_pb2.BeamSearch(width=2, length_penalty=0.5)
    choices = whole["choices"]
    texts = [each["message"]["content"] if path == CHATS else each["text"] for each in choices]
    assert texts == ["".join(PIECES), "".join(PIECES[:2])]
    assert [each["finish_reason"] for each in choices] == ["stop", "length"]
    assert [len(each["logprobs"]["content" if path == CHATS else "tokens"]) for each in choices] == [3, 2]
    assert {name: whole["usage"][name] for name in ("prompt_tokens", "completion_tokens")} == {
        "prompt_tokens": 10,
        "completion_tokens": 5,
    }


async def test_each_prompt_has_its_own_search(gateway: Running) -> None:
    asked = {"prompt": ["a", "b"], "use_beam_search": True, "n": 2, "return_token_ids": True}
    choices = (await posted(gateway, COMPLETIONS, asked))["choices"]
    assert [choice["index"] for choice in choices] == [0, 1, 2, 3]
    assert [choice["token_ids"] for choice in choices] == [[0, 1, 2], [0, 1]] * 2
    assert [choice["prompt_token_ids"] for choice in choices] == [[97], [97], [98], [98]]
    assert len(gateway.scripts["thinker"].requests) == 2


@pytest.mark.parametrize("path", [CHATS, COMPLETIONS, GENERATE])
async def test_log_probabilities_of_chosen_tokens(gateway: Running, path: str) -> None:
    name = "sampling_params.logprob_token_ids" if path == GENERATE else "logprob_token_ids"
    wanted = {"logprobs": True} if path == CHATS else {"logprobs": 0}
    await posted(gateway, path, body(path, logprob_token_ids=[5, 7], **wanted))
    assert list(last(gateway).sampling.logprob_token_ids) == [5, 7]
    many = {"logprob_token_ids": list(range(129))}
    for given in ({"logprob_token_ids": [5]}, {"logprob_token_ids": []} | wanted, many | wanted):
        refused = await gateway.http.post(path, json=body(path, **given))
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, name), refused.text


async def test_a_role_of_ones_own_goes_to_the_thinker(gateway: Running) -> None:
    for content in ("1+1?", [{"type": "text", "text": "1+1?"}]):
        await posted(gateway, CHATS, ASK | {"messages": [USER, {"role": "my-own-role", "content": content}]})
        told = last(gateway).messages[1]
        assert (told.role, [part.text for part in told.content]) == ("my-own-role", ["1+1?"])


async def test_minus_one_is_the_whole_vocabulary(gateway: Running) -> None:
    """The thinker knows how large that is, and refuses what is too much."""
    asked = {CHATS: {"logprobs": "true", "top_logprobs": -1}, COMPLETIONS: {"logprobs": -1}, GENERATE: {"logprobs": -1}}
    for path, members in asked.items():
        await posted(gateway, path, body(path, max_tokens=1, prompt_logprobs=-1, **members))
        sampling = last(gateway).sampling
        assert (sampling.top_logprobs, sampling.prompt_logprobs) == (-1, -1)
        gateway.scripts["thinker"].error = TooManyLogprobs("sampling.top_logprobs", "are too many")
        refused = (await gateway.http.post(path, json=body(path, max_tokens=1, **members))).json()["error"]
        name = {CHATS: "top_logprobs", COMPLETIONS: "logprobs", GENERATE: "sampling_params.logprobs"}[path]
        assert (refused["param"], refused["code"]) == (name, "too_many_logprobs")
        gateway.scripts["thinker"].error = None
        for bad in (-2, 21):
            kept = {name.split(".")[-1]: bad, "logprobs": True} if path == CHATS else {"logprobs": bad}
            refused = (await gateway.http.post(path, json=body(path, **kept))).json()["error"]
            assert refused["param"] == name
    echoed = body(COMPLETIONS, echo=True, logprobs=-1, prompt_logprobs=3)
    await posted(gateway, COMPLETIONS, echoed)
    assert last(gateway).sampling.prompt_logprobs == -1


BATCH = "/v1/chat/completions/batch"
TWO = {"messages": [[USER], [USER | {"content": "two"}, {"role": "assistant", "content": "So: "}]]}


async def test_several_conversations_have_a_choice_each(gateway: Running) -> None:
    gateway.scripts["thinker"].logprobs = True
    given = {
        "logprobs": True,
        "top_logprobs": 1,
        "return_token_ids": True,
        "continue_final_message": True,
        "echo": True,
    }
    whole = await posted(gateway, BATCH, TWO | given)
    texts = [choice["message"]["content"] for choice in whole["choices"]]
    assert texts == [prefix + "".join(PIECES) for prefix in ("hi", "So: ")]
    assert [choice["index"] for choice in whole["choices"]] == [0, 1]
    assert [choice["token_ids"] for choice in whole["choices"]] == [[0, 1, 2]] * 2
    assert (whole["usage"]["prompt_tokens"], whole["usage"]["completion_tokens"]) == (20, 6)
    starts = sorted(gateway.scripts["thinker"].requests, key=lambda start: len(start.messages))
    assert [[message.content[0].text for message in start.messages] for start in starts] == [["hi"], ["two", "So: "]]


async def test_what_a_batch_does_not_have_is_refused(gateway: Running) -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    bad = [
        ({"messages": [[USER]] * 129}, "messages"),
        ({"messages": [USER]}, "messages[0]"),
        ({"messages": [[USER], []]}, "messages[1]"),
        ({"messages": [[USER], [USER | {"content": [image]}]]}, "messages[1][0].content[0]"),
        ({"stream": True}, "stream"),
        ({"n": 2}, "n"),
        ({"use_beam_search": True}, "use_beam_search"),
        ({"prompt_logprobs": 0}, "prompt_logprobs"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        ({"modalities": ["text", "audio"]}, "modalities"),
    ]
    for given, name in bad:
        refused = await gateway.http.post(BATCH, json=TWO | given)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, name), refused.text
    assert not gateway.scripts["thinker"].requests
    gateway.scripts["thinker"].error = InvalidInput("messages", "are too long")
    refused = await gateway.http.post(BATCH, json=TWO)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "messages")


async def test_ids_of_a_prompt_that_was_read_elsewhere(gateway: Running) -> None:
    given = {"kv_transfer_params": {"prompt_token_ids": [104, 105, 33]}, "return_token_ids": True, "max_tokens": 5}
    whole = await posted(gateway, CHATS, ASK | given)
    start = last(gateway)
    assert list(start.prompt.token_ids.ids) == whole["prompt_token_ids"] == [104, 105, 33]
    assert not start.messages
    assert whole["choices"][0]["message"]["content"] == "".join(PIECES)
    first, *_ = await gateway.events(ASK | given)
    assert first["prompt_token_ids"] == [104, 105, 33]
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    tools = [{"type": "function", "function": {"name": "f"}}]
    for more in (
        {"tools": tools},
        {"messages": [USER | {"content": [image]}]},
        SPOKEN,
        {"continue_final_message": True},
    ):
        status, error = await gateway.refusal(ASK | given | more)
        assert (status, error["param"]) == (400, "kv_transfer_params.prompt_token_ids"), error
    for wrong in ({"prompt_token_ids": []}, {"prompt_token_ids": [-1]}, {"remote_engine_id": "a"}):
        status, error = await gateway.refusal(ASK | {"kv_transfer_params": wrong})
        assert status == 400
        assert error["param"].startswith("kv_transfer_params.")
    refused = await gateway.http.post(BATCH, json=TWO | {"kv_transfer_params": given["kv_transfer_params"]})
    assert refused.json()["error"]["param"] == "kv_transfer_params"


NO_BEAMS: dict[str, dict[str, Any]] = {
    "stream": {"stream": True},
    "stop": {"stop": "a"},
    "structured_outputs": {"structured_outputs": {"regex": "a"}},
    "response_format": {"response_format": {"type": "json_object"}},
    "logit_bias": {"logit_bias": {"1": 1.0}},
    "repetition_penalty": {"repetition_penalty": 1.1},
    "min_tokens": {"min_tokens": 1},
    "logprob_token_ids": {"logprob_token_ids": [5]},
    "prompt_logprobs": {"prompt_logprobs": 0},
    "n": {"n": 11},
}


@pytest.mark.parametrize("path", [CHATS, COMPLETIONS])
async def test_what_a_search_does_not_have_is_refused(gateway: Running, path: str) -> None:
    of_path: dict[str, dict[str, Any]] = {"echo": {"echo": True, "logprobs": 1}, "logprobs": {"logprobs": -1}}
    if path == CHATS:
        of_path = {"use_beam_search": SPOKEN, "tools": {"tools": [{"type": "function", "function": {"name": "f"}}]}}
        of_path["top_logprobs"] = {"logprobs": True, "top_logprobs": -1}
    for name, given in (NO_BEAMS | of_path).items():
        refused = await gateway.http.post(path, json=body(path, use_beam_search=True) | given)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, name), name
    alone = await gateway.http.post(path, json=body(path, length_penalty=2.0))
    assert alone.json()["error"]["param"] == "length_penalty"
    await posted(gateway, path, body(path, length_penalty=1.0))  # the default, which programs send
    assert not last(gateway).HasField("beams")


async def test_variables_of_the_template_are_those_of_chats(gateway: Running) -> None:
    asked = {"messages": [USER], "enable_thinking": False, "chat_template_kwargs": {"b": 3}}
    await posted(gateway, "/tokenize", asked)
    given = gateway.scripts["thinker"].requests[-1].chat_template_kwargs_json
    assert json.loads(given) == {"enable_thinking": False, "b": 3}


VALUES: dict[str, dict[str, Any]] = {
    "mm_processor_kwargs": {"mm_processor_kwargs": {"fps": 1}},
    "media_io_kwargs": {"media_io_kwargs": {"video": {"backend": "opencv"}}},
    "top_logprobs": {"logprobs": True, "top_logprobs": 21},
    "prompt_logprobs": {"prompt_logprobs": 21},
    "structured_outputs": {"structured_outputs": {"regex": "a", "whitespace_pattern": " "}},
    "whitespace_pattern": {"structured_outputs": {"regex": "a", "whitespace_pattern": " "}},
    "disable_any_whitespace": {"structured_outputs": {"regex": "a", "disable_any_whitespace": True}},
    "disable_additional_properties": {"structured_outputs": {"regex": "a", "disable_additional_properties": True}},
    "role": {"messages": [USER | {"role": "asistant"}]},
    **{name: {name: {"a": 1}} for name in harmless.OF_VLLM},
    "kv_transfer_params": {"kv_transfer_params": {"remote_engine_id": "a"}},
    "image_embeds": {"messages": [USER | {"content": [{"type": "image_embeds", "image_embeds": "x"}]}]},
}


async def test_all_of_the_table_of_refusals_is_refused(gateway: Running) -> None:
    page = (Path(__file__).parents[2] / "docs/api.md").read_text().partition("## Clients of vLLM")[2]
    rows = [line.split("|") for line in page.partition("\n## ")[0].splitlines() if line.startswith("| ")][1:]
    assert 1 <= len(rows) <= 10
    for name in re.findall("`([^`]+)`", "".join(members for _, members, *_ in rows)):
        if name.startswith("/"):
            # 405: another method of a path that has a place for a name, /v1/responses/{response_id}.
            assert (await gateway.http.post(name, json=ASK)).status_code in (404, 405), name
            continue
        status, error = await gateway.refusal(ASK | VALUES.get(name, {name: {"a": 1}}))
        assert status == 400, name
        assert name in VALUES or error["code"] == "unknown_parameter", name
    assert (await gateway.chat(ASK | {"top_logprobs": 0, "session_id": "a", "stream_interval": 5})).status_code == 200


VIDEO = {"type": "video_url", "video_url": {"url": f"data:;base64,{base64.b64encode(mp4(1.0)).decode()}"}}
FRAMES: list[tuple[dict[str, Any], dict[str, Any] | None]] = [
    ({"num_frames": 4}, {"count": 4}),
    ({"fps": 0.5, "num_frames": None}, {"per_s": 0.5}),
    ({"fps": 2, "num_frames": 8}, {"count": 8, "per_s": 2.0}),
    ({"num_frames": -1}, {}),
    ({"fps": -1, "num_frames": 2}, {"count": 2}),
    ({}, None),
]
BAD_FRAMES: list[tuple[dict[str, Any], str]] = [
    ({"video": {"num_frames": "invalid"}}, "video.num_frames"),
    ({"video": {"num_frames": 0}}, "video.num_frames"),
    ({"video": {"num_frames": 2**31}}, "video.num_frames"),
    ({"video": {"num_frames": 1.5}}, "video.num_frames"),
    ({"video": {"fps": 0}}, "video.fps"),
    ({"video": {"fps": -0.5}}, "video.fps"),
    ({"video": {"fps": 1e9}}, "video.fps"),
    ({"video": {"backend": "opencv"}}, "video.backend"),
    ({"video": {"num_frames": 4, "max_duration": 3}}, "video.max_duration"),
    ({"image": {"image_mode": "RGB"}}, "image"),
    ({"audio": {"sampling_rate": 8000}}, "audio"),
    ({"vidoe": {}}, "vidoe"),
]


@pytest.mark.parametrize("path", [CHATS, "/tokenize", f"{CHATS}/batch"])
async def test_which_frames_of_a_video_are_read(gateway: Running, path: str) -> None:
    message = USER | {"content": [VIDEO]}
    asked = {"messages": [[message]] if path.endswith("batch") else [message]}
    for video, expected in FRAMES:
        await posted(gateway, path, asked | {"media_io_kwargs": {"video": video, "image": {}, "audio": None}})
        start = last(gateway)
        assert start.HasField("video_frames") == (expected is not None), video
        assert start.video_frames == thinker_pb2.VideoFrames(**(expected or {})), video
    for given, member in BAD_FRAMES:
        response = await gateway.http.post(path, json=asked | {"media_io_kwargs": given})
        assert (response.status_code, response.json()["error"]["param"]) == (400, f"media_io_kwargs.{member}"), given
    for field, member in (("video_frames.count", "video.num_frames"), ("video_frames.per_s", "video.fps")):
        gateway.scripts["thinker"].error = InvalidInput(field, "is refused")
        response = await gateway.http.post(path, json=asked)
        assert response.json()["error"]["param"] == f"media_io_kwargs.{member}"


SPOKEN = {"modalities": ["text", "audio"]}
BAD: list[tuple[str, dict[str, Any], str, str]] = [
    (CHATS, {"structured_outputs": {"regex": "a"}, "response_format": TAG}, "response_format", "send one of the two"),
    (
        RESPONSES,
        {"structured_outputs": {"regex": "a"}, "text": {"format": TAG | {"type": "json_object"}}},
        "text.format",
        "send one of the two",
    ),
    (CHATS, {"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs", "one of json, regex"),
    (CHATS, {"structured_outputs": {}}, "structured_outputs", "one of json, regex"),
    (CHATS, {"structured_outputs": {"choice": []}}, "structured_outputs.choice", "at least 1"),
    (CHATS, {"structured_outputs": {"json_object": False}}, "structured_outputs.json_object", "True"),
    (
        CHATS,
        {"structured_outputs": {"regex": "a", "whitespace_pattern": "x"}},
        "structured_outputs.whitespace_pattern",
        "leave it out",
    ),
    (GENERATE, {"structured_outputs": {}}, "sampling_params.structured_outputs", "one of json, regex"),
    (GENERATE, {"detokenize": False, "stop": "a"}, "sampling_params.detokenize", "leave it out"),
    (
        CHATS,
        {"continue_final_message": True, "add_generation_prompt": True},
        "continue_final_message",
        "leave that out",
    ),
    (CHATS, SPOKEN | {"continue_final_message": True}, "continue_final_message", "leave it out, or the audio"),
    (CHATS, SPOKEN | {"add_generation_prompt": False}, "add_generation_prompt", "leave it out, or the audio"),
    (CHATS, SPOKEN | {"echo": True}, "echo", "leave it out, or the audio"),
    (CHATS, SPOKEN | {"truncate_prompt_tokens": 5}, "truncate_prompt_tokens", "leave it out, or the audio"),
    (CHATS, {"truncate_prompt_tokens": -2}, "truncate_prompt_tokens", "-1"),
    (CHATS, {"truncation_side": "middle"}, "truncation_side", "'left' or 'right'"),
    (CHATS, {"prompt_logprobs": 0, "stream": True}, "prompt_logprobs", "set stream to false"),
    (CHATS, {"prompt_logprobs": 21}, "prompt_logprobs", "20"),
    (COMPLETIONS, {"prompt_logprobs": 0, "stream": True}, "prompt_logprobs", "set stream to false"),
    (COMPLETIONS, {"echo": True, "truncate_prompt_tokens": 5}, "echo", "leave one of the two out"),
    (CHATS, {"include_reasoning": "no"}, "include_reasoning", "boolean"),
    (CHATS, {"allowed_token_ids": []}, "allowed_token_ids", "at least 1"),
    (CHATS, {"bad_words": ["x"] * 65}, "bad_words", "at most 64"),
]


@pytest.mark.parametrize(("path", "members", "param", "mend"), BAD)
async def test_contradictions_are_named(
    gateway: Running, path: str, members: dict[str, Any], param: str, mend: str
) -> None:
    response = await gateway.http.post(path, json=body(path, **members))
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, param), error
    assert error["message"].startswith(f"{param}: ")
    assert mend in error["message"]


async def test_the_end_of_a_tokenized_prompt_is_one(gateway: Running) -> None:
    asked = {"messages": [USER, BEGUN], "continue_final_message": True, "add_generation_prompt": True}
    error = (await gateway.http.post("/tokenize", json=asked)).json()["error"]
    assert (error["param"], error["code"]) == ("continue_final_message", "invalid_value")


@pytest.mark.parametrize(
    "members",
    [{"continue_final_message": True}, {"echo": True}, {"return_token_ids": True}, {"prompt_logprobs": 0}],
)
async def test_what_belongs_to_one_text_is_refused_where_there_are_several(
    painter: Running, picture_gateway: Running, members: dict[str, Any]
) -> None:
    (name,) = members
    tools = [{"type": "image_generation"}]
    for gateway, asked in ((painter, ASK | {"tools": tools}), (picture_gateway, ASK | {"model": "scripted-dit"})):
        status, error = await gateway.refusal(asked | members)
        assert (status, error["param"]) == (400, name), error
