"""What a request takes of its key's limits: as much as it has answers, drawings and minutes of sound."""

import asyncio
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio

from cli.plan import DIT_PIPELINE
from gateway.access import api_key
from gateway.access.api_key import ApiKey, ApiKeyEntry
from gateway.access.api_keys import digest, new_key
from gateway.errors import ApiError
from gateway.http import bodies
from tests.pure.test_api_keys import ASK, bearer, counted, entry, write
from tests.support.clients.pictures import ASK as DRAW
from tests.support.samples.media import wav
from tests.support.systems.gateway import Running, running
from tests.support.systems.routes import endpoints

pytestmark = pytest.mark.asyncio(loop_scope="module")
FOUR_A_MINUTE, ONE_AT_A_TIME, LISTENS, TALKS, ABORTS, FREE = [new_key() for _ in range(6)]
PROMPTS: dict[str, Any] = {"model": "scripted", "prompt": ["a", "b", "c"], "n": 2}
IDS: dict[str, Any] = {"token_ids": [5, 6], "sampling_params": {"n": 3}}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def with_keys(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Running]:
    file = write(
        tmp_path_factory.mktemp("keys") / "keys.yaml",
        entry("bob", FOUR_A_MINUTE, requests_per_minute=4),
        entry("dave", ONE_AT_A_TIME, max_concurrent_requests=1),
        entry("erin", LISTENS, requests_per_minute=4),
        entry("frank", TALKS, requests_per_minute=4),
        entry("grace", ABORTS, requests_per_minute=4),
        entry("carol", FREE),
    )
    async with running(api_keys_file=file, max_running_requests=8) as gateway:
        yield gateway


@pytest_asyncio.fixture(loop_scope="module")
async def gateway(with_keys: Running) -> AsyncIterator[Running]:
    yield with_keys
    await with_keys.reset()


async def post(gateway: Running, path: str, body: dict[str, Any], key: str) -> httpx.Response:
    return await gateway.http.post(path, json=body, headers=bearer(key))


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_beams_are_answers_of_the_key(gateway: Running, path: str) -> None:
    body = (ASK if path.startswith("/v1/chat") else {"prompt": "a"}) | {"n": 3, "use_beam_search": True}
    refused = await post(gateway, path, body, ONE_AT_A_TIME)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "n")
    assert not gateway.scripts["thinker"].requests


@pytest.mark.parametrize(
    ("path", "body", "answers"),
    [
        ("/v1/chat/completions", ASK | {"n": 3}, 3),
        ("/v1/chat/completions", ASK | {"n": 3, "stream": True}, 3),
        ("/v1/completions", PROMPTS, 6),
        ("/v1/completions", PROMPTS | {"stream": True}, 6),
        ("/inference/v1/generate", IDS, 3),
    ],
)
async def test_answers_run_as_places_of_the_key_come_free(
    gateway: Running, path: str, body: dict[str, Any], answers: int
) -> None:
    thinker = gateway.scripts["thinker"]
    thinker.hold = True
    asking = asyncio.create_task(post(gateway, path, body, ONE_AT_A_TIME))
    await thinker.holding.wait()
    await asyncio.sleep(0.15)  # longer than a place is waited for
    assert thinker.running == 1
    assert (await post(gateway, "/v1/chat/completions", ASK, ONE_AT_A_TIME)).status_code == 429
    thinker.go_on()
    answered = await asking
    assert answered.status_code == 200, answered.text
    assert len(thinker.requests) == answers
    if "stream" not in body:
        assert [choice["index"] for choice in answered.json()["choices"]] == list(range(answers))
    assert counted("quartet_gateway_key_running_requests", key="dave") == 0


async def test_further_answers_leave_half_of_the_gateway_to_others(gateway: Running) -> None:
    thinker = gateway.scripts["thinker"]
    thinker.hold = True
    asking = asyncio.create_task(post(gateway, "/v1/completions", PROMPTS | {"n": 8}, FREE))
    await gateway.until(lambda: thinker.running >= 4)
    await asyncio.sleep(0.15)
    assert thinker.running == 4
    others = [asyncio.create_task(post(gateway, "/v1/chat/completions", ASK, FREE)) for _ in range(4)]
    await gateway.until(lambda: thinker.running == 8)
    thinker.go_on()
    assert [each.status_code for each in [await asking, *[await other for other in others]]] == [200] * 5
    assert gateway.app.state.gateway.admission.in_flight == 0


async def test_answers_count_for_the_rate(gateway: Running) -> None:
    refused = await post(gateway, "/v1/completions", PROMPTS, FOUR_A_MINUTE)
    assert refused.status_code == 400
    error = refused.json()["error"]
    assert (error["param"], error["code"]) == ("n", "rate_limit_exceeded")
    assert error["message"].startswith("n: 6 answers are too many for the API key 'bob', which may have 4 a minute")
    assert (await post(gateway, "/v1/chat/completions", ASK | {"n": 3}, FOUR_A_MINUTE)).status_code == 200
    refused = await post(gateway, "/v1/chat/completions", ASK | {"n": 2}, FOUR_A_MINUTE)
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "rate_limit_exceeded")
    assert 1 <= int(refused.headers["retry-after"]) <= 60
    assert (await post(gateway, "/v1/chat/completions", ASK, FOUR_A_MINUTE)).status_code == 200  # the refused took none
    assert (await post(gateway, "/v1/chat/completions", ASK, FOUR_A_MINUTE)).status_code == 429


async def test_a_long_sound_counts_for_the_rate(gateway: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is answered; what it is beyond the minute delays what follows."""
    monkeypatch.setattr(api_key, "SOUND_S", 1.0)  # a minute of sound is listened to for seconds
    files = {"file": ("tone.wav", wav(2.5))}
    form = {"files": files, "headers": bearer(LISTENS)}
    assert (await gateway.http.post("/v1/audio/transcriptions", **form)).status_code == 200
    assert (await post(gateway, "/v1/chat/completions", ASK, LISTENS)).status_code == 200
    assert (await post(gateway, "/v1/chat/completions", ASK, LISTENS)).status_code == 429


async def test_conversations_take_a_place_and_of_the_rate(gateway: Running) -> None:
    item = {"items": [{"role": "user", "content": "hi"}]}
    made = await post(gateway, "/v1/conversations", {}, TALKS)
    path = f"/v1/conversations/{made.json()['id']}"
    changes: list[tuple[str, dict[str, Any]]] = [
        ("/v1/conversations", {}),
        (path, {"metadata": {"a": "b"}}),
        (f"{path}/items", item),
    ]
    assert [(await post(gateway, *change, key=TALKS)).status_code for change in changes] == [200, 200, 200]
    assert (await gateway.http.get(f"{path}/items", headers=bearer(TALKS))).status_code == 200  # counts for nothing
    assert [(await post(gateway, *change, key=TALKS)).status_code for change in changes] == [429, 429, 429]
    assert (await gateway.http.delete(path, headers=bearer(TALKS))).status_code == 200

    thinker, made = gateway.scripts["thinker"], await post(gateway, "/v1/conversations", {}, ONE_AT_A_TIME)
    thinker.hold = True
    chatting = asyncio.create_task(post(gateway, "/v1/chat/completions", ASK, ONE_AT_A_TIME))
    await thinker.holding.wait()
    path = f"/v1/conversations/{made.json()['id']}"
    for place, change in [("/v1/conversations", {}), (path, {"metadata": {"a": "b"}}), (f"{path}/items", item)]:
        refused = await post(gateway, place, change, ONE_AT_A_TIME)
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "rate_limit_exceeded")
    thinker.go_on()
    assert (await chatting).status_code == 200


# What ends work, and what administrators do.
NEED_NO_PLACE = {
    *("/v1/responses/{response_id}/cancel", "/v1/batches/{batch_id}/cancel", "/inference/v1/abort_requests"),
    *("/start_profile", "/stop_profile"),
    *("/v1/load_lora_adapter", "/v1/unload_lora_adapter"),
    *(f"{prefix}/v1/realtime/calls/{{call_id}}/hangup" for prefix in ("", "/openai")),
    "/v1/live/sessions/{session_id}/hangup",
}


async def test_whatever_is_asked_for_takes_a_place(gateway: Running) -> None:
    thinker = gateway.scripts["thinker"]
    thinker.hold = True
    chatting = asyncio.create_task(post(gateway, "/v1/chat/completions", ASK, ONE_AT_A_TIME))
    await thinker.holding.wait()
    paths = {path for method, path in endpoints(gateway.app) if method == "POST"}
    assert len(paths - NEED_NO_PLACE) > 20
    answers = {path: await post(gateway, re.sub(r"\{\w+\}", "x", path), {}, ONE_AT_A_TIME) for path in paths}
    assert {path for path, answer in answers.items() if answer.status_code != 429} == NEED_NO_PLACE
    thinker.go_on()
    assert (await chatting).status_code == 200


async def test_what_ends_requests_counts_for_the_rate_and_needs_no_place(gateway: Running) -> None:
    abort, thinker = {"request_ids": ["mine"]}, gateway.scripts["thinker"]
    thinker.hold = True
    mine = IDS | {"request_id": "mine", "sampling_params": {}}
    asking = asyncio.create_task(post(gateway, "/inference/v1/generate", mine, ONE_AT_A_TIME))
    await thinker.holding.wait()
    assert (await post(gateway, "/inference/v1/abort_requests", abort, ONE_AT_A_TIME)).status_code == 200
    assert (await asking).json()["choices"][0]["finish_reason"] == "abort"
    aborts = [await post(gateway, "/inference/v1/abort_requests", abort, ABORTS) for _ in range(5)]
    assert [each.status_code for each in aborts] == [200] * 4 + [429]


async def test_an_item_has_no_more_than_a_mebibyte_of_text(gateway: Running) -> None:
    picture = {"type": "input_image", "image_url": f"data:image/png;base64,{'A' * 2**20}"}
    for content, status in (([picture], 200), ("x" * 2**20, 400)):
        item = {"items": [{"role": "user", "content": content}]}
        answer = await post(gateway, "/v1/conversations", item, FREE)
        assert answer.status_code == status, answer.text[:200]
    assert answer.json()["error"]["param"] == "items[0]"


def key_with(**limits: Any) -> ApiKey:
    return ApiKey(ApiKeyEntry(name="erin", sha256=digest("erin"), **limits))


def is_admitted(key: ApiKey) -> bool:
    try:
        with key.request():
            return True
    except ApiError:
        return False


async def test_minutes_of_sound_count_for_the_minutes_that_follow(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    at_s = 1000.0
    monkeypatch.setattr("time.monotonic", lambda: at_s)
    key = key_with(requests_per_minute=3)
    assert is_admitted(key)
    key.owe(60.0)  # a minute is the request's own
    assert is_admitted(key)
    key.owe(4.5 * 60)  # of its four minutes more, three are of the next two minutes
    for at_s, expected in [(1000.0, False), (1059.0, False), (1061.0, False), (1119.0, False), (1121.0, True)]:
        assert is_admitted(key) is expected, at_s


async def test_drawings_count_as_requests(tmp_path: Path) -> None:
    file = write(
        tmp_path / "keys.yaml",
        entry("bob", FOUR_A_MINUTE, requests_per_minute=2),
        entry("dave", ONE_AT_A_TIME, max_concurrent_requests=2),
    )
    async with running(DIT_PIPELINE, api_keys_file=file) as gateway:
        for key, most in ((FOUR_A_MINUTE, "2 a minute"), (ONE_AT_A_TIME, "2 at a time")):
            refused = await post(gateway, "/v1/images/generations", DRAW | {"n": 3}, key)
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, "n")
            assert most in refused.json()["error"]["message"]
        assert (await post(gateway, "/v1/images/generations", DRAW | {"n": 2}, FOUR_A_MINUTE)).status_code == 200
        assert (await post(gateway, "/v1/images/generations", DRAW, FOUR_A_MINUTE)).status_code == 429

        gateway.scripts["dit"].hold = True
        drawing = asyncio.create_task(post(gateway, "/v1/images/generations", DRAW | {"n": 2}, ONE_AT_A_TIME))
        await gateway.scripts["dit"].holding.wait()
        assert counted("quartet_gateway_key_running_requests", key="dave") == 2
        assert (await post(gateway, "/v1/images/generations", DRAW, ONE_AT_A_TIME)).status_code == 429
        gateway.scripts["dit"].go_on()
        assert (await drawing).status_code == 200
        assert counted("quartet_gateway_key_running_requests", key="dave") == 0


FULL = "too_many_large_bodies"


async def test_what_requests_hold_is_limited_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bodies, and what is read of the store. A small request always fits."""
    monkeypatch.setattr(bodies, "FREE_BYTES", 10_000)
    keys = [new_key() for _ in range(3)]
    file = write(tmp_path / "keys.yaml", *(entry(name, key) for name, key in zip("abc", keys, strict=True)))
    text = "x" * 110_000
    large = {"model": "scripted", "messages": [{"role": "user", "content": text}]}
    async with running(api_keys_file=file, max_body_bytes=200_000) as gateway:
        talk = (
            await post(gateway, "/v1/conversations", {"items": [{"role": "user", "content": text}]}, keys[0])
        ).json()
        items = f"/v1/conversations/{talk['id']}/items"
        continued = {"model": "scripted", "input": "hi", "conversation": talk["id"]}
        first = (await post(gateway, "/v1/responses", {"model": "scripted", "input": text}, keys[0])).json()["id"]
        following = {"model": "scripted", "input": "hi", "previous_response_id": first}
        thinker = gateway.scripts["thinker"]
        thinker.hold = True
        chat = "/v1/chat/completions"

        async def begun(body: dict[str, Any], key: str) -> asyncio.Task[httpx.Response]:
            running_now = thinker.running
            asking = asyncio.create_task(post(gateway, chat, body, key))
            await gateway.until(lambda: thinker.running > running_now)
            return asking

        asking = [await begun(large, keys[0])]
        refused = [
            await post(gateway, chat, large, keys[0]),
            await post(gateway, "/v1/responses", continued, keys[0]),
            await post(gateway, "/v1/responses", following, keys[0]),
            *[await gateway.http.get(path, headers=bearer(keys[0])) for path in (items, f"/v1/responses/{first}")],
            await gateway.http.get(f"/v1/responses/{first}/input_items", headers=bearer(keys[0])),
        ]
        refused.append(await post(gateway, "/v1/messages", large | {"max_tokens": 5}, keys[2]))
        assert [(each.status_code, each.headers.get("retry-after")) for each in refused] == [(503, "5")] * 6 + [
            (529, "5")
        ]
        assert {each.json()["error"].get("code", FULL) for each in refused} == {FULL}
        asking.append(await begun(ASK, keys[0]))
        thinker.go_on()
        assert [(await each).status_code for each in asking] == [200] * 2
        assert (await post(gateway, chat, large, keys[0])).status_code == 200
        assert (await gateway.http.get(items, headers=bearer(keys[0]))).status_code == 200


async def test_biases_are_limited(gateway: Running) -> None:
    """Each of 1,024 answers has a copy of them."""
    bias = {str(token): 1 for token in range(1025)}
    refused = await post(gateway, "/v1/completions", PROMPTS | {"logit_bias": bias}, FREE)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "logit_bias")


async def test_drawings_take_places_at_once() -> None:
    key = key_with(max_concurrent_requests=3)
    with key.request():
        with key.at_once(2, "n"):
            assert not is_admitted(key)
        assert is_admitted(key)
        with pytest.raises(ApiError, match="4 answers are too many") as refused, key.at_once(3, "n"):
            pass
        assert refused.value.status == 400
        with key.request(), pytest.raises(ApiError, match="at a time") as refused, key.at_once(2, "n"):
            pass
        assert refused.value.status == 429
        assert key.one_more() is not None
