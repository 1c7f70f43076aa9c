"""What vLLM's clients add to OpenAI's requests, over HTTP; the thinker follows a script."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from gateway.dialects.openai.answer import Form, StreamedAnswer
from gateway.pipeline.events import TextDelta
from quartet.v1 import thinker_pb2
from services.common.errors import InvalidInput
from tests.support.clients.responses import create
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
    assert "prompt_token_ids" not in plain
    assert "token_ids" not in plain["choices"][0]
    assert not last(gateway).wants_prompt_token_ids


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
    assert [set(each) for each in told["top_logprobs"]] == [{name, top} for name in names]
    assert told["text_offset"] == [0, len(PIECES[0]), len(PIECES[0] + PIECES[1])]


async def test_a_thought_is_left_out(gateway: Running) -> None:
    thinker, info = gateway.scripts["thinker"], gateway.app.state.gateway.pipeline.info("thinker")
    thinker.thought, thinker.logprobs = ["Let me", " see."], True
    told = ASK | {"include_reasoning": False, "logprobs": True, "return_token_ids": True}
    for reasons in (False, True):
        info.reasons = reasons
        (choice,) = (await posted(gateway, CHATS, told))["choices"]
        assert (choice["message"]["content"], "reasoning_content" in choice["message"]) == (TEXT, False)
        events = [event["choices"][0] for event in await gateway.events(told)]
        assert "".join(event["delta"].get("content", "") for event in events) == TEXT
        assert not [event for event in events if "reasoning_content" in event["delta"]]
        for each in (choice, *events):  # a thought could be read from its tokens
            assert not reasons or (each["logprobs"], each.get("token_ids")) == (None, None)
        streamed = [token_id for event in events for token_id in event.get("token_ids") or ()]
        assert streamed == (choice["token_ids"] or []) == ([] if reasons else [9, 9, 0, 1, 2])
    info.reasons = False
    assert (await posted(gateway, CHATS, ASK))["choices"][0]["message"]["reasoning_content"] == "Let me see."
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
    assert "prompt_logprobs" not in await posted(gateway, path, body(path))
    gateway.scripts["thinker"].error = InvalidInput("sampling.prompt_logprobs", "are not told")
    refused = await gateway.http.post(path, json=body(path, prompt_logprobs=0))
    assert refused.json()["error"]["param"] == "prompt_logprobs"


async def test_variables_of_the_template_are_those_of_chats(gateway: Running) -> None:
    asked = {"messages": [USER], "enable_thinking": False, "chat_template_kwargs": {"b": 3}}
    await posted(gateway, "/tokenize", asked)
    given = gateway.scripts["thinker"].requests[-1].chat_template_kwargs_json
    assert json.loads(given) == {"enable_thinking": False, "b": 3}


VALUES: dict[str, dict[str, Any]] = {
    "mm_processor_kwargs": {"mm_processor_kwargs": {"fps": 1}},
    "top_logprobs": {"logprobs": True, "top_logprobs": -1},
    "prompt_logprobs": {"prompt_logprobs": -1},
    "structured_outputs": {"structured_outputs": {"regex": "a", "whitespace_pattern": " "}},
    "whitespace_pattern": {"structured_outputs": {"regex": "a", "whitespace_pattern": " "}},
    "disable_any_whitespace": {"structured_outputs": {"regex": "a", "disable_any_whitespace": True}},
    "disable_additional_properties": {"structured_outputs": {"regex": "a", "disable_additional_properties": True}},
    "role": {"messages": [USER | {"role": "critic"}]},
    "uuid": {"messages": [USER | {"content": [{"type": "image_url", "image_url": {"url": "x"}, "uuid": "1"}]}]},
    "image_embeds": {"messages": [USER | {"content": [{"type": "image_embeds", "image_embeds": "x"}]}]},
}


async def test_all_of_the_table_of_refusals_is_refused(gateway: Running) -> None:
    page = (Path(__file__).parents[2] / "docs/api.md").read_text().partition("## Clients of vLLM")[2]
    rows = [line.split("|") for line in page.partition("\n## ")[0].splitlines() if line.startswith("| ")][1:]
    assert 1 <= len(rows) <= 10
    for name in re.findall("`([^`]+)`", "".join(members for _, members, *_ in rows)):
        if name.startswith("/"):
            assert (await gateway.http.post(name, json=ASK)).status_code == 404, name
            continue
        status, error = await gateway.refusal(ASK | VALUES.get(name, {name: {"a": 1}}))
        assert status == 400, name
        assert name in VALUES or error["code"] == "unknown_parameter", name
    assert (await gateway.chat(ASK | {"top_logprobs": 0, "session_id": "a", "stream_interval": 5})).status_code == 200


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
