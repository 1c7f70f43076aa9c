"""What clients send back, or send by habit: it is taken, and what has no effect is named. A typo stays a 400."""

import base64
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gateway.answers import harmless
from tests.support.clients.responses import create
from tests.support.clients.schemas import sample
from tests.support.samples.media import png
from tests.support.systems.gateway import Running

pytestmark = pytest.mark.asyncio(loop_scope="module")
ASK = {"model": "scripted", "messages": [{"role": "user", "content": "hi"}]}
USER = {"role": "user", "content": "Light, please."}
FUNCTION = {"name": "lamp", "arguments": '{"on":true}'}
CALL = {"id": "c1", "type": "function", "function": FUNCTION}
CALLS = {"role": "assistant", "content": None, "tool_calls": [CALL]}
RESULT = {"role": "tool", "tool_call_id": "c1", "content": "done"}
LAMP = {"type": "function", "function": {"name": "lamp", "parameters": {"type": "object"}}}
# A client's one form of a message, with null for what it does not have.
WHOLE = dict.fromkeys((*harmless.OF_OTHER_MESSAGES, "name"))
CACHED = {"cache_control": {"type": "ephemeral"}}


@pytest.fixture
def gateway(speech_gateway: Running) -> Running:
    return speech_gateway


URL = "data:image/png;base64," + base64.b64encode(png()).decode()
NAMED = {"type": "image_url", "image_url": {"url": URL, "uuid": "1"}, "uuid": "1"}


def part(**members: Any) -> dict[str, Any]:
    return {"type": "text", "text": "x", **members}


TURNS: dict[str, list[dict[str, Any]]] = {
    "a stream's deltas, put together": [USER, CALLS | {"tool_calls": [{"index": 0, **CALL}]}, RESULT],
    "a result with a name": [USER, CALLS, RESULT | {"name": "lamp"}],
    "openai's parsed call": [
        USER,
        CALLS | {"tool_calls": [CALL | {"function": FUNCTION | {"parsed_arguments": {"on": True}}}], "parsed": None},
        RESULT,
    ],
    "another server's call": [USER, CALLS | {"tool_calls": [CALL | {"extra_content": {"google": {}}}]}, RESULT],
    "a call without its type": [USER, CALLS | {"tool_calls": [{"id": "c1", "function": FUNCTION}]}, RESULT],
    "a call with null for its type": [USER, CALLS | {"tool_calls": [CALL | {"type": None}]}, RESULT],
    "PHP's empty arguments": [USER, CALLS | {"tool_calls": [CALL | {"function": FUNCTION | {"arguments": "[]"}}]}],
    "a call that was cut off": [USER, CALLS | {"tool_calls": [CALL | {"function": FUNCTION | {"arguments": '{"o'}}]}],
    "a call cut off after its name": [USER, CALLS | {"tool_calls": [CALL | {"function": {"name": "lamp"}}]}],
    "an interrupted answer, null": [USER, {"role": "assistant", "content": None}, USER],
    "an interrupted answer, empty": [USER, {"role": "assistant", "content": []}, USER],
    "an interrupted answer, absent": [USER, {"role": "assistant"}, USER],
    "an interrupted answer without calls": [USER, {"role": "assistant", "content": "", "tool_calls": []}, USER],
    "a tool that returns nothing": [USER, CALLS, RESULT | {"content": []}],
    "a tool that returns null": [USER, CALLS, RESULT | {"content": None}],
    "no instructions": [{"role": "system", "content": None}, USER],
    "one form for all": [WHOLE | each for each in ({"role": "system", "content": "x"}, USER, CALLS, RESULT)],
    "empty members of a user": [USER | {"tool_calls": [], "refusal": None}],
    "an answer's parts": [USER, {"role": "assistant", "content": [part(annotations=[], index=0, id="x")]}, USER],
    "Anthropic's cache": [
        {"role": "system", "content": [part(**CACHED)], **CACHED},
        {"role": "user", "content": [part(**CACHED), part(annotations={"audience": ["user"]})]},
        CALLS | {"content": [part(**CACHED)]},
        RESULT | CACHED,
    ],
}


@pytest.mark.parametrize("what", TURNS)
async def test_what_was_sent_comes_back_with_more(gateway, what):
    messages = TURNS[what]
    response = await gateway.chat(ASK | {"messages": messages, "tools": [LAMP]})
    assert response.status_code == 200, response.text
    (start,) = gateway.scripts["thinker"].requests
    assert [each.role for each in start.messages] == [each["role"] for each in messages]
    for read, sent in zip(start.messages, messages, strict=True):
        texts = [each["text"] for each in sent.get("content") or () if isinstance(each, dict)]
        assert [each.text for each in read.content if each.text] == texts or read.content[0].text == sent["content"]
        arguments = [call["function"].get("arguments", "") for call in sent.get("tool_calls") or ()]
        assert [call.arguments_json for call in read.tool_calls] == arguments
        assert (read.tool_call_id, read.name) == (sent.get("tool_call_id") or "", sent.get("name") or "")


async def test_an_answer_of_openais_own_stream_comes_back(gateway):
    gateway.scripts["thinker"].tool_call = True
    async with gateway.openai.chat.completions.stream(**ASK, tools=[LAMP]) as stream:
        message = (await stream.get_final_completion()).choices[0].message
    assert message.tool_calls
    messages = [USER, message, RESULT | {"tool_call_id": message.tool_calls[0].id}]
    await gateway.openai.chat.completions.create(model="scripted", messages=messages, tools=[LAMP])
    assert [call.name for call in gateway.scripts["thinker"].requests[-1].messages[1].tool_calls] == ["lamp"]


ITEM = {"type": "function_call", "call_id": "c1", "name": "lamp", "arguments": "{}"}
OUTPUT = {"type": "function_call_output", "call_id": "c1", "output": "done"}
ITEMS: dict[str, list[dict[str, Any]]] = {
    "a call that was cut off": [USER, ITEM | {"arguments": '{"o'}, OUTPUT],
    "a call cut off after its name": [USER, ITEM | {"arguments": None}, OUTPUT],
    "an interrupted answer, null": [USER, {"role": "assistant", "content": None}, USER],
    "an interrupted answer, empty": [USER, {"role": "assistant", "content": []}, USER],
    "a tool that returns nothing": [USER, ITEM, OUTPUT | {"output": []}],
    "a tool that returns null": [USER, ITEM, OUTPUT | {"output": None}],
    "no instructions": [{"role": "system", "content": None}, USER],
}


@pytest.mark.parametrize("what", ITEMS)
async def test_items_come_back_with_less(gateway, what):
    assert (await create(gateway, ITEMS[what])).status == "completed"


NOT_THEIRS = [
    ({"role": "user", "content": "x", "tool_calls": [CALL]}, "messages[0].tool_calls", "invalid_value"),
    ({"role": "user", "content": None}, "messages[0].content", "missing_required_parameter"),
    ({"role": "user", "content": []}, "messages[0].content", "invalid_value"),
    ({"role": "user", "content": "x", "nmae": "ann"}, "messages[0].nmae", "unknown_parameter"),
    ({"role": "tool", "tool_call_id": "c1", "contnet": "x"}, "messages[0].contnet", "unknown_parameter"),
]


@pytest.mark.parametrize(("message", "param", "code"), NOT_THEIRS)
async def test_what_changes_the_answer_is_refused(gateway, message, param, code):
    status, error = await gateway.refusal(ASK | {"messages": [message]})
    assert (status, error["param"], error["code"]) == (400, param, code)


HABITS: list[tuple[str, dict[str, Any], str]] = [
    ("/v1/chat/completions", ASK | {"user": "u", "usage": {"include": True}}, "usage, user"),
    ("/v1/chat/completions", ASK | {"messages": TURNS["Anthropic's cache"]}, "annotations, cache_control"),
    ("/v1/chat/completions", ASK | {"tools": [LAMP | CACHED]}, "cache_control"),
    ("/v1/chat/completions", ASK | {"user": None, "store": None}, ""),
    ("/v1/chat/completions", ASK | {"stream": True, "store": False}, "store"),
    ("/v1/chat/completions", ASK | {"min_new_tokens": None, "kwargs": {}}, ""),
    ("/v1/chat/completions", ASK | {"kv_transfer_params": None, "cache_salt": ""}, ""),
    ("/v1/chat/completions", ASK | {"messages": [USER | {"content": [NAMED, part()]}]}, "uuid"),
    ("/invocations", ASK | {"user": "u"}, "user"),
    ("/invocations", {"prompt": "x", "prompt_embeds": [], "user": "u"}, "user"),
    ("/v1/responses", {"model": "scripted", "input": "x", "client_metadata": {}}, "client_metadata"),
    ("/v1/audio/speech", {"input": "x", "backend": "kokoro", "lang_code": "a"}, "backend, lang_code"),
    ("/v1/audio/speech", {"input": "x", "volume_multiplier": 1.0}, ""),
    ("/tokenize", {"messages": [USER | CACHED]}, "cache_control"),
]


@pytest.mark.parametrize(("path", "body", "named"), HABITS)
async def test_what_has_no_effect_is_named(gateway, path, body, named):
    response = await gateway.http.post(path, json=body)
    assert response.status_code == 200, response.text
    assert response.headers.get("x-quartet-ignored", "") == named
    metrics = (await gateway.http.get("/metrics")).text
    for member in filter(None, named.split(", ")):
        assert f'quartet_gateway_ignored_members_total{{member="{member}",path="{path}"}}' in metrics


async def test_what_only_lmdeploys_servers_do_is_refused(gateway):
    status, error = await gateway.refusal(ASK | {"min_new_tokens": 5})
    assert (status, error["param"]) == (400, "min_new_tokens")


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses"])
async def test_variables_of_the_template_are_taken_from_all_spellings(gateway, path):
    own = {"quartet": {"thinker": {"chat_template_kwargs": {"a": 1}}}}
    ask = {"input": "x", "model": "scripted"} if path.endswith("responses") else ASK
    given = {"enable_thinking": False, "chat_template_kwargs": {"a": 2, "b": 3}}
    assert (await gateway.http.post(path, json=ask | given | own)).status_code == 200
    (start,) = gateway.scripts["thinker"].requests
    assert json.loads(start.chat_template_kwargs_json) == {"enable_thinking": False, "a": 1, "b": 3}
    refused = await gateway.http.post(path, json=ask | {"chat_template_kwargs": {"chat_template": "{{ x }}"}})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "chat_template_kwargs.chat_template")


async def test_no_tools_to_choose_and_no_limit(gateway):
    for members in ({"tools": [], "tool_choice": "auto"}, {"tool_choice": "none"}, {"max_tokens": -1}):
        assert (await gateway.chat(ASK | members)).status_code == 200
        assert not gateway.scripts["thinker"].requests[-1].sampling.HasField("max_tokens")


def typos(schema: dict[str, Any], lenient: set[str], place: str = "") -> Iterator[tuple[Any, str]]:
    """(a value with one misspelt member, its path), for each member of `schema`. `lenient` gets the objects that take
    unknown members."""
    for choice in (*schema.get("anyOf", ()), *schema.get("oneOf", ())):
        yield from typos(choice, lenient, place)
    if schema.get("type") == "array":
        yield from (([value], f"[0]{path}") for value, path in typos(schema["items"], lenient, f"{place}[]"))
    if "properties" not in schema:
        return
    if schema.get("additionalProperties") is not False:
        lenient.add(place)
        return
    whole = sample(schema)
    for name, inner in schema["properties"].items():
        typo = f"{name[0]}{name}"
        yield {**whole, typo: "x"}, f".{typo}"
        for value, path in typos(inner, lenient, f"{place}.{name}"):
            yield {**whole, name: value}, f".{name}{path}"


def field(member: tuple[str, Any]) -> tuple[str, Any]:
    """Of a form: a text, or a file."""
    name, value = member
    first = value[0] if isinstance(value, list) else value
    return name, ("a.bin", first) if isinstance(first, bytes) else (None, str(first))


@pytest.mark.parametrize("with_messages", [True, False])
async def test_a_typo_in_any_member_of_any_endpoint_is_refused(gateway, with_messages):
    lenient: dict[str, set[str]] = {}
    ids = {"conversation_id": (await gateway.openai.conversations.create()).id, "video_id": "video_x"}
    for path, methods in gateway.app.openapi()["paths"].items():
        content = methods.get("post", {}).get("requestBody", {}).get("content", {})
        if path in REFUSED_BEFORE_THEY_ARE_READ or (path in WITH_MESSAGES) != with_messages:
            continue
        for media_type, body in content.items():
            is_form = media_type == "multipart/form-data"
            for value, place in typos(body["schema"], lenient.setdefault(path, set())):
                if is_form and place.count(".") > 1:  # its objects are texts
                    continue
                sent = {"files": [*map(field, value.items())]} if is_form else {"json": value}
                response = await gateway.http.post(path.format(**ids), **sent)
                error, member = response.json()["error"], place.removeprefix(".")
                found = response.status_code, error["message"], error.get("code"), error.get("param")
                own_form = [None, None] if path.startswith("/v1/messages") else ["unknown_parameter", member]
                assert found == (400, f"{member}: unknown parameter", *own_form), (path, value, error)
    expected = {path: places for path, places in LENIENT.items() if (path in WITH_MESSAGES) == with_messages}
    assert {path: places for path, places in lenient.items() if places} == expected


WITH_MESSAGES = (
    "/v1/chat/completions",
    "/v1/chat/completions/batch",
    "/v1/chat/completions/render",
    "/tokenize",
    "/v1/messages",
    "/v1/messages/count_tokens",
)
REFUSED_BEFORE_THEY_ARE_READ = (
    "/v1/load_lora_adapter",
    "/v1/unload_lora_adapter",
    "/start_profile",
    "/v1/audio/voices",
)
ANSWERS = {".messages[]"}  # the assistant's
OTHERS = {".messages[].content[]", ".tools[]"}  # blocks and tools of Anthropic's servers
LENIENT = {
    "/v1/messages": OTHERS,
    "/v1/messages/count_tokens": OTHERS,
    "/v1/chat/completions": ANSWERS | {".tools[]"},
    "/v1/chat/completions/batch": {".messages[][]", ".tools[]"},
    "/v1/chat/completions/render": ANSWERS | {".tools[]"},
    "/tokenize": ANSWERS,
    "/v1/responses": {".text", ".reasoning", ".stream_options", ".conversation"},
    "/v1/responses/input_tokens": {".text", ".reasoning", ".stream_options", ".conversation"},
}


async def test_the_table_of_the_documents():
    text = (Path(__file__).parents[2] / "docs" / "api.md").read_text()
    section = text.split("## Members without effect")[1].split("\n#")[0]
    rows = dict(re.findall(r"^\| (.*?) \| (.*?) \|$", section, re.M))
    named = {where: sorted(re.findall(r"`(\w+)`", members)) for where, members in rows.items() if "`" in members}
    assert named == {
        "`POST /v1/chat/completions`": sorted(harmless.CHATS),
        "messages, their parts, and tools": sorted((*harmless.CACHING, *harmless.MEDIA, "annotations")),
        "`POST /v1/completions`": sorted(harmless.COMPLETIONS),
        "`POST /v1/embeddings`, `POST /v1/rerank`, `POST /v1/score`": sorted(harmless.EMBEDDINGS),
        "`POST /v1/responses`": sorted(harmless.RESPONSES),
        "`POST /v1/audio/speech`": sorted(harmless.SPEECH),
        "`POST /v1/audio/transcriptions`, `POST /v1/audio/translations`": sorted(harmless.TRANSCRIPTIONS),
        "images, videos, `POST /v1/audio/generations`": sorted(harmless.DIFFUSION),
        "images": sorted(harmless.IMAGES),
    }
