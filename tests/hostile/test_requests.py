"""No request costs more than its length, and none holds the others up."""

import asyncio
import json
import re
import time
from typing import Any
from urllib.parse import unquote_to_bytes

import pytest

from gateway.media.fetch import unescaped
from tests.hostile import table
from tests.hostile.bodies import FEWER, NAME, TEXT, attacks, items, members
from tests.hostile.conftest import KEY
from tests.hostile.meter import MAX_HELD_S, MIB, metered
from tests.hostile.wire import Answer, ask
from tests.support.systems.gateway import METRICS_KEPT_S, Running

MAX_RISE_MIB, MAX_CPU_S = 96, 1.0  # of bodies of up to 8 MiB; the client's own are in it
JSON_TYPE, FORM_TYPE = "application/json", "multipart/form-data"
BOUNDARY = "x" * 20
OF_VALUES = ("400", "json_too_large")


def operations(gateway: Running) -> dict[str, Any]:
    return operations_of(gateway.app.openapi())


def operations_of(document: dict[str, Any]) -> dict[str, Any]:
    """By "METHOD path"."""
    paths = document["paths"].items()
    return {f"{method.upper()} {path}": operation for path, methods in paths for method, operation in methods.items()}


def content(operation: dict[str, Any], media_type: str) -> dict[str, Any] | None:
    return operation.get("requestBody", {}).get("content", {}).get(media_type, {}).get("schema")


async def test_every_endpoint_has_its_costs_in_the_table(gateway: Running):
    found = operations(gateway)
    assert set(table.ENDPOINTS) == set(found)
    for name, (costs, _) in table.ENDPOINTS.items():
        bodies = [kind for kind, of in ((table.JSON, JSON_TYPE), (table.FORM, FORM_TYPE)) if content(found[name], of)]
        names = [table.NAME] if "{" in name else []
        assert sorted(costs) == sorted([*bodies, *names]), name


async def cheap(gateway: Running, name: str, what: str, body: bytes = b"", kind: str = JSON_TYPE) -> Answer:
    """The answer to a request, which must cost little."""
    headers = {"authorization": f"Bearer {KEY}", "content-type": kind}
    with metered() as cost:
        answer = await asyncio.to_thread(ask, gateway.url, name, headers, body)
    print(f"{name}, {what}: {answer.status} {answer.error.get('code')} {cost.held_s:.3f} s {cost.rise_mib:.0f} MiB")
    assert cost.held_s < MAX_HELD_S, (name, what, cost)
    assert (cost.rise_mib < MAX_RISE_MIB, cost.cpu_s < MAX_CPU_S) == (True, True), (name, what, cost)
    return answer


@pytest.mark.parametrize("name", [name for name, (costs, _) in table.ENDPOINTS.items() if table.JSON in costs])
async def test_json_costs_its_length(gateway: Running, name: str):
    schema = content(operations(gateway)[name], JSON_TYPE)
    assert schema is not None
    line = name.format(conversation_id=(await gateway.openai.conversations.create()).id, video_id="video_x")
    for what, body, code in attacks(schema):
        answer = await cheap(gateway, line, what, body())
        if code is None:
            assert answer.status in (400, *table.ENDPOINTS[name][1]), (name, what, answer)
        else:
            # Anthropic's errors have no code
            assert (answer.status, answer.error.get("code", code)) == (400, code), (name, what, answer)


def form(*parts: tuple[str, str]) -> bytes:
    pieces = [
        f'--{BOUNDARY}\r\ncontent-disposition: form-data; name="{name}"\r\n\r\n{text}\r\n' for name, text in parts
    ]
    return "".join([*pieces, f"--{BOUNDARY}--\r\n"]).encode()


FORMS = {
    "fields": form(*((f"f{i}", "x") for i in range(2000))),
    "fields of one name": form(*([("timestamp_granularities[]", "x")] * 2000)),
    "keys of a field": form(*((f"lora[f{i}]", "x") for i in range(900))),
    "objects": form(("quartet", items("{}", FEWER * 2))),
    "members": form(("quartet", members(30_000))),
    "brackets": form(("quartet", "[" * 500_000)),
    "a text": form(("model", TEXT[:500_000])),
    "a header without end": b"--" + BOUNDARY.encode() + b"\r\ncontent-disposition: " + b"x" * MIB,
    "headers": b"--" + BOUNDARY.encode() + b"\r\n" + b"a:b\r\n" * 200_000,
}


@pytest.mark.parametrize("name", [name for name, (costs, _) in table.ENDPOINTS.items() if table.FORM in costs])
async def test_forms_cost_their_length(gateway: Running, name: str):
    for what, body in FORMS.items():
        answer = await cheap(gateway, name, what, body, f"{FORM_TYPE}; boundary={BOUNDARY}")
        assert answer.status in (400, *table.ENDPOINTS[name][1]), (name, what, answer)


async def test_long_names_cost_their_length(gateway: Running):
    for name, (costs, statuses) in table.ENDPOINTS.items():
        if table.NAME in costs:
            long = re.sub(r"\{.*?\}", "x", re.sub(r"\{.*?\}", NAME, name, count=1))
            answer = await cheap(gateway, long, "", json.dumps({"items": [], "metadata": {}}).encode())
            assert answer.status in (400, *statuses), (name, answer)


OF_FILES = {
    "blanks": "data:audio/wav;base64," + "AB " * (2 * MIB),
    "line ends": "data:audio/wav;base64," + "AB\n" * (2 * MIB),
    "escapes": "data:audio/wav," + "%41" * (2 * MIB),
    "escapes in base64": "data:audio/wav;base64," + "%41" * (2 * MIB),
    "frames": "data:video/jpeg;base64," + "AB," * (2 * MIB),
}


@pytest.mark.parametrize("what", OF_FILES)
async def test_a_file_costs_its_length(gateway: Running, what: str):
    kind = "video_url" if what == "frames" else "audio_url"
    content = [{"type": kind, kind: {"url": OF_FILES[what]}}]
    body = json.dumps({"model": "scripted", "messages": [{"role": "user", "content": content}]}).encode()
    answer = await cheap(gateway, "POST /v1/chat/completions", what, body)
    assert (answer.status, answer.error["code"]) == (400, "invalid_media"), answer


def test_unquoting_in_pieces_loses_nothing():
    for lead in range(4):
        text = "x" * lead + "%41%C3%A4b" * 30_000 + "%4"
        assert unescaped(text) == unquote_to_bytes(text)


async def test_metrics_are_made_once_a_second_however_often_they_are_asked_for(gateway: Running):
    began, pages = time.monotonic(), set()
    for _ in range(20):
        page = (await gateway.http.get("/metrics")).text
        pages.add(re.search(r"^process_cpu_seconds_total .*", page, re.MULTILINE)[0])  # pyright: ignore[reportOptionalSubscript]
    assert 1 <= len(pages) <= 2 + (time.monotonic() - began) / METRICS_KEPT_S
