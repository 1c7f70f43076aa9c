"""HTTP as clients speak it, in front of what all endpoints share."""

import asyncio
import gzip
import json
import re
import socket

import httpx
import pytest
from starlette.websockets import WebSocket
from websockets.asyncio.client import connect
from websockets.exceptions import InvalidStatus

from gateway.__main__ import server_config
from gateway.access.api_keys import digest, new_key
from gateway.app import create_app
from gateway.errors import ApiError
from gateway.http import connection
from gateway.http.csrf import check_socket
from gateway.pipeline.config import load_pipeline
from gateway.settings import GatewaySettings
from services.common.errors import InternalError
from tests.support.systems.gateway import SPEECH, Running
from tests.support.systems.routes import endpoints

pytestmark = pytest.mark.asyncio(loop_scope="module")
ASK = {"model": "scripted", "messages": [{"role": "user", "content": "hi"}]}
PAGE, OTHER = "https://chat.example.com", "https://elsewhere.example.com"
BODY = json.dumps(ASK).encode()
OFFER = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAEAAEAAAAIAAAABAAMAAABk\r\n"


@pytest.fixture
def gateway(speech_gateway: Running) -> Running:
    return speech_gateway


def head(length: str = f"Content-Length: {len(BODY)}", offer: bytes = OFFER, version: str = "1.1") -> bytes:
    line = f"POST /v1/chat/completions HTTP/{version}\r\nHost: here\r\n{length}\r\nContent-Type: application/json\r\n"
    return line.encode() + offer + b"\r\n"


async def spoken(gateway: Running, *pieces: bytes, answers: int = 1) -> bytes:
    """What the gateway sends on one connection for `pieces` that come one after the other."""
    url, text = httpx.URL(gateway.url), b""
    reader, writer = await asyncio.open_connection(url.host, url.port)
    async with asyncio.timeout(30):
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0.01)
        while not reader.at_eof() and text.count(b'"usage"') < answers:
            text += await reader.read(65536)
    writer.close()
    return text


WHOLE = head() + BODY
CHUNKED = head("Transfer-Encoding: chunked") + b"%x\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY)
OFFERS = {
    "at once": (1, [WHOLE]),
    "body later": (1, [head(), BODY]),
    "in pieces": (1, [WHOLE[i : i + 90] for i in range(0, len(WHOLE), 90)]),
    "chunked": (1, [CHUNKED]),
    "twice at once": (2, [WHOLE + CHUNKED]),
    "other case": (1, [head(offer=b"upgrade: TLS/1.2\r\nconnection: keep-alive, UPGRADE\r\n") + BODY]),
}


@pytest.mark.parametrize("case", OFFERS)
async def test_an_offer_of_another_protocol_costs_no_body(gateway, case):
    answers, pieces = OFFERS[case]
    text = await spoken(gateway, *pieces, answers=answers)
    assert text.count(b"HTTP/1.1 200 OK") == text.count(b'"finish_reason":"stop"') == answers, text
    assert len(gateway.scripts["thinker"].requests) == answers


async def test_a_proxy_is_nowhere(gateway):
    assert (await spoken(gateway, b"CONNECT here:443 HTTP/1.1\r\nHost: here\r\n\r\n")).startswith(b"HTTP/1.1 400 ")


@pytest.mark.parametrize("stream", [False, True])
async def test_http_1_0_has_no_chunks(gateway, stream):
    body = json.dumps(ASK | {"stream": stream}).encode()
    text = await spoken(gateway, head(f"Content-Length: {len(body)}", b"", "1.0") + body, answers=99)
    headers, _, answer = text.partition(b"\r\n\r\n")
    assert b"chunked" not in headers.lower()
    assert b"connection: close" in headers
    if stream:
        assert answer.startswith(b"data: {")
        assert answer.endswith(b"\n\ndata: [DONE]\n\n")
    else:
        assert json.loads(answer)["choices"][0]["finish_reason"] == "stop"


async def test_head_is_answered_where_get_is(gateway):
    paths = {re.sub("{.*?}", "scripted", path) for method, path in endpoints(gateway.app) if method == "GET"}
    assert {"/health", "/v1/models", "/v1/models/scripted", "/"} <= paths
    for path in sorted(paths):
        got, headed = await gateway.http.get(path), await gateway.http.head(path)
        assert (headed.status_code, headed.content) == (got.status_code, b""), path
        assert headed.headers["content-type"] == got.headers["content-type"]
    assert (await gateway.http.head("/v1/chat/completions")).status_code == 405


async def test_a_compressed_body_is_refused(gateway):
    headers = {"content-encoding": "gzip", "content-type": "application/json"}
    for path in ("/v1/chat/completions", "/v1/audio/transcriptions", "/tokenize"):
        response = await gateway.http.post(path, content=gzip.compress(BODY), headers=headers)
        error = response.json()["error"]
        assert (response.status_code, error["code"]) == (415, "unsupported_content_encoding")
        assert "gzip" in error["message"]
    plain = await gateway.http.post("/v1/chat/completions", content=BODY, headers={"content-encoding": "identity"})
    assert plain.status_code == 200


async def test_a_byte_order_mark_is_no_fault(gateway):
    for mark in (b"", b"\xef\xbb\xbf"):
        assert (await gateway.http.post("/v1/chat/completions", content=mark + BODY)).status_code == 200


async def test_the_list_of_models_may_end_in_a_slash(gateway):
    assert (await gateway.http.get("/v1/models/")).json() == (await gateway.http.get("/v1/models")).json()


@pytest.mark.parametrize("error", [None, InternalError("broken")])
@pytest.mark.parametrize("after", [0, 1])
async def test_a_silent_stream_has_comments(gateway, monkeypatch, after, error):
    monkeypatch.setattr(connection, "SILENCE_S", 0.02)
    thinker = gateway.scripts["thinker"]
    thinker.hold, thinker.after = True, after
    lines: list[str] = []
    async with gateway.http.stream("POST", "/v1/chat/completions", json=ASK | {"stream": True}) as response:
        assert response.status_code == 200
        async for line in response.aiter_lines():
            lines.append(line)
            if lines.count(": waiting") == 3:
                thinker.error = error
                thinker.go_on()
    events = [line for line in lines if line and line != ": waiting"]
    assert all(line.startswith("data: ") for line in events)
    assert lines.count(": waiting") >= 3
    if error is None:
        assert events[-1] == "data: [DONE]"
    else:
        assert json.loads(events[-1].removeprefix("data: "))["error"]["code"] == "internal_error"


async def test_a_comment_that_is_not_read_yet_is_followed_by_no_other_and_then_by_the_next_piece(monkeypatch):
    monkeypatch.setattr(connection, "SILENCE_S", 0.01)
    sent, made, read = list[bytes](), asyncio.Event(), asyncio.Event()

    async def pieces():
        await made.wait()
        yield b"data: x\n\n"

    async def send(message):
        sent.append(message.get("body", b"start"))
        if sent[-1] == connection.EventStream.filler:
            made.set()
            await read.wait()

    stream = connection.EventStream(pieces(), 60)
    streaming = asyncio.create_task(stream({"type": "http"}, asyncio.Event().wait, send))  # pyright: ignore[reportArgumentType]
    await made.wait()
    await asyncio.sleep(0.05)
    assert sent == [b"start", stream.filler]
    monkeypatch.setattr(connection, "SILENCE_S", 60)
    read.set()
    await streaming
    assert sent == [b"start", stream.filler, b"data: x\n\n", b""]


async def test_sound_has_no_comments(gateway, monkeypatch):
    monkeypatch.setattr(connection, "SILENCE_S", 0.01)
    script = gateway.scripts["code2wav"]
    body = {"model": "scripted", "input": "Yes.", "response_format": "pcm"}
    plain = (await gateway.http.post("/v1/audio/speech", json=body)).content
    script.hold, script.after = True, 1
    asking = asyncio.create_task(gateway.http.post("/v1/audio/speech", json=body))
    await script.holding.wait()
    await asyncio.sleep(0.05)
    script.go_on()
    assert (await asking).content == plain


def browser(app, origin: str, **headers: str) -> httpx.AsyncClient:
    """A page of `origin`; the gateway's stages are not started."""
    options = {"transport": httpx.ASGITransport(app), "base_url": "http://here"}
    return httpx.AsyncClient(headers={"origin": origin, "sec-fetch-site": "cross-site", **headers}, **options)


def app_of(tmp_path, keys: bool = False, **settings):
    if keys:
        settings["api_keys_file"] = tmp_path / "keys.yaml"
        entry = {"name": "alice", "sha256": digest(new_key())}
        settings["api_keys_file"].write_text(json.dumps({"keys": [entry]}))
    return create_app(GatewaySettings(pipeline=SPEECH, **settings), load_pipeline(SPEECH))


PREFLIGHT = {
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization,content-type,x-openai-agents-sdk",
}


@pytest.mark.parametrize("keys", [False, True])
async def test_pages_of_allowed_origins_and_no_others_use_it(tmp_path, keys):
    app = app_of(tmp_path, keys, allowed_origins=[PAGE])
    async with browser(app, PAGE) as page:
        preflight = await page.options("/v1/chat/completions", headers=PREFLIGHT)
        assert (preflight.status_code, preflight.headers["access-control-allow-origin"]) == (200, PAGE)
        assert "x-openai-agents-sdk" in preflight.headers["access-control-allow-headers"]
        answer = await page.post("/v1/nothing")
        assert answer.status_code == (401 if keys else 404)  # no 403, and the page reads why
        assert answer.headers["access-control-allow-origin"] == PAGE
        exposed = answer.headers["access-control-expose-headers"].split(", ")
        assert {"Location", "x-request-id"} <= set(exposed)
    async with browser(app, OTHER) as page:
        assert (await page.options("/v1/chat/completions", headers=PREFLIGHT)).status_code == 400
        answer = await page.post("/v1/nothing")
        assert answer.status_code == (401 if keys else 403)
        assert "access-control-allow-origin" not in answer.headers


async def test_no_page_of_another_origin_is_let_in_by_default(tmp_path):
    for keys in (False, True):
        async with browser(app_of(tmp_path, keys), PAGE) as page:
            for answer in (await page.options("/v1/models", headers=PREFLIGHT), await page.post("/v1/nothing")):
                assert answer.status_code in (401, 403, 405)
                assert "access-control-allow-origin" not in answer.headers
    assert f"--allowed-origins={PAGE}" in (await browser(app_of(tmp_path), PAGE).post("/v1/nothing")).text


OWN = ("localhost", "here:8000", "127.0.0.1:8000", "[::1]:8000", "10.1.2.3", "gateway.quartet.svc.cluster.local")
OWN = (*OWN, "page.localhost", "host.docker.internal:8000", "Gateway.quartet.svc.", socket.gethostname())
REBOUND = ("attacker.example", "attacker.example:8000", "127.0.0.1.attacker.example", "a.b@c.d", "svc.example", "1.2.3")


async def asked(app, host: str, path: str) -> tuple[int, str | None]:
    async with browser(app, f"http://{host}", **{"sec-fetch-site": "same-origin", "host": host}) as page:
        answer = await page.get(path)
    return answer.status_code, answer.json()["error"]["code"] if answer.is_client_error else None


async def test_a_page_whose_name_leads_here_is_refused(tmp_path):
    """DNS rebinding: to the browser this server is that page's own."""
    app = app_of(tmp_path)
    for host in OWN:
        assert (await asked(app, host, "/health"))[0] == 200, host
    for host in REBOUND:
        for path in ("/health", "/v1/nothing", "/", "/ready"):
            assert await asked(app, host, path) == (421, "unknown_host"), host


async def test_names_of_this_server(tmp_path):
    for setting in ("chat.example.com", "*.example.com", "*"):
        app = app_of(tmp_path, allowed_hosts=[setting])
        assert (await asked(app, "chat.example.com:443", "/health"))[0] == 200
        known = (200, None) if setting == "*" else (421, "unknown_host")
        assert await asked(app, "chat.example.com.attacker.example", "/health") == known
    published = app_of(tmp_path, host="0.0.0.0", published_host="box.example.com", allow_anonymous=True)
    assert (await asked(published, "box.example.com", "/health"))[0] == 200
    for wrong in ("https://chat.example.com", "chat.example.com:443", "a.*"):
        with pytest.raises(ValueError, match="is no name of a host: write it as"):
            GatewaySettings(pipeline=SPEECH, allowed_hosts=[wrong])


async def test_with_keys_only_what_needs_none_is_guarded_but_by_setting(tmp_path):
    app = app_of(tmp_path, keys=True)
    assert await asked(app, "chat.example.com", "/v1/models") == (401, "invalid_api_key")
    for path in ("/ready", "/metrics"):
        assert await asked(app, "chat.example.com", path) == (421, "unknown_host")
    app = app_of(tmp_path, keys=True, allowed_hosts=["chat.example.com"])
    assert await asked(app, "chat.example.com", "/v1/models") == (401, "invalid_api_key")
    assert await asked(app, "attacker.example", "/v1/models") == (421, "unknown_host")


async def test_websockets_of_pages_whose_names_lead_here_are_refused(gateway):
    with pytest.raises(InvalidStatus) as refused:
        async with connect(
            f"{gateway.url.replace('http', 'ws')}/v1/realtime", additional_headers={"host": "a.example"}
        ):
            pass
    assert refused.value.response.status_code == 421


async def test_websockets_of_pages(gateway, monkeypatch):
    page = WebSocket({"type": "websocket", "app": gateway.app, "headers": [(b"origin", PAGE.encode())]}, None, None)  # pyright: ignore
    for allowed in ([PAGE], ["*"]):
        monkeypatch.setattr(gateway.app.state.gateway.settings, "allowed_origins", allowed)
        check_socket(page)
    for allowed in ([], [OTHER]):
        monkeypatch.setattr(gateway.app.state.gateway.settings, "allowed_origins", allowed)
        with pytest.raises(ApiError, match=f"--allowed-origins={PAGE}"):
            check_socket(page)


@pytest.mark.parametrize("origin", ["chat.example.com", "https://chat.example.com/", "https://a.example/b", ""])
async def test_what_is_no_origin_does_not_start(origin):
    with pytest.raises(ValueError, match="is no origin: write it as"):
        GatewaySettings(pipeline=SPEECH, allowed_origins=[origin])


async def test_idle_connections_outlive_those_of_proxies(tmp_path):
    app = app_of(tmp_path)
    assert server_config(app, GatewaySettings(pipeline=SPEECH)).timeout_keep_alive == 75
    assert server_config(app, GatewaySettings(pipeline=SPEECH, keep_alive_s=610)).timeout_keep_alive == 610
