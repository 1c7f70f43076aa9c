"""Answers by Anthropic's SDK: python anthropic_answers.py SERVER IMAGE [thoughts]. See README.md."""

import base64
import json
import sys
from pathlib import Path
from typing import Any

from anthropic import Anthropic, BadRequestError

server, image, *thoughts = sys.argv[1:]
client = Anthropic(base_url=server, api_key="none")
model = client.models.list().data[0].id
# a random model's text has no end of its own, and with another seed may end before it begins
ends: dict[str, Any] = {"stop_sequences": list("ABCDEFGHIJKLMNOP"), "extra_body": {"seed": 1}, "max_tokens": 512}
report: dict[str, Any] = {"calls": [], "texts": [], "thoughts": [], "counts": []}


def seen(path: str) -> dict[str, Any]:
    data = base64.b64encode(Path(path).read_bytes()).decode()
    return {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}}


def think() -> None:
    asked: dict[str, Any] = {"model": model, "max_tokens": 40, "thinking": {"type": "adaptive"}}
    asked["extra_body"] = {"temperature": 0}
    said: list[Any] = [{"role": "user", "content": thoughts[0]}]
    with client.messages.stream(**asked, messages=said) as stream:
        first = stream.get_final_message()
    blocks = [block.to_dict() for block in first.content]
    report["thoughts"].append(blocks)
    said += [{"role": "assistant", "content": first.content}, {"role": "user", "content": "And?"}]
    second = client.messages.create(**asked, messages=said)
    read = second.usage.input_tokens + (second.usage.cache_read_input_tokens or 0)
    counted = client.messages.count_tokens(model=model, messages=said, thinking={"type": "adaptive"})
    report["counts"].append([counted.input_tokens, read])


def call() -> None:
    schema = {"type": "object", "properties": {"on": {"type": "boolean"}}, "required": ["on"]}
    tools: list[Any] = [{"name": "lamp", "description": "Turns the lamp on or off.", "input_schema": schema}]
    said: list[Any] = [{"role": "user", "content": [{"type": "text", "text": "Light, please."}, seen(image)]}]
    asked: dict[str, Any] = {"model": model, "system": "Be brief.", "tools": tools, **ends}
    with client.messages.stream(**asked, messages=said, tool_choice={"type": "any"}) as stream:
        called = stream.get_final_message()
    assert called.stop_reason == "tool_use"
    uses = [block for block in called.content if block.type == "tool_use"]
    report["calls"] += [use.input for use in uses]
    done = [{"type": "text", "text": "done"}, seen(image)]
    results = [{"type": "tool_result", "tool_use_id": use.id, "content": done} for use in uses]
    said += [{"role": "assistant", "content": called.content}, {"role": "user", "content": results}]
    quiet: Any = {"type": "none"}
    answer = client.messages.create(**asked, messages=said, tool_choice=quiet)
    report["texts"].append("".join(block.text for block in answer.content if block.type == "text"))
    read = answer.usage.input_tokens + (answer.usage.cache_read_input_tokens or 0)
    counted = client.messages.count_tokens(
        model=model, system="Be brief.", tools=tools, messages=said, tool_choice=quiet
    )
    report["counts"].append([counted.input_tokens, read])
    with client.messages.stream(model=model, messages=[{"role": "user", "content": "The sea?"}], **ends) as stream:
        report["texts"].append("".join(stream.text_stream))
    try:
        client.messages.create(model=model, max_tokens=1, messages=[], extra_body={"modle": model})
    except BadRequestError as error:
        report["refused"] = [error.type, error.request_id, error.message]


think() if thoughts else call()
print(json.dumps(report))
