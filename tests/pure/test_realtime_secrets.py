"""Who may open /v1/realtime: keys as clients present them, and client secrets."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from openai import AsyncOpenAI
from starlette.requests import HTTPConnection
from websockets.asyncio.client import connect
from websockets.exceptions import InvalidStatus
from websockets.typing import Subprotocol

from gateway.access import client_secrets
from gateway.access.api_keys import ApiKey, ApiKeyEntry, digest, new_key
from gateway.access.client_secrets import AZURE_PATH, ClientSecrets, presented_key, subprotocol_of
from gateway.errors import ApiError
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


def key(name: str = "alice", text: str = ALICE) -> ApiKey:
    return ApiKey(ApiKeyEntry(name=name, sha256=digest(text)))  # pyright: ignore[reportCallIssue]


class Clock:
    now_s = 1_000_000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def store(clock: Clock) -> ClientSecrets:
    return ClientSecrets(now=clock)


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


def test_a_secret_is_found_until_it_expires(store, clock):
    alice, session = key(), {"instructions": "Grüße"}
    text, made = store.make(alice, session, 10)
    assert text.startswith("ek_")
    assert made.expires_at == 1_000_010
    found = store.find(text)
    assert found == made
    assert (found.key_sha256, found.session) == (alice.entry.sha256, session)
    assert store.find(text[:-1]) is store.find("") is store.find("ek_") is None
    clock.now_s += 9.5
    assert store.find(text) == made
    clock.now_s += 0.5
    assert store.find(text) is None


def test_secrets_are_bounded_for_each_key_and_together(store, clock, monkeypatch):
    monkeypatch.setattr(client_secrets, "_MAX_SECRETS_PER_KEY", 2)
    monkeypatch.setattr(client_secrets, "_MAX_SECRETS", 3)
    alice, bob = key(), key("bob", BOB)
    for _ in range(2):
        store.make(alice, {}, 10)
    with pytest.raises(ApiError) as caught:
        store.make(alice, {}, 10)
    assert (caught.value.status, caught.value.code) == (429, "too_many_client_secrets")
    assert "'alice'" in caught.value.message
    store.make(bob, {}, 600)
    with pytest.raises(ApiError) as caught:
        store.make(bob, {}, 10)
    assert caught.value.message.startswith("there are 3 client secrets")
    clock.now_s += 10
    store.make(alice, {}, 10)  # those that expired count no more


def test_what_the_secrets_sessions_take_is_bounded(store, monkeypatch):
    with pytest.raises(ApiError) as caught:
        store.make(None, {"instructions": "x" * 2**18}, 10)
    assert (caught.value.status, caught.value.param) == (400, "session")
    with pytest.raises(ApiError):
        store.make(None, {"instructions": "\u4e2d" * 2**17}, 10)  # bytes count
    monkeypatch.setattr(client_secrets, "_MAX_HELD_BYTES", 250)
    store.make(None, {"instructions": "x" * 100}, 10)
    with pytest.raises(ApiError) as caught:
        store.make(None, {"instructions": "x" * 200}, 10)
    assert (caught.value.status, caught.value.code) == (429, "too_many_client_secrets")


def test_a_key_has_a_sixteenth_of_what_sessions_may_take(store):
    alice, large = key(), {"instructions": "x" * 2**17}
    for _ in range(31):
        store.make(alice, large, 10)
    with pytest.raises(ApiError, match="API key 'alice'") as caught:
        store.make(alice, large, 10)
    assert (caught.value.status, caught.value.code) == (429, "too_many_client_secrets")
    store.make(key("bob", BOB), large, 10)
    store.make(alice, {}, 10)


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
            expires_after={"anchor": "created_at", "seconds": 60},
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
