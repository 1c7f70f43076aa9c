"""What clients hear of a stage that is gone, whoever tells the gateway first, and what only the log does."""

import asyncio
import io
import json
import re
import uuid

import av
import grpc
import httpx
import pytest
from PIL import Image
from structlog.testing import capture_logs

from services.common.errors import (
    DeadlineExceeded,
    InvalidInput,
    NotFound,
    RequestCancelled,
    StageLost,
    Unavailable,
)
from tests.support.systems.gateway import NOT_FOR_CLIENTS

pytestmark = pytest.mark.asyncio(loop_scope="module")
ASK = {"model": "scripted", "messages": [{"role": "user", "content": "hi"}]}
SPEAK = ASK | {"modalities": ["text", "audio"]}
GONE = "the thinker went away while it answered; try again in 1 s"
ADDRESS = "10.1.2.3:50052"

Code = grpc.StatusCode
RAW = [
    (Code.UNAVAILABLE, "Socket closed"),
    (Code.UNAVAILABLE, f"recvmsg:Connection reset by peer; ipv4:{ADDRESS}"),
    (Code.UNAVAILABLE, "GOAWAY received; Error code: 2; Debug Text: "),
    (Code.UNAVAILABLE, f"failed to connect to all addresses; last error: ipv4:{ADDRESS}: Connection refused"),
    (Code.UNKNOWN, "Stream removed (Socket closed)"),
    (Code.UNKNOWN, "Stream removed (recvmsg:Connection reset by peer (104))"),
]


@pytest.fixture
def gateway(speech_gateway):
    return speech_gateway


def only(gateway, reporter: str, error) -> None:
    """Of all stages `reporter` alone ends its call; the others never do."""
    for name, script in gateway.scripts.items():
        script.hold, script.after = name != reporter, 1
    gateway.scripts[reporter].error = error


async def logged(gateway, body: dict) -> tuple[httpx.Response, dict]:
    """The answer, and the request's line in the log: it is written when the client has its answer already."""
    request_id = uuid.uuid4().hex

    def lines() -> list:
        return [line for line in logs if line["event"] == "request" and line["request_id"] == request_id]

    with capture_logs() as logs:
        response = await gateway.chat(body, headers={"x-request-id": request_id})
        await gateway.until(lines)
    (line,) = lines()
    return response, line


@pytest.mark.parametrize("raw", RAW, ids=[text[:14] for _, text in RAW])
async def test_what_grpc_says_of_a_lost_stage_is_not_what_clients_hear(gateway, raw):
    only(gateway, "thinker", raw)
    response, line = await logged(gateway, SPEAK)
    assert (response.status_code, response.headers["retry-after"]) == (503, "1")
    assert response.json()["error"] == {
        "message": GONE,
        "type": "service_unavailable_error",
        "param": None,
        "code": "stage_unavailable",
    }
    assert line["failed_stage"] == "thinker"
    assert gateway.stages.addresses["thinker"] in line["detail"]
    assert raw[1] in line["detail"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("reporter", ["thinker", "talker", "code2wav"])
async def test_the_stage_that_died_is_named_whichever_error_is_first(gateway, reporter, stream):
    """The gateway has no other word than this one: the two other stages stand still."""
    found = StageLost("thinker", f"{ADDRESS}: Stream removed (Socket closed)")
    only(gateway, reporter, (Code.UNAVAILABLE, "Socket closed") if reporter == "thinker" else found)
    response, line = await logged(gateway, SPEAK | {"stream": stream})
    error = json.loads(response.text.split("data: ")[-1])["error"]
    assert (error["code"], error["message"]) == ("stage_unavailable", GONE)
    assert (line["failed_stage"], line["code"]) == ("thinker", "stage_unavailable")
    assert "Socket closed" in line["detail"]


@pytest.mark.parametrize("order", [("talker", "thinker"), ("code2wav", "talker"), ("thinker", "code2wav")])
async def test_the_stage_that_died_is_named_in_any_order(gateway, order):
    for script in gateway.scripts.values():
        script.hold, script.after = True, 1
    for name in ("talker", "code2wav"):
        gateway.scripts[name].error = StageLost("thinker", f"{ADDRESS}: Socket closed")
    gateway.scripts["thinker"].error = (Code.UNKNOWN, "Stream removed (Socket closed)")
    asking = asyncio.create_task(gateway.chat(SPEAK))
    await gateway.held()
    for name in order:
        gateway.scripts[name].release.set()
    assert (await asking).json()["error"]["message"] == GONE


@pytest.mark.parametrize(
    ("error", "status", "message"),
    [
        (Unavailable(f"UCX: {ADDRESS}: Connection reset by remote peer"), 503, "the talker cannot answer now"),
        (NotFound(f"stream at {ADDRESS}"), 503, "the talker gave the request up"),
        (RequestCancelled(f"peer {ADDRESS}"), 503, "the talker gave the request up"),
        ((Code.CANCELLED, f"CANCELLED by {ADDRESS}"), 503, "the talker gave the request up"),
        (DeadlineExceeded(f"no answer of {ADDRESS}"), 504, "the talker took longer than the request's time"),
        (InvalidInput("source.token_ids.arena", f"cannot be opened: {ADDRESS}"), 500, "talker: internal error"),
        ((Code.INTERNAL, f"Received RST_STREAM of {ADDRESS}"), 500, "talker: internal error"),
        ((Code.RESOURCE_EXHAUSTED, f"message larger than max at {ADDRESS}"), 500, "talker: internal error"),
    ],
    ids=["unavailable", "not found", "given up", "cancelled", "deadline", "stream", "reset", "too large"],
)
async def test_no_address_and_no_socket_s_words_are_in_a_body(gateway, error, status, message):
    only(gateway, "talker", error)
    response = await gateway.chat(SPEAK)
    assert response.status_code == status
    assert response.json()["error"]["message"].startswith(message)
    assert not NOT_FOR_CLIENTS.search(response.text)
    assert ("retry-after" in response.headers) == (status == 503)


def said(call) -> str:
    """What a library says of a fault."""
    try:
        return call()
    except (OSError, ValueError, AttributeError) as error:
        return str(error)


XGRAMMAR = "[13:46:57] /project/cpp/json_schema_converter.cc:4950: Cannot find field $defs in #/$defs/A"
RATE = "rate"
LIBRARIES = {
    "Pillow": (lambda: said(lambda: Image.open(io.BytesIO(b"no picture"))), "cannot identify image file"),
    "PyAV": (lambda: said(lambda: av.open(io.BytesIO(b"no sound"))), "Invalid data found when processing input"),
    "FFmpeg": (lambda: "[Errno 1163346256] Not yet implemented in FFmpeg, patches welcome: '<none>'", "Not yet impl"),
    "Python": (lambda: said(lambda: getattr(io.BytesIO(), RATE)), "cannot be read"),
    "an object": (lambda: f"of {object()} and {io.BytesIO()!r}", "of and"),
    "XGrammar": (lambda: XGRAMMAR, "Cannot find field $defs in #/$defs/A"),
    "Python's trace": (lambda: 'File "/usr/lib/python3/site-packages/vllm/x.py", line 3: too long', "too long"),
    "the client's own": (
        lambda: "at most 16:9, by https://a.example/b.png:80 or a/b:5",
        "16:9, by https://a.example/b",
    ),
}
INSIDES = re.compile(r"0x|object at|object has|\.cc|\.py|Errno|patches|<none>|\d\d:\d\d:\d\d|site-packages")


@pytest.mark.parametrize("library", LIBRARIES)
async def test_what_a_library_says_of_itself_is_not_what_clients_hear(gateway, library):
    text, kept = LIBRARIES[library]
    only(gateway, "thinker", InvalidInput("messages[0].content[1]", f"cannot be read: {text()}"))
    status, error = await gateway.refusal(ASK)
    assert (status, error["param"]) == (400, "messages[0].content[1]")
    assert error["message"].startswith("messages[0].content[1]: cannot be read")
    assert kept in error["message"]
    assert not INSIDES.search(error["message"]), error["message"]


async def test_a_refusal_that_comes_by_the_talker_is_in_the_names_of_the_stage_that_refused(gateway):
    refused = InvalidInput("sampling.top_p", "too low")
    refused.origin = "thinker"
    only(gateway, "talker", refused)
    assert (await gateway.refusal(SPEAK))[1]["param"] == "top_p"


async def test_a_stage_that_does_not_serve_is_named_without_its_address(gateway):
    await gateway.stages.servers["thinker"].stop(grace=None)
    await gateway.until(lambda: not gateway.app.state.gateway.pipeline.ready)
    response, line = await logged(gateway, ASK)
    await gateway.stages.start("thinker")
    assert (response.status_code, response.headers["retry-after"]) == (503, "1")
    assert response.json()["error"]["message"] == "the thinker is not serving; try again in 1 s"
    assert gateway.stages.addresses["thinker"] in line["detail"]
