"""Prompts that no chat template writes, before a real thinker: what is written is what a chat writes."""

import base64
import json
from typing import Any

import pytest

from tests.support.samples.media import png
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


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/completions", {"prompt": [2**31 - 1]}, "prompt"),
        ("/v1/completions", {"prompt": "sea " * 20_000}, "prompt"),
        ("/v1/completions", {"prompt": "sea", "echo": True, "logprobs": 1}, "echo"),
        ("/inference/v1/generate", {"token_ids": [2**31 - 1]}, "token_ids"),
        ("/detokenize", {"tokens": [2**31 - 1]}, "tokens"),
        ("/tokenize", {"messages": SAID, "chat_template_kwargs": {"chat_template": "x"}}, None),
    ],
)
def test_what_the_thinker_refuses_is_named(stack: Stack, path: str, body: dict[str, Any], param: str | None) -> None:
    model = {"model": stack.model} if path == "/v1/completions" else {}
    refused = stack.http.post(path, json=body | model)
    assert refused.status_code == 400, refused.text
    assert refused.json()["error"]["param"] == (param or "quartet.thinker.chat_template_kwargs")


def test_structure_is_followed(stack: Stack) -> None:
    schema = {"type": "object", "properties": {"on": {"type": "boolean"}}, "required": ["on"]}
    schema["additionalProperties"] = False
    wanted = {"type": "json_schema", "json_schema": {"name": "lamp", "schema": schema}}
    whole = asked(stack, "/v1/completions", model=stack.model, prompt="{}", response_format=wanted, max_tokens=32)
    assert isinstance(json.loads(whole["choices"][0]["text"])["on"], bool)
