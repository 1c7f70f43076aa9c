"""Who may open /v1/realtime: keys as clients present them, and client secrets."""

import json
import re
import secrets
from pathlib import Path
from typing import Any

import pytest
from openai import AsyncOpenAI
from starlette.requests import HTTPConnection
from websockets.asyncio.client import connect
from websockets.exceptions import InvalidStatus
from websockets.typing import Subprotocol

from gateway.access import client_secrets
from gateway.access.api_keys import digest, new_key
from gateway.access.client_secrets import AZURE_PATH, presented_key, subprotocol_of
from gateway.access.secret_text import MAX_CHARACTERS
from gateway.http.middleware import OPEN_PATHS
from tests.support.systems.gateway import Running, running
from tests.support.systems.routes import endpoints

ALICE, BOB = new_key(), new_key()
ASK = {"model": "scripted", "messages": [{"role": "user", "content": "hi"}]}
OPENED = {("GET", "/v1/models"), *(("POST", f"/v1/{name}") for name in ("chat/completions", "completions", "messages"))}
OPENED |= {("POST", f"/v1/images/{each}") for each in ("generations", "edits")}
OPENED |= {("POST", path) for path in ("/v1/realtime/calls", "/openai/v1/realtime/calls", "/v1/live/sessions")}
OPENED |= {("POST", f"/v1/audio/{each}") for each in ("speech", "transcriptions", "translations", "generations")}


def socket(headers: dict[str, str] | None = None, subprotocols: list[str] | None = None) -> HTTPConnection:
    raw = [(name.lower().encode(), value.encode()) for name, value in (headers or {}).items()]
    return HTTPConnection({"type": "websocket", "headers": raw, "subprotocols": subprotocols or []})


@pytest.mark.parametrize(
    ("headers", "subprotocols", "presented"),
    [
        ({"Authorization": "Bearer K"}, [], "K"),
        ({"authorization": "bearer  K "}, [], "K"),
        ({"api-key": "K"}, [], "K"),
        ({}, ["realtime", "openai-insecure-api-key.K"], "K"),
        ({"Authorization": "Bearer A", "api-key": "B"}, ["openai-insecure-api-key.C"], "A"),
        ({"Authorization": "Basic A", "api-key": "B"}, ["openai-insecure-api-key.C"], "B"),
        ({"Authorization": "Bearer "}, ["openai-insecure-api-key.C"], "C"),
        ({}, ["realtime", "openai-beta.realtime-v1"], ""),
        ({}, ["openai-insecure-api-key."], ""),
        ({}, [], ""),
    ],
)
def test_where_a_key_is_presented(headers, subprotocols, presented):
    assert presented_key(socket(headers, subprotocols)) == presented


def test_the_subprotocol_that_is_taken_is_never_the_one_with_the_key():
    assert subprotocol_of(socket({}, ["openai-insecure-api-key.K", "realtime"])) == "realtime"
    assert subprotocol_of(socket({}, ["openai-insecure-api-key.K"])) is None
    assert subprotocol_of(socket()) is None


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    return write_keys(tmp_path / "keys.yaml", alice=ALICE, bob=BOB)


def write_keys(file: Path, **keys: str) -> Path:
    new = file.with_suffix(".new")
    new.write_text(json.dumps({"keys": [{"name": name, "sha256": digest(text)} for name, text in keys.items()]}))
    return new.replace(file)


async def connected(gateway: Running, presented: str, path: str = client_secrets.PATH) -> dict[str, Any]:
    """The first event of a session that is opened as browsers do."""
    offered = [Subprotocol("realtime"), Subprotocol(f"openai-insecure-api-key.{presented}")]
    async with connect(gateway.url.replace("http", "ws") + path, subprotocols=offered, open_timeout=60) as opened:
        assert opened.subprotocol == "realtime"
        return json.loads(await opened.recv())


async def refused(gateway: Running, presented: str, path: str = client_secrets.PATH) -> int:
    try:
        await connected(gateway, presented, path)
    except InvalidStatus as error:
        return error.response.status_code
    return 0


def client(gateway: Running, api_key: str) -> AsyncOpenAI:
    return gateway.openai.with_options(api_key=api_key)


async def test_openais_client_makes_secrets_that_open_sessions_in_the_keys_name(key_file: Path):
    async with running(api_keys_file=key_file) as gateway:
        made = await client(gateway, ALICE).realtime.client_secrets.create(
            expires_after={"anchor": "created_at", "seconds": 7200},  # a busy machine takes a minute for this test
            session={"type": "realtime", "instructions": "Be brief.", "audio": {"output": {"voice": "marin"}}},
        )
        assert made.value.startswith("ek_")
        assert made.session.type == "realtime"
        assert (made.session.instructions, made.session.model) == ("Be brief.", "scripted")
        session = (await connected(gateway, made.value))["session"]
        assert (session["instructions"], session["audio"]["output"]["voice"]) == ("Be brief.", "marin")
        assert (await connected(gateway, made.value, AZURE_PATH))["session"]["instructions"] == "Be brief."
        assert (await connected(gateway, ALICE))["session"]["instructions"] == ""
        assert await refused(gateway, "ek_" + "x" * 43) == 403
        headers = {"authorization": f"Bearer {made.value}"}
        assert (await gateway.chat(ASK, headers=headers)).status_code == 200
        assert (await gateway.http.get("/v1/models", headers=headers)).status_code == 200
        for method, path in others(gateway):
            response = await gateway.http.request(method, path, headers=headers, json={})
            assert response.status_code == 401, path
            assert "a client secret does not open this" in response.json()["error"]["message"]

        for kept in ({"alice": BOB}, {"bob": BOB}):  # replaced by one of its name; gone
            write_keys(key_file, alice=ALICE)
            await until_answered(gateway, ALICE, 200)
            assert (await connected(gateway, made.value))["session"]["instructions"] == "Be brief."
            write_keys(key_file, **kept)
            await until_answered(gateway, ALICE, 401)
            assert await refused(gateway, made.value) == 403


def others(gateway: Running) -> list[tuple[str, str]]:
    """What a secret must not open, of all endpoints: what keeps, lists or removes, and what is an operator's."""
    closed = [(method, path) for method, path in endpoints(gateway.app) if path not in OPEN_PATHS]
    found = {(method, re.sub("{.*?}", "x", path)) for method, path in closed}
    assert found > OPENED
    return sorted(found - OPENED)


async def until_answered(gateway: Running, api_key: str, status: int) -> None:
    headers = {"authorization": f"Bearer {api_key}"}
    while (await gateway.http.get("/v1/models", headers=headers)).status_code != status:
        pass


def write_signing_key(file: Path) -> Path:
    file.write_text(secrets.token_hex(32))
    return file


async def made_by(gateway: Running, **session: str) -> str:
    headers = {"authorization": f"Bearer {ALICE}"}
    body = {"session": {"type": "realtime", **session}}
    made = await gateway.http.post(f"{client_secrets.PATH}/client_secrets", json=body, headers=headers)
    assert made.status_code == 200, made.text
    return made.json()["value"]


async def test_gateways_with_one_signing_key_take_each_others_secrets(key_file: Path, tmp_path: Path):
    shared, own = (write_signing_key(tmp_path / name) for name in ("shared.key", "own.key"))
    async with (
        running(api_keys_file=key_file, signing_key_file=shared) as first,
        running(api_keys_file=key_file, signing_key_file=shared) as second,
        running(api_keys_file=key_file, signing_key_file=own) as third,
        running(api_keys_file=key_file) as fourth,
    ):
        everyone = {first: "Be first.", second: "Be second.", third: "Be third.", fourth: "Be fourth."}
        for maker, words in everyone.items():
            made = await made_by(maker, instructions=words)
            headers = {"authorization": f"Bearer {made}"}
            for asked in everyone:
                known = asked is maker or {asked, maker} == {first, second}
                assert (await asked.chat(ASK, headers=headers)).status_code == (200 if known else 401)
                if known:
                    assert (await connected(asked, made))["session"]["instructions"] == words
                else:
                    assert await refused(asked, made) == 403

        # the longest that fits into a header, and one that does not
        words = secrets.token_urlsafe(2900)  # it hardly deflates
        made = await made_by(first, instructions=words)
        assert MAX_CHARACTERS - 100 < len(made) <= MAX_CHARACTERS
        assert (await connected(second, made))["session"]["instructions"] == words
        assert (await second.chat(ASK, headers={"authorization": f"Bearer {made}"})).status_code == 200
        words = secrets.token_urlsafe(15_000)
        made = await made_by(first, instructions=words)
        assert (await connected(first, made))["session"]["instructions"] == words
        assert (await first.chat(ASK, headers={"authorization": f"Bearer {made}"})).status_code == 200
        assert await refused(second, made) == 403

        # what a key has made is void everywhere without it
        made = await made_by(first)
        assert await refused(second, made) == 0
        write_keys(key_file, alice=BOB)
        for asked in (first, second):
            await until_answered(asked, ALICE, 401)
            assert await refused(asked, made) == 403


async def test_a_secret_without_an_api_key_opens_nothing_where_there_are_keys(key_file: Path, tmp_path: Path):
    shared = write_signing_key(tmp_path / "shared.key")
    async with (
        running(signing_key_file=shared) as without,
        running(signing_key_file=shared, api_keys_file=key_file) as with_keys,
    ):
        made = await made_by(without, instructions="Be brief.")
        assert (await connected(without, made))["session"]["instructions"] == "Be brief."
        assert await refused(with_keys, made) == 403
        assert (await with_keys.chat(ASK, headers={"authorization": f"Bearer {made}"})).status_code == 401


async def test_what_is_no_secret_is_refused_however_it_is_made(key_file: Path):
    """Without a fault of the server, which would be a 500."""
    async with running(api_keys_file=key_file) as gateway, running() as open_to_all:
        good = await made_by(gateway)
        texts = ["ek_", "ek_x", "ek_" + "A" * 4093, "ek_" + "A" * 4094, "ek_" + "x" * 50_000, "ek_" + "-_" * 2000]
        texts += [
            good[:-1],
            good + "A",
            good + "=",
            good[:40] + "." + good[40:],
            "ek_" + good[3:].swapcase(),
            good * 20,
        ]
        texts += [
            "ek_" + good[3:].swapcase(),
            "ek_\u00e9\u00ff",
            good[:40] + "\u00e9" + good[41:],
            "ek_\u00a0" + good[3:],
        ]
        for text in texts:
            for name, value in (("authorization", f"Bearer {text}"), ("x-api-key", text)):
                headers = {name.encode(): value.encode("latin-1")}
                answer = await gateway.http.post("/v1/chat/completions", json=ASK, headers=headers)
                assert answer.status_code == 401, text
                assert answer.json()["error"]["code"] == "invalid_api_key"
            if text.isascii() and "=" not in text and len(text) < 8000:  # as a browser could offer it
                assert await refused(gateway, text) == 403, text
                assert (await connected(open_to_all, text))["error"]["code"] == "invalid_api_key", text
        assert await refused(gateway, good) == 0


async def test_without_api_keys_a_secret_still_brings_its_session():
    async with running() as gateway:
        made = await gateway.openai.realtime.client_secrets.create(session={"type": "transcription"})
        assert made.session.type == "transcription"
        assert (await connected(gateway, made.value))["session"]["type"] == "transcription"
        assert (await connected(gateway, "anything"))["session"]["type"] == "realtime"
        assert (await connected(gateway, "ek_gone"))["error"]["code"] == "invalid_api_key"
        response = await gateway.http.post(f"{client_secrets.PATH}/client_secrets", json={})
        assert response.status_code == 200
        assert response.headers["cache-control"] == "no-store"


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"session": {"audio": {"output": {"speed": 9}}}}, "session.audio.output.speed"),
        ({"session": {"type": "translation"}}, "session.type"),
        ({"session": {"unknown": float("nan")}}, "session"),
        ({"session": 5}, "session"),
        ({"expires_after": {"seconds": 9}}, "expires_after.seconds"),
        ({"expires_after": {"seconds": 7201}}, "expires_after.seconds"),
        ({"expires_after": {"anchor": "now"}}, "expires_after.anchor"),
    ],
)
async def test_a_wrong_request_is_refused_by_its_member(speech_gateway: Running, body, param):
    response = await speech_gateway.http.post(f"{client_secrets.PATH}/client_secrets", content=json.dumps(body))
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param
