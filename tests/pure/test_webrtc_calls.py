"""Calls by WebRTC: what the gateway answers, what a call carries, and that nothing is left of it."""

import asyncio
import json
import re

import numpy as np
import pytest
import pytest_asyncio
from websockets.asyncio.client import connect
from websockets.exceptions import InvalidStatus

from gateway.webrtc import ice, peer
from gateway.webrtc.opus import FRAME_MS
from tests.support.clients.caller import CALLS, SDP, Caller, calling
from tests.support.clients.voices import bearer, keys
from tests.support.clock import put_forward
from tests.support.samples.espeak import spoken
from tests.support.scripted import code2wav
from tests.support.systems.call_ends import ENDS, NO_TURNS, ask, vanish
from tests.support.systems.calls import CallServer, call_server
from tests.support.systems.gateway import running

pytestmark = pytest.mark.asyncio(loop_scope="module")
MAX_CALLS = 16
CONSENT_S = 7.0  # aioice asks each 4 to 6 s


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(tmp_path_factory):
    file = keys(tmp_path_factory.mktemp("keys"))
    async with call_server(
        max_calls=MAX_CALLS, api_keys_file=file, allowed_origins=["https://shop.example"]
    ) as started:
        yield started


@pytest_asyncio.fixture(loop_scope="module")
async def server(shared: CallServer):
    shared.gateway.http.headers.update(bearer("alice"))
    yield shared
    await shared.all_gone()
    await shared.gateway.reset()


def _tone(seconds: float) -> bytes:
    times = np.arange(round(seconds * code2wav.SAMPLE_RATE_HZ)) / code2wav.SAMPLE_RATE_HZ
    return (8000 * np.sin(2000 * times)).astype("<i2").tobytes()


@pytest.fixture(autouse=True)
def answers(monkeypatch):
    """Answers that Opus keeps: the usual ones are of frequencies that nobody hears."""
    monkeypatch.setattr(code2wav, "sound", lambda frames: _tone(0.6))


@pytest.fixture
def long_answers(answers, monkeypatch):
    """Of which something is left to cut, also on a busy machine, which hears the user late."""
    monkeypatch.setattr(code2wav, "sound", lambda frames: _tone(20))


async def test_an_answer_is_heard(server):
    async with calling(server.gateway.http) as caller:
        await ask(caller)
        started = await caller.until("output_audio_buffer.started")
        done = await caller.until("response.done")
        stopped = await caller.until("output_audio_buffer.stopped")
        assert started["response_id"] == stopped["response_id"] == done["response"]["id"]
        assert not [each for each in caller.events if each["type"] == "response.output_audio.delta"]
        kinds = [each["type"] for each in caller.events]
        assert kinds.index("response.content_part.added") < kinds.index("output_audio_buffer.started")
        assert max(caller.heard) > 1000


async def test_what_is_said_reaches_the_session(server):
    async with calling(server.gateway.http) as caller:
        caller.send("session.update", session=NO_TURNS | {"audio": {"input": {"format": {"type": "audio/pcmu"}}}})
        updated = await caller.until("session.updated")
        assert updated["session"]["audio"]["input"]["format"] == {"type": "audio/pcm", "rate": 24_000}
        caller.send("session.update", session=NO_TURNS)
        caller.microphone.say((12_000 * np.sin(np.arange(24_000) / 20)).astype(np.int16))  # half a second
        async with asyncio.timeout(60):  # a busy machine may take seconds for one
            while await _loud_samples(server, caller) < 0.4 * 16_000:
                await asyncio.sleep(0.2)
        assert await _loud_samples(server, caller) < 0.6 * 16_000


async def _loud_samples(server: CallServer, caller: Caller) -> int:
    """Of all that the session has heard so far, at 16 kHz."""
    caller.send("input_audio_buffer.commit")  # or an error: there is too little
    caller.send("response.create")
    await caller.until("response.done")
    asked = server.gateway.scripts["thinker"].requests[-1:]
    files = [part.media.data for each in asked for message in each.messages for part in message.content]
    sound = np.concatenate([np.frombuffer(file[44:], "<i2").astype(int) for file in (*files, bytes(44))])
    return int(np.count_nonzero(np.abs(sound) > 1000))


@pytest.mark.usefixtures("long_answers")
@pytest.mark.parametrize("way", ["output_audio_buffer.clear", "the user speaks"])
async def test_an_interrupted_answer_is_cut_where_it_was_heard(server, way):
    async with calling(server.gateway.http) as caller:
        await ask(caller)
        await caller.until("output_audio_buffer.started")
        await server.gateway.until(lambda: _loud_ms(caller) > 300)
        if way == "the user speaks":
            speech = np.frombuffer(spoken("Wait, tell me about the boats.", 48_000), "<i2")
            caller.send(
                "session.update",
                session={"type": "realtime", "audio": {"input": {"turn_detection": {"type": "server_vad"}}}},
            )
            caller.microphone.say(speech)
        else:
            caller.send("output_audio_buffer.clear")
        await caller.until("output_audio_buffer.cleared")
        truncated = await caller.until("conversation.item.truncated")
        end_ms = truncated["audio_end_ms"]
        assert 300 < end_ms < 19_500
        await server.gateway.until(lambda: _loud_ms(caller) > end_ms - 200)  # its client decodes a moment later
        await asyncio.sleep(0.8)
        assert _loud_ms(caller) < end_ms + 200  # nothing more was sent
        assert not [each for each in caller.events if each["type"] == "error"]


def _loud_ms(caller: Caller) -> int:
    """Of all that it has heard, of an answer."""
    return FRAME_MS * sum(peak > 1000 for peak in caller.heard)


async def test_a_second_controller(server):
    url = server.gateway.url.replace("http", "ws")
    async with calling(server.gateway.http) as caller:
        call_id = caller.location.rpartition("/")[2]
        async with connect(f"{url}/v1/realtime?call_id={call_id}", additional_headers=bearer("alice")) as controller:
            assert json.loads(await controller.recv())["type"] == "session.created"
            await controller.send(
                json.dumps({"type": "session.update", "session": NO_TURNS | {"instructions": "Sing."}})
            )
            updated = await caller.until("session.updated")
            assert updated["session"]["instructions"] == "Sing."
            assert json.loads(await controller.recv()) == updated
            assert (await server.gateway.http.post(f"{caller.location}/hangup")).status_code == 200
            async with asyncio.timeout(30):
                with pytest.raises(Exception, match="1000"):
                    await controller.recv()
        for unknown, key in ((call_id, "alice"), ("rtc_1", "alice"), ("../x", "alice")):
            with pytest.raises(InvalidStatus) as refused:
                await connect(f"{url}/v1/realtime?call_id={unknown}", additional_headers=bearer(key))
            assert refused.value.response.status_code == 404
            assert json.loads(refused.value.response.body or b"")["error"]["code"] == "call_id_not_found"


async def test_a_call_is_its_keys(server):
    secret = (await server.gateway.http.post("/v1/realtime/client_secrets", json={})).json()["value"]
    url = server.gateway.url.replace("http", "ws")
    async with calling(server.gateway.http, **bearer(secret)) as caller:
        other = await server.gateway.http.post(f"{caller.location}/hangup", headers=bearer("bob"))
        assert (other.status_code, other.json()["error"]["code"]) == (404, "call_id_not_found")
        own = await server.gateway.http.post(f"{caller.location}/hangup", headers=bearer(secret))
        assert own.status_code == 401  # a page ends its own connection
        call_id = caller.location.rpartition("/")[2]
        for key, status in ((secret, 401), ("bob", 404)):
            with pytest.raises(InvalidStatus) as refused:
                await connect(f"{url}/v1/realtime?call_id={call_id}", additional_headers=bearer(key))
            assert refused.value.response.status_code == status


async def test_a_page_of_azures_makes_a_call_where_it_looks_for_it(server):
    """By a secret that its server made with the header `api-key`; the page asks for fewer events by `webrtcfilter`."""
    azure, http = "/openai/v1/realtime", server.gateway.http
    keys = {"authorization": "", "api-key": "alice"}
    secret = (await http.post(f"{azure}/client_secrets", json={"session": {"type": "realtime"}}, headers=keys)).json()
    caller = Caller()
    answer = await caller.dial(http, f"{azure}/calls?webrtcfilter=on", **bearer(secret["value"]))
    assert answer.status_code == 201, answer.text
    assert re.fullmatch(f"{azure}/calls/rtc_[0-9a-f]{{24}}", caller.location)
    try:
        await caller.begin(answer.text)
        await caller.until("session.created")
        assert (await http.post(f"{caller.location}/hangup", headers=keys)).status_code == 200
        assert (await http.post(f"{caller.location}/hangup", headers=keys)).status_code == 404
    finally:
        await caller.close()


async def test_a_page_of_another_site(server):
    asked = {"origin": "https://shop.example", "access-control-request-method": "POST"}
    asked["access-control-request-headers"] = "authorization,content-type,x-openai-agents-sdk"
    before = await server.gateway.http.options(CALLS, headers=asked | {"authorization": ""})
    assert before.status_code == 200
    assert "x-openai-agents-sdk" in before.headers["access-control-allow-headers"]
    caller = Caller()
    answer = await caller.dial(server.gateway.http, origin="https://shop.example")
    assert "Location" in answer.headers["access-control-expose-headers"]
    assert re.fullmatch(f"{CALLS}/rtc_[0-9a-f]{{24}}", answer.headers["location"])
    await server.gateway.http.post(f"{caller.location}/hangup")
    await caller.close()


async def test_a_form_has_the_session(server):
    caller = Caller()
    session = {"type": "realtime", "model": "gpt-realtime", "instructions": "Sing.", **NO_TURNS}
    parts = {
        "sdp": (None, await caller.offer(), "application/sdp"),
        "session": (None, json.dumps(session), "application/json"),
    }
    answer = await server.gateway.http.post(CALLS, files=parts)
    assert answer.status_code == 201, answer.text
    await caller.begin(answer.text)
    created = await caller.until("session.created")
    assert created["session"]["instructions"] == "Sing."
    assert created["session"]["audio"]["input"]["turn_detection"] is None
    await caller.close()


async def test_an_offer_of_one_port(server):
    """As browsers make it with `bundlePolicy: "max-bundle"`."""
    caller = Caller()
    offer = re.sub(r"m=application \d+", "m=application 0", await caller.offer())
    answer = await server.gateway.http.post(CALLS, content=offer, headers=SDP)
    await caller.begin(answer.text)
    await caller.until("session.created")
    await caller.close()


def _without(line: str, offer: str) -> str:
    return "\r\n".join(each for each in offer.split("\r\n") if not each.startswith(line))


@pytest.mark.parametrize(
    ("change", "code"),
    [
        (lambda offer: "", "invalid_offer"),
        (lambda offer: "v=0\r\nm=", "invalid_offer"),
        (lambda offer: "hello", "invalid_offer"),
        (lambda offer: offer.replace("opus/48000/2", "speex/8000"), "invalid_offer"),
        (lambda offer: _without("a=fingerprint", offer), "invalid_offer"),
        (lambda offer: _without("a=group", offer), "invalid_offer"),
        (lambda offer: _without("a=rtcp", offer), "invalid_offer"),
        (lambda offer: _without("a=mid", offer), "invalid_offer"),
        (lambda offer: offer.replace("m=audio", "m=audio 99999999999999999999"), "invalid_offer"),
        (lambda offer: offer.replace("a=setup:actpass", "a=setup:\x00"), "invalid_offer"),
        (lambda offer: offer + "a=x\r\n" * 20_000, "invalid_offer"),
        (lambda offer: offer + "m=audio 9 RTP/AVP 0\r\n" * 20, "invalid_offer"),
    ],
)
async def test_offers_that_are_none(server, change, code):
    caller = Caller()
    answer = await server.gateway.http.post(CALLS, content=change(await caller.offer()), headers=SDP)
    await caller.close()
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert (error["code"], error["param"]) == (code, "sdp")
    assert error["message"].startswith("sdp: ")


async def test_other_refusals(server):
    http, caller = server.gateway.http, Caller()
    offer = await caller.offer()
    refusals = [
        (await http.post(CALLS, content=offer), 400, "invalid_body"),
        (await http.post(CALLS, json={"sdp": offer}), 400, "invalid_body"),
        (await http.post(CALLS, content=b"\xff\xfe", headers=SDP), 400, "invalid_offer"),
        (await http.post(CALLS, files={"sdp": (None, offer), "session": (None, "[")}), 400, "invalid_json"),
        (await http.post(CALLS, files={"sdp": (None, offer), "session": (None, "[]")}), 400, "invalid_type"),
        (await http.post(CALLS, files={"session": (None, "{}")}), 400, "missing_required_parameter"),
        (await http.post(CALLS, files={"sdp": (None, offer), "session": (None, '{"audio": 3}')}), 400, "invalid_type"),
        (await http.post(f"{CALLS}?model=nobody", content=offer, headers=SDP), 404, "model_not_found"),
        (await http.post(f"{CALLS}/rtc_1/hangup"), 404, "call_id_not_found"),
        (await http.post(f"{CALLS}/..%2Fhealth/hangup"), 404, None),
        (await http.post(CALLS, content=offer, headers=SDP | bearer("nobody")), 401, "invalid_api_key"),
    ]
    await caller.close()
    for answer, status, code in refusals:
        assert (answer.status_code, answer.json()["error"]["code"]) == (
            status,
            code or answer.json()["error"]["code"],
        ), answer.text


async def test_more_calls_than_may_be(server):
    callers = [Caller() for _ in range(MAX_CALLS + 1)]
    answers = [await each.dial(server.gateway.http) for each in callers]
    assert [each.status_code for each in answers] == [201] * MAX_CALLS + [429]
    assert answers[-1].json()["error"]["code"] == "call_limit"
    assert answers[-1].headers["retry-after"]
    for each in callers:
        if each.location:
            await server.gateway.http.post(f"{each.location}/hangup")
        await each.close()


async def test_ten_calls_on_one_port(server):
    async def talk() -> None:
        async with calling(server.gateway.http) as caller:
            await ask(caller)
            await caller.until("output_audio_buffer.stopped")
            assert max(caller.heard) > 1000

    await asyncio.gather(*(talk() for _ in range(10)))  # each waits for as long as one call does


@pytest.fixture
def impatient(monkeypatch):
    """With calls that never begin."""
    monkeypatch.setattr(ice, "CONSENT_S", CONSENT_S)
    monkeypatch.setattr(peer, "_CONNECT_S", 1.0)


@pytest.mark.parametrize("end", ENDS, ids=lambda end: end.__name__)
async def test_nothing_is_left_of_a_call(server, end, monkeypatch):
    if end is vanish:
        monkeypatch.setattr(ice, "CONSENT_S", CONSENT_S)
    async with calling(server.gateway.http) as caller:
        await end(server, caller)
    await server.all_gone()


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("way", ["never comes", "another's certificate", "only checks"])
async def test_nothing_is_left_of_a_call_that_never_began(server, way):
    caller = Caller()
    offer = await caller.offer()
    if way == "another's certificate":
        offer = re.sub(r"(a=fingerprint:\S+ )\S\S", r"\g<1>00", offer)
    answer = await server.gateway.http.post(CALLS, content=offer, headers=SDP)
    if way == "another's certificate":
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(3):
                await caller.begin(answer.text)
    elif way == "only checks":
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(3):
                await caller.begin(re.sub(r"(a=fingerprint:\S+ )\S\S", r"\g<1>00", answer.text))
    if way == "never comes":
        await server.all_gone()
    await caller.close()
    await server.all_gone()


async def test_a_session_that_ends_ends_its_call():
    async with call_server(realtime_session_s=20) as server, calling(server.gateway.http) as caller:
        put_forward(20)  # less than would end the connection
        error = await caller.until("error")
        assert error["error"]["code"] == "session_expired"
        await server.all_gone()


async def test_without_a_process_of_calls():
    async with running() as gateway:
        answer = await gateway.http.post(CALLS, content="v=0", headers=SDP)
        assert (answer.status_code, answer.json()["error"]["code"]) == (501, "webrtc_off")
        assert "--webrtc" in answer.json()["error"]["message"]
    async with running(webrtc="http://127.0.0.1:9") as gateway:
        answer = await gateway.http.post(CALLS, content="v=0", headers=SDP)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "calls_unavailable")
