"""`/v1/messages` over HTTP, with a thinker that follows a script."""

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client import REGISTRY

from gateway.access.api_keys import new_key
from gateway.dialects.anthropic.conversation import sealed
from gateway.http import connection
from services.common.errors import (
    ContextTooLong,
    DeadlineExceeded,
    InternalError,
    InvalidInput,
    InvalidMedia,
    QueueFull,
    StageError,
    Unavailable,
)
from tests.pure.test_api_keys import bearer, entry, write
from tests.support.scripted.thinker import PIECES
from tests.support.systems.gateway import Running, running

pytestmark = pytest.mark.asyncio(loop_scope="module")
TEXT = "".join(PIECES)
ASK: dict[str, Any] = {"model": "scripted", "max_tokens": 9, "messages": [{"role": "user", "content": "hi"}]}
TOOLS = [{"name": name, "input_schema": {"type": "object"}} for name in ("lamp", "bell")]
USAGE = {
    "input_tokens": 8,
    "cache_creation_input_tokens": 0,
    "cache_read_input_tokens": 2,
    "output_tokens": 3,
    "output_tokens_details": {"thinking_tokens": 0},
}


@pytest.fixture
def gateway(speech_gateway: Running) -> Running:
    return speech_gateway


async def ask(gateway: Running, changes: dict[str, Any], **options: Any) -> httpx.Response:
    return await gateway.http.post("/v1/messages", json=ASK | changes, **options)


async def events(gateway: Running, changes: dict[str, Any]) -> list[dict[str, Any]]:
    """The events of a stream, each of which is named by its type."""
    response = await ask(gateway, changes | {"stream": True})
    assert response.status_code == 200, response.text
    found = []
    for written in response.text.strip().split("\n\n"):
        name, data = written.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        found.append(event)
    return found


def pieces(told: list[dict[str, Any]]) -> list[Any]:
    """What the events between the first two and the last two say, in short. Pieces that follow each other are one: how
    many tokens wait together for the client is chance."""
    assert [event["type"] for event in told[:2]] == ["message_start", "ping"]
    assert [event["type"] for event in told[-2:]] == ["message_delta", "message_stop"]
    found = list[Any]()
    for event in told[2:-2]:
        match event:
            case {"type": "content_block_start", "index": index, "content_block": block}:
                found.append((index, block))
            case {"type": "content_block_delta", "index": index, "delta": {"type": kind, **rest}}:
                (piece,) = rest.values()
                before = found.pop()[2] if found[-1][:2] == (index, kind) else ""
                found.append((index, kind, before + piece))
            case {"type": "content_block_stop", "index": index}:
                found.append((index, "stop"))
    return found


def text_block(index: int) -> list[Any]:
    started = (index, {"type": "text", "text": ""})
    return [started, (index, "text_delta", TEXT), (index, "stop")]


def call_block(index: int, name: str, call_id: str, arguments: str) -> list[Any]:
    started = (index, {"type": "tool_use", "id": call_id, "name": name, "input": {}})
    told = [(index, "input_json_delta", arguments)] if arguments else []
    return [started, *told, (index, "stop")]


def thought_block(shown: str) -> list[Any]:
    started = (0, {"type": "thinking", "thinking": "", "signature": ""})
    told = [(0, "thinking_delta", shown)] if shown else []
    return [started, *told, (0, "signature_delta", sealed("hmm")), (0, "stop")]


CALLS = [[("lamp", '{"on": true}'), ("bell", "")]]
THOUGHT = {"thought": ("hm", "m")}
LAMP, BELL = (
    call_block(0, "lamp", "toolu_lamp", '{"on": true}'),
    call_block(1, "bell", "toolu_bell_1", ""),
)
ONE_CALL = {"tools": TOOLS, "tool_choice": {"type": "any", "disable_parallel_tool_use": True}}
# What the thinker does, what the request has, the events of its blocks, why the answer ended.
ANSWERS: dict[str, tuple[dict[str, Any], dict[str, Any], list[Any], tuple[str, str | None]]] = {
    "text": ({}, {}, text_block(0), ("end_turn", None)),
    "a thought": (
        THOUGHT,
        {"thinking": {"type": "adaptive"}},
        thought_block("hmm") + text_block(1),
        ("end_turn", None),
    ),
    "a thought with a budget": (
        THOUGHT,
        {"thinking": {"type": "enabled", "budget_tokens": 1024}},
        thought_block("hmm") + text_block(1),
        ("end_turn", None),
    ),
    "a thought in its signature": (
        THOUGHT,
        {"thinking": {"type": "adaptive", "display": "omitted"}},
        thought_block("") + text_block(1),
        ("end_turn", None),
    ),
    "a thought that nobody wants": (THOUGHT, {}, text_block(0), ("end_turn", None)),
    "a thought that is off": (THOUGHT, {"thinking": {"type": "disabled"}}, text_block(0), ("end_turn", None)),
    "calls": ({"calls": CALLS}, {"tools": TOOLS}, LAMP + BELL, ("tool_use", None)),
    "one call": ({"calls": CALLS}, ONE_CALL, LAMP, ("tool_use", None)),
    "a limit": ({"too_long": True}, {"max_tokens": 3}, text_block(0), ("max_tokens", None)),
    "a full context": ({"too_long": True}, {}, text_block(0), ("model_context_window_exceeded", None)),
    "a stop string": ({"stop": "!"}, {"stop_sequences": ["!"]}, text_block(0), ("stop_sequence", "!")),
}


@pytest.mark.parametrize("name", ANSWERS)
async def test_the_events_of_a_stream_and_the_whole_message(gateway: Running, name: str) -> None:
    script, changes, blocks, (reason, stop) = ANSWERS[name]

    def scripted() -> None:
        for member, value in script.items():
            setattr(gateway.scripts["thinker"], member, list(value) if isinstance(value, list) else value)

    scripted()
    told = await events(gateway, changes)
    assert pieces(told) == blocks
    usage = USAGE | {
        "output_tokens": 3 + len(script.get("thought", ())),
        "output_tokens_details": {"thinking_tokens": len(script.get("thought", ()))},
    }
    assert told[-2] == {
        "type": "message_delta",
        "delta": {"stop_reason": reason, "stop_sequence": stop},
        "usage": usage,
    }
    started = told[0]["message"]
    assert started["usage"] == USAGE | {"input_tokens": 10, "cache_read_input_tokens": 0, "output_tokens": 0}
    assert (started["stop_reason"], started["content"]) == (None, [])

    scripted()
    response = await ask(gateway, changes, headers={"x-request-id": "mine"})
    assert response.headers["request-id"] == "req_mine"
    message = response.json()
    content = message.pop("content")
    assert message == {
        "id": "msg_mine",
        "type": "message",
        "role": "assistant",
        "model": "scripted",
        "stop_reason": reason,
        "stop_sequence": stop,
        "usage": usage,
    }
    assert content == joined(blocks)


def joined(told: list[Any]) -> list[dict[str, Any]]:
    """The blocks that the deltas of a stream make."""
    content, written = list[dict[str, Any]](), ""
    for _, kind, *rest in told:
        if isinstance(kind, dict):
            content.append(dict(kind))
            written = ""
        elif kind == "input_json_delta":
            written += rest[0]
            content[-1]["input"] = json.loads(written) if written.endswith("}") else {}
        elif kind != "stop":
            content[-1][kind.removesuffix("_delta")] += rest[0]
    return content


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [('{"a": [1, {"b": "c', {"a": [1, {}]}), ("{", {}), ("[1]", {}), ("nonsense", {})],
)
async def test_arguments_that_were_cut_or_are_none(gateway: Running, arguments: str, expected: dict[str, Any]) -> None:
    gateway.scripts["thinker"].calls = [("lamp", arguments)]
    (block,) = (await ask(gateway, {"tools": TOOLS})).json()["content"]
    assert block["input"] == expected


async def test_a_count_is_the_thinkers(gateway: Running) -> None:
    body = {name: value for name, value in ASK.items() if name != "max_tokens"} | {"system": "x", "tools": TOOLS}
    response = await gateway.http.post("/v1/messages/count_tokens?beta=true", json=body)
    assert (response.status_code, response.json()) == (200, {"input_tokens": 10})
    assert response.headers["request-id"].startswith("req_")
    await ask(gateway, body)
    counted, answered = gateway.scripts["thinker"].requests
    assert (counted.count_only, answered.count_only) == (True, False)
    assert (counted.messages, counted.tools) == (answered.messages, answered.tools)


async def test_names_of_anthropics_models_and_headers_of_its_clients(gateway: Running) -> None:
    headers = {"anthropic-version": "2023-06-01", "anthropic-beta": "a-2026-01-01,b"}
    for model in ("claude-opus-4-8", "claude-haiku-4-5-20251001", ""):
        answer = await gateway.http.post("/v1/messages?beta=true", json=ASK | {"model": model}, headers=headers)
        assert answer.json()["model"] == "scripted"
    refused = await ask(gateway, {"model": "gpt-5"})
    assert (refused.status_code, refused.json()["error"]["type"]) == (404, "not_found_error")
    assert (await gateway.chat(ASK | {"model": "claude-opus-4-8"})).status_code == 404


async def test_members_without_effect_are_in_a_header_and_counted(gateway: Running) -> None:
    def counted() -> float:
        labels = {"path": "/v1/messages", "member": "metadata"}
        return REGISTRY.get_sample_value("quartet_gateway_ignored_members_total", labels) or 0.0

    before = counted()
    changes = {"metadata": {"user_id": "u"}, "tools": [*TOOLS, {"type": "web_search_20250305", "name": "web_search"}]}
    for stream in (False, True):
        assert (await ask(gateway, changes | {"stream": stream})).headers["x-quartet-ignored"] == "metadata, tools"
    assert counted() == before + 2
    assert "x-quartet-ignored" not in (await ask(gateway, {})).headers


Refused = tuple[StageError | dict[str, Any], int, str, str]
REFUSALS: dict[str, Refused] = {
    "a bad request": ({"temprature": 1}, 400, "invalid_request_error", "temprature: unknown parameter"),
    "a full queue": (QueueFull("8 requests run", retry_after_s=3), 429, "rate_limit_error", "thinker: 8 requests run"),
    "a loading stage": (Unavailable("is loading"), 529, "overloaded_error", "the thinker cannot answer now"),
    "a fault": (InternalError("secret"), 500, "api_error", "thinker: internal error; the stage's log has"),
    "too slow": (
        DeadlineExceeded("took too long"),
        504,
        "timeout_error",
        "the thinker took longer than the request's time",
    ),
    "too long": (
        ContextTooLong("messages", "the prompt has 40000 tokens; the limit is 32768 with the answer included"),
        400,
        "invalid_request_error",
        "prompt is too long: 40000 tokens > 32768 maximum",
    ),
    "bad media": (
        InvalidMedia("messages[0].content[0]", "cannot be decoded"),
        400,
        "invalid_request_error",
        "messages[0].content[0].text: cannot be decoded",
    ),
    "a bad schema": (
        InvalidInput("tools[0].parameters_json", "is no schema"),
        400,
        "invalid_request_error",
        "tools[1].input_schema: is no schema",
    ),
}


@pytest.mark.parametrize("name", REFUSALS)
async def test_errors_have_anthropics_form(gateway: Running, name: str) -> None:
    cause, status, kind, message = REFUSALS[name]
    changes: dict[str, Any] = {"tools": [{"type": "bash_20250124", "name": "bash"}, *TOOLS]}
    if isinstance(cause, dict):
        changes |= cause
    else:
        gateway.scripts["thinker"].error = cause
    for stream in (False, True):
        response = await ask(gateway, changes | {"stream": stream}, headers={"x-request-id": f"r{stream:d}"})
        assert response.status_code == status
        body = response.json()
        assert body["error"].pop("message").startswith(message)
        assert body == {"type": "error", "error": {"type": kind}, "request_id": f"req_r{stream:d}"}
        assert response.headers["request-id"] == body["request_id"]
        assert ("retry-after" in response.headers) == (status in (429, 529))


async def test_a_late_failure_is_an_event(gateway: Running) -> None:
    gateway.scripts["thinker"].error, gateway.scripts["thinker"].after = QueueFull("full"), 2
    *_, last = await events(gateway, {})
    assert last["type"] == "error"
    assert last["error"] == {"type": "rate_limit_error", "message": "thinker: full"}
    assert last["request_id"].startswith("req_")


async def test_what_no_endpoint_answers_has_the_form_too(gateway: Running) -> None:
    for method, path, status, kind in (
        ("GET", "/v1/messages/batches", 404, "not_found_error"),
        ("GET", "/v1/messages", 405, "invalid_request_error"),
    ):
        response = await gateway.http.request(method, path)
        assert (response.status_code, response.json()["error"]["type"]) == (status, kind)
    zipped = await gateway.http.post("/v1/messages", content=b"x", headers={"content-encoding": "gzip"})
    assert (zipped.status_code, zipped.json()["type"]) == (415, "error")
    others = await gateway.http.get("/v1/messagesx")
    assert others.json()["error"]["code"] == "not_found"


async def test_either_header_has_the_key(tmp_path: Path) -> None:
    key = new_key()
    async with running(api_keys_file=write(tmp_path / "keys.yaml", entry("alice", key))) as gateway:
        for headers in (bearer(key), {"x-api-key": key}):
            assert (await ask(gateway, {}, headers=headers)).status_code == 200
            assert (await gateway.http.get("/v1/models", headers=headers)).status_code == 200
        for headers in ({}, {"x-api-key": key[:-1]}, bearer("x")):
            refused = await ask(gateway, {}, headers=headers)
            assert (refused.status_code, refused.json()["error"]["type"]) == (401, "authentication_error")
            assert "`x-api-key: KEY`" in refused.json()["error"]["message"]
            assert refused.headers["request-id"] == refused.json()["request_id"]


async def test_a_client_that_leaves_ends_the_work(gateway: Running) -> None:
    thinker = gateway.scripts["thinker"]
    thinker.hold, thinker.after = True, 2
    async with gateway.http.stream("POST", "/v1/messages", json=ASK | {"stream": True}) as response:
        async for line in response.aiter_lines():
            if "text_delta" in line:
                break
    await gateway.until(lambda: thinker.ended == ["cancelled"])
    thinker.holding.clear()
    asking = asyncio.create_task(ask(gateway, {}))
    await thinker.holding.wait()
    asking.cancel()
    await gateway.until(lambda: thinker.ended == ["cancelled", "cancelled"])


async def test_a_silent_stream_pings(gateway: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "SILENCE_S", 0.02)
    thinker = gateway.scripts["thinker"]
    thinker.hold, thinker.after = True, 2
    stream = gateway.http.stream("POST", "/v1/messages", json=ASK | {"stream": True})
    async with asyncio.timeout(60), stream as response:
        lines = []
        async for line in response.aiter_lines():
            lines.append(line)
            if lines.count("event: ping") == 4:
                thinker.go_on()
    assert lines.count("event: ping") >= 4
    assert "event: message_stop" in lines
