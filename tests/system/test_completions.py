"""Prompts that no chat template writes, before a real thinker: what is written is what a chat writes."""

import base64
import json
import re
from typing import Any, cast

import pytest

from tests.support.samples.media import png, wav
from tests.support.systems.stack import Stack

pytestmark = pytest.mark.e2e

SAID = [{"role": "user", "content": "What is the sea?"}]
GREEDY = {"temperature": 0, "max_tokens": 12}
PICTURE = f"data:image/png;base64,{base64.b64encode(png()).decode()}"


def asked(stack: Stack, path: str, **body: Any) -> dict[str, Any]:
    response = stack.http.post(path, json=body)
    assert response.status_code == 200, response.text
    return response.json()


def chat(stack: Stack, messages: list[dict[str, Any]]) -> str:
    answer = asked(stack, "/v1/chat/completions", model=stack.model, messages=messages, **GREEDY)
    return answer["choices"][0]["message"]["content"]


def test_the_ids_of_a_chats_prompt_are_gone_on_with_as_the_chat_is(stack: Stack) -> None:
    expected = chat(stack, SAID)
    told = asked(stack, "/tokenize", messages=SAID, return_token_strs=True)
    assert told["count"] == len(told["tokens"]) == len(told["token_strs"])
    text = asked(stack, "/detokenize", tokens=told["tokens"])["prompt"]
    assert "What is the sea?" in text
    for prompt in (told["tokens"], text):
        whole = asked(stack, "/v1/completions", model=stack.model, prompt=prompt, logprobs=2, **GREEDY)
        assert whole["choices"][0]["text"] == expected
        assert whole["usage"]["prompt_tokens"] == told["count"]
        assert len(whole["choices"][0]["logprobs"]["top_logprobs"]) == 12
    ids = asked(stack, "/inference/v1/generate", token_ids=told["tokens"], sampling_params=GREEDY | {"logprobs": 0})
    (choice,) = ids["choices"]
    assert len(choice["token_ids"]) == 12
    assert [entry["token_id"] for entry in choice["logprobs"]["content"]] == choice["token_ids"]
    assert asked(stack, "/detokenize", tokens=choice["token_ids"])["prompt"].startswith(expected)


def test_a_picture_is_beside_its_placeholder(stack: Stack) -> None:
    part = {"type": "image_url", "image_url": {"url": PICTURE}}
    expected = chat(stack, [{"role": "user", "content": [part, {"type": "text", "text": "What is it?"}]}])
    ends = (asked(stack, "/tokenize", messages=[{"role": "user", "content": text}]) for text in ("What is it?", "x"))
    words, _ = ((told["tokens"]) for told in ends)
    info = stack.http.get("/v1/models").json()["data"][0]["quartet"]
    assert "image" in info["input_modalities"]
    opened = asked(stack, "/tokenize", prompt="<|vision_start|><|image_pad|><|vision_end|>")["tokens"]
    role = asked(stack, "/tokenize", prompt="<|im_start|>user\n")["tokens"]
    assert words[: len(role)] == role
    prompt = [*role, *opened, *words[len(role) :]]
    sent = {"token_ids": prompt, "content_parts": [part], "sampling_params": GREEDY, "output_mode": "text"}
    assert asked(stack, "/inference/v1/generate", **sent)["choices"][0]["text"] == expected
    refused = stack.http.post("/inference/v1/generate", json=sent | {"content_parts": None})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "token_ids")


def test_a_rendered_chat_is_answered_as_the_chat(stack: Stack) -> None:
    sound = {"type": "audio_url", "audio_url": {"url": f"data:audio/wav;base64,{base64.b64encode(wav(0.7)).decode()}"}}
    picture = {"type": "image_url", "image_url": {"url": PICTURE}}
    seen = [{"role": "user", "content": [sound, {"type": "text", "text": "and"}, picture, picture]}]
    for messages in (SAID, seen):
        body = asked(stack, "/v1/chat/completions/render", messages=messages, **GREEDY)
        whole = asked(stack, "/inference/v1/generate", **body | {"output_mode": "text", "return_token_ids": True})
        assert whole["choices"][0]["text"] == chat(stack, messages)
        assert whole["prompt_token_ids"] == body["token_ids"]
        assert whole["mm_placeholders"] == (body["features"] and body["features"]["mm_placeholders"])
    counts = {kind: len(places) for kind, places in body["features"]["mm_placeholders"].items()}
    assert counts == {"audio": 1, "image": 2}
    (each,) = cast(list[dict[str, Any]], asked(stack, "/v1/completions/render", prompt="The sea", **GREEDY))
    assert each["token_ids"] == asked(stack, "/tokenize", prompt="The sea")["tokens"]
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    body = asked(stack, "/v1/chat/completions/render", messages=SAID, structured_outputs={"json": schema}, **GREEDY)
    structured = asked(stack, "/inference/v1/generate", **body | {"output_mode": "text"})
    assert isinstance(json.loads(structured["choices"][0]["text"])["n"], int)


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/completions", {"prompt": [2**31 - 1]}, "prompt"),
        ("/v1/completions", {"prompt": "sea " * 20_000}, "prompt"),
        ("/v1/completions", {"prompt": "sea", "echo": True, "logprobs": 1}, "echo"),
        ("/inference/v1/generate", {"token_ids": [2**31 - 1]}, "token_ids"),
        ("/detokenize", {"tokens": [2**31 - 1]}, "tokens"),
        (
            "/tokenize",
            {"messages": SAID, "chat_template_kwargs": {"chat_template": "x"}},
            "chat_template_kwargs.chat_template",
        ),
    ],
)
def test_what_the_thinker_refuses_is_named(stack: Stack, path: str, body: dict[str, Any], param: str) -> None:
    model = {"model": stack.model} if path == "/v1/completions" else {}
    refused = stack.http.post(path, json=body | model)
    assert refused.status_code == 400, refused.text
    assert refused.json()["error"]["param"] == param


def test_structure_is_followed(stack: Stack) -> None:
    schema = {"type": "object", "properties": {"on": {"type": "boolean"}}, "required": ["on"]}
    schema["additionalProperties"] = False
    wanted = {"type": "json_schema", "json_schema": {"name": "lamp", "schema": schema}}
    whole = asked(stack, "/v1/completions", model=stack.model, prompt="{}", response_format=wanted, max_tokens=32)
    assert isinstance(json.loads(whole["choices"][0]["text"])["on"], bool)


def test_the_tokens_of_a_chat_are_those_of_its_prompt_and_its_text(stack: Stack) -> None:
    ids = {"return_token_ids": True, "logprobs": True, "return_tokens_as_token_ids": True}
    whole = asked(stack, "/v1/chat/completions", model=stack.model, messages=SAID, **ids, **GREEDY)
    assert whole["prompt_token_ids"] == asked(stack, "/tokenize", messages=SAID)["tokens"]
    (choice,) = whole["choices"]
    assert asked(stack, "/detokenize", tokens=choice["token_ids"])["prompt"].startswith(choice["message"]["content"])
    assert [entry["token"] for entry in choice["logprobs"]["content"]] == [f"token_id:{i}" for i in choice["token_ids"]]


def test_an_answer_goes_on_with_its_beginning(stack: Stack) -> None:
    """As a completion of the same ids does, and as the answer did that it is the beginning of."""
    ids = {"return_token_ids": True}
    free = asked(stack, "/v1/chat/completions", model=stack.model, messages=SAID, **ids, **GREEDY)
    begun = [*SAID, {"role": "assistant", "content": "The sea"}]
    members = {"messages": begun, "continue_final_message": True}
    prompt = asked(stack, "/tokenize", **members)["tokens"]
    assert prompt == [*free["prompt_token_ids"], *asked(stack, "/tokenize", prompt="The sea")["tokens"]]
    whole = asked(stack, "/v1/chat/completions", model=stack.model, **members, **ids, **GREEDY, echo=True)
    expected = asked(stack, "/v1/completions", model=stack.model, prompt=prompt, **ids, **GREEDY)["choices"][0]
    assert whole["prompt_token_ids"] == expected["prompt_token_ids"] == prompt
    (choice,) = whole["choices"]
    assert choice["token_ids"] == expected["token_ids"]
    assert choice["message"]["content"] == f"The sea{expected['text']}"
    cut = asked(stack, "/v1/completions", model=stack.model, prompt=prompt, truncate_prompt_tokens=5, **ids, **GREEDY)
    assert cut["choices"][0]["prompt_token_ids"] in (prompt[:5], prompt[-5:])


TAG = {"type": "structural_tag", "format": {"type": "regex", "pattern": "<[0-9]{3}>"}}
STRUCTURES: list[tuple[dict[str, Any], str]] = [
    ({"structured_outputs": {"choice": ["Rome", 'Athens "!"']}}, r'Rome|Athens "!"'),
    ({"structured_outputs": {"regex": "[a-c]{4}"}}, "[a-c]{4}"),
    ({"structured_outputs": {"grammar": 'root ::= "x" [0-9] "y"'}}, "x[0-9]y"),
    ({"structured_outputs": {"grammar": 'start: "x" /[0-9]/ "y"'}}, "x[0-9]y"),
    ({"structured_outputs": {"json": {"type": "integer", "minimum": 10, "maximum": 19}}}, "1[0-9]"),
    ({"structured_outputs": {"structural_tag": TAG}}, "<[0-9]{3}>"),
    ({"response_format": TAG}, "<[0-9]{3}>"),
]


def test_a_text_has_the_structure_that_is_named(stack: Stack) -> None:
    for members, pattern in STRUCTURES:
        body = {"model": stack.model, "temperature": 0, "max_tokens": 24, **members}
        chat = asked(stack, "/v1/chat/completions", messages=SAID, **body)["choices"][0]
        assert re.fullmatch(pattern, chat["message"]["content"]), (members, chat)
        assert chat["finish_reason"] == "stop"
    text = asked(stack, "/v1/completions", prompt="x", **body)["choices"][0]["text"]
    assert re.fullmatch(pattern, text)
    for kind, bad in (("regex", "(("), ("grammar", "root ::= ("), ("grammar", 'root ::= "a" root'), ("json", "[")):
        body["structured_outputs"], body["response_format"] = {kind: bad}, None
        refused = stack.http.post("/v1/chat/completions", json=body | {"messages": SAID})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, f"structured_outputs.{kind}"), bad


def test_special_tokens_are_in_the_text_if_they_are_wanted(stack: Stack) -> None:
    (special,) = asked(stack, "/tokenize", prompt="<|im_start|>")["tokens"]
    body = {"model": stack.model, "messages": SAID, "max_tokens": 2, "logit_bias": {special: 100}, "temperature": 0}
    for skip, text in ((None, ""), (True, ""), (False, "<|im_start|>" * 2)):
        whole = asked(stack, "/v1/chat/completions", **body, skip_special_tokens=skip)
        assert whole["choices"][0]["message"]["content"] == text


def test_what_may_not_be_written_is_not(stack: Stack) -> None:
    free = asked(stack, "/v1/chat/completions", model=stack.model, messages=SAID, return_token_ids=True, **GREEDY)
    (choice,) = free["choices"]
    body = {"model": stack.model, "messages": SAID, "return_token_ids": True, **GREEDY}
    told = asked(stack, "/tokenize", prompt="".join(choice["message"]["content"]), return_token_strs=True)
    word = next(text for text in told["token_strs"] if text.strip())
    other = asked(stack, "/v1/chat/completions", **body, bad_words=[word])["choices"][0]
    assert word not in other["message"]["content"]
    only = asked(stack, "/v1/chat/completions", **body, allowed_token_ids=[264, 518])["choices"][0]
    assert {*only["token_ids"]} <= {264, 518}
    stop = choice["message"]["content"][3:5]
    whole = asked(stack, "/v1/chat/completions", **body, stop=stop, include_stop_str_in_output=True)["choices"][0]
    assert whole["message"]["content"].endswith(stop)
    for bad in (
        {"thinking_token_budget": 5},
        {"bad_words": [" "]},
        {"bad_words": ["sea " * 2000]},
        {"allowed_token_ids": [2**31 - 1]},
    ):
        refused = stack.http.post("/v1/chat/completions", json=body | bad)
        assert [refused.json()["error"]["param"]] == list(bad)
