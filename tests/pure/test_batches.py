"""`/v1/batches`, with OpenAI's client: what lines come to, faults, the end, and another gateway's part in it."""

import asyncio
import base64
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest
from openai.types import Batch

from cli.plan import DIT_PIPELINE as DIT
from gateway.access.api_keys import new_key
from gateway.answers.batches import runner
from gateway.answers.batches.store import BatchLost, BatchStore, StoredBatch
from gateway.answers.batches.tables import batches
from tests.pure.test_api_keys import bearer, entry, write
from tests.support.clients.pictures import ASK, pixels, png, same, shown
from tests.support.scripted.dit import DRAWN_SEED
from tests.support.scripted.thinker import PIECES
from tests.support.systems.gateway import Running, running
from tests.support.systems.postgres import Place

TEXT = "".join(PIECES)
CHATS, SPEECH = "/v1/chat/completions", "/v1/audio/speech"
QUESTION = Path(__file__).parents[2] / "cli" / "assets" / "question.wav"
ENDED = ("completed", "failed", "expired", "cancelled")


@pytest.fixture
async def gateway(tmp_path: Path) -> AsyncIterator[Running]:
    async with running(files_dir=tmp_path / "files") as started:
        yield started


def line_of(endpoint: str, custom_id: str, body: dict[str, Any]) -> dict[str, Any]:
    return {"custom_id": custom_id, "method": "POST", "url": endpoint, "body": {"model": "scripted", **body}}


def chat(number: int, **body: Any) -> dict[str, Any]:
    asked = {"messages": [{"role": "user", "content": f"line {number}"}], **body}
    return line_of(CHATS, f"id-{number}", asked)


async def upload(gateway: Running, lines: list[Any], **options: Any) -> str:
    text = "\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines)
    made = await gateway.openai.files.create(file=("lines.jsonl", text.encode()), purpose="batch", **options)
    return made.id


async def begin(gateway: Running, lines: list[Any], endpoint: Any = CHATS) -> Batch:
    file_id = await upload(gateway, lines)
    return await gateway.openai.batches.create(input_file_id=file_id, endpoint=endpoint, completion_window="24h")


async def ended(gateway: Running, batch: Batch) -> Batch:
    async with asyncio.timeout(120):
        while (now := await gateway.openai.batches.retrieve(batch.id)).status not in ENDED:
            await asyncio.sleep(0.05)
    return now


async def lines_of(gateway: Running, file_id: str | None) -> list[dict[str, Any]]:
    assert file_id is not None
    return [json.loads(line) for line in (await gateway.openai.files.content(file_id)).text.splitlines()]


async def test_each_line_is_answered(gateway: Running) -> None:
    lines = [chat(0), chat(1, temperature=9), "", chat(2, stream=False), chat(3, stream=True)]
    batch = await begin(gateway, lines)
    assert (batch.object, batch.endpoint, batch.completion_window) == ("batch", CHATS, "24h")
    done = await ended(gateway, batch)
    assert done.status == "completed"
    assert done.request_counts is not None
    assert done.request_counts.model_dump() == {"total": 4, "completed": 2, "failed": 2}
    assert done.created_at <= (done.in_progress_at or 0) <= (done.finalizing_at or 0) <= (done.completed_at or 0)
    results = await lines_of(gateway, done.output_file_id)
    assert [line["custom_id"] for line in results] == ["id-0", "id-2"]
    for line in results:
        assert line["error"] is None
        assert (line["response"]["status_code"], bool(line["response"]["request_id"])) == (200, True)
        assert line["response"]["body"]["choices"][0]["message"]["content"] == TEXT
    failed = [(line["custom_id"], line["response"]) for line in await lines_of(gateway, done.error_file_id)]
    assert [(name, response["status_code"]) for name, response in failed] == [("id-1", 400), ("id-3", 400)]
    assert [response["body"]["error"]["param"] for _, response in failed] == ["temperature", "stream"]
    starts = gateway.scripts["thinker"].requests
    assert {start.priority for start in starts} == {2**31 - 1}
    assert [each.id for each in (await gateway.openai.batches.list()).data] == [batch.id]


async def test_speech_is_in_base64_and_its_events_are_a_text(gateway: Running) -> None:
    body = {"input": "Hello.", "voice": "ethan", "response_format": "pcm"}
    lines = [line_of(SPEECH, "sound", body), line_of(SPEECH, "events", body | {"stream_format": "sse"})]
    done = await ended(gateway, await begin(gateway, lines, SPEECH))
    sound, told = (line["response"]["body"] for line in await lines_of(gateway, done.output_file_id))
    assert sound["content_type"].startswith("audio/")
    assert len(sound["data"]) > 1000
    assert json.loads(told.split("\n\n")[0].removeprefix("data: "))["type"] == "speech.audio.delta"


@pytest.mark.parametrize("endpoint", ["/v1/audio/transcriptions", "/v1/audio/translations"])
async def test_transcriptions(gateway: Running, endpoint: str) -> None:
    uploaded = await gateway.openai.files.create(file=QUESTION, purpose="user_data")
    url = f"data:audio/wav;base64,{base64.b64encode(QUESTION.read_bytes()).decode()}"
    good = {
        "of a file": {"file_id": uploaded.id},
        "of a URL": {"file_url": url, "temperature": 0.5},
        "subtitles": {"file_id": uploaded.id, "response_format": "srt"},
        "text": {"file_url": url, "response_format": "text"},
    }
    bad = {
        "no file": ({}, "file"),
        "two files": ({"file_id": uploaded.id, "file_url": url}, "file_url"),
        "another file": ({"file_id": "file-1"}, "file_id"),
        "another host": ({"file_url": "http://127.0.0.1/a.wav"}, "file_url"),
        "a stream": ({"file_url": url, "stream": True}, "stream"),
        "a format": ({"file_url": url, "response_format": "ass"}, "response_format"),
    }
    asked = good | {name: body for name, (body, _) in bad.items()}
    lines = [line_of(endpoint, name, body) for name, body in asked.items()]
    done = await ended(gateway, await begin(gateway, lines, endpoint))
    results = await lines_of(gateway, done.output_file_id)
    bodies = {line["custom_id"]: line["response"]["body"] for line in results}
    assert list(bodies) == list(good)
    assert (bodies["of a file"]["text"], bodies["of a URL"]["text"]) == (TEXT, TEXT)
    assert bodies["text"] == f"{TEXT}\n"
    assert bodies["subtitles"].startswith("1\n00:00:00,")
    assert TEXT in bodies["subtitles"]
    failed = await lines_of(gateway, done.error_file_id)
    errors = {line["custom_id"]: (line["response"]["status_code"], line["response"]["body"]) for line in failed}
    for name, (_, param) in bad.items():
        status, body = errors.pop(name)
        assert (status, body["error"]["param"]) == (400, param), name
    assert not errors
    starts = gateway.scripts["thinker"].requests
    assert [start.priority for start in starts] == [2**31 - 1] * len(good)


async def test_edits_of_images(tmp_path: Path) -> None:
    endpoint = "/v1/images/edits"
    async with running(DIT, files_dir=tmp_path / "files", jobs_dir=tmp_path / "jobs") as gateway:
        uploaded = await gateway.openai.files.create(file=("a.png", png(3)), purpose="vision")
        ask = ASK | {"images": [{"file_id": uploaded.id}], "mask": {"image_url": shown(png(4))["image_url"]["url"]}}
        lines = [line_of(endpoint, "good", ask), line_of(endpoint, "a stream", ask | {"stream": True})]
        done = await ended(gateway, await begin(gateway, lines, endpoint))
        (result,) = await lines_of(gateway, done.output_file_id)
        same(pixels(result["response"]["body"]["data"][0]["b64_json"]), DRAWN_SEED)
        (failed,) = await lines_of(gateway, done.error_file_id)
        assert (failed["custom_id"], failed["response"]["body"]["error"]["param"]) == ("a stream", "stream")
        (start,) = gateway.scripts["dit"].requests
        assert ([image.field for image in start.images], start.mask.field) == (["images[0]"], "mask")
        assert bytes(gateway.scripts["dit"].media) == png(3) + png(4)


@pytest.mark.parametrize(
    ("lines", "code", "line"),
    [
        ([], "empty_file", None),
        ([chat(0), "{"], "invalid_json_line", 2),
        (["[]"], "invalid_json_line", 1),
        ([chat(0), chat(0)], "duplicate_custom_id", 2),
        ([chat(0) | {"custom_id": ""}], "missing_required_parameter", 1),
        ([chat(0) | {"method": "GET"}], "invalid_method", 1),
        ([chat(0) | {"url": "/v1/embeddings"}], "mismatched_endpoint", 1),
        ([chat(0) | {"body": 1}], "missing_required_parameter", 1),
    ],
)
async def test_a_file_with_a_fault_does_nothing(
    gateway: Running, lines: list[Any], code: str, line: int | None
) -> None:
    done = await ended(gateway, await begin(gateway, [*lines, " "]))
    assert done.status == "failed"
    assert done.errors is not None
    assert [(error.code, error.line) for error in done.errors.data or ()] == [(code, line)]
    assert not gateway.scripts["thinker"].requests


async def test_what_is_refused(gateway: Running) -> None:
    with pytest.raises(openai.BadRequestError, match="there is no file"):
        await gateway.openai.batches.create(input_file_id="file-1", endpoint=CHATS, completion_window="24h")
    for batch_id in ("batch_1", "batch_%00"):
        assert (await gateway.http.get(f"/v1/batches/{batch_id}")).status_code == 404
    file_id = await upload(gateway, [chat(0)])
    sent = {"input_file_id": file_id, "endpoint": CHATS, "completion_window": "24h"}
    for change in ({"endpoint": "/v1/files"}, {"completion_window": "1h"}, {"more": 1}):
        refused = await gateway.http.post("/v1/batches", json=sent | change)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, next(iter(change)))


async def test_a_batch_waits_for_others(gateway: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """It begins no line while somebody else is answered."""
    monkeypatch.setattr(runner, "_STARVED_S", 3600.0)
    thinker = gateway.scripts["thinker"]
    thinker.hold, thinker.after = True, 2
    live = asyncio.create_task(gateway.chat({"model": "scripted", "messages": [{"role": "user", "content": "me"}]}))
    await thinker.holding.wait()
    batch = await begin(gateway, [chat(n) for n in range(3)])
    async with asyncio.timeout(60):
        while (await gateway.openai.batches.retrieve(batch.id)).status == "validating":
            await asyncio.sleep(0.02)
    assert len(thinker.requests) == 1
    thinker.go_on()
    assert (await live).status_code == 200
    done = await ended(gateway, batch)
    assert (done.status, len(thinker.requests)) == ("completed", 4)


async def test_a_batch_waits_for_those_of_other_gateways(gateway: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "_STARVED_S", 3600.0)
    thinker = gateway.scripts["thinker"]
    (replica,) = gateway.app.state.gateway.pipeline.by_name["thinker"].replicas.values()
    thinker.running += 1  # of another gateway
    async with asyncio.timeout(60):
        while not replica.of_others:
            await asyncio.sleep(0.02)
    batch = await begin(gateway, [chat(0)])
    async with asyncio.timeout(60):
        while (await gateway.openai.batches.retrieve(batch.id)).status == "validating":
            await asyncio.sleep(0.02)
    assert not thinker.requests
    thinker.running -= 1
    assert (await ended(gateway, batch)).status == "completed"


async def test_a_cancelled_batch_has_what_is_done(gateway: Running) -> None:
    thinker = gateway.scripts["thinker"]
    thinker.hold, thinker.after = True, 2
    batch = await begin(gateway, [chat(n) for n in range(20)])
    await thinker.holding.wait()
    assert (await gateway.openai.batches.cancel(batch.id)).status == "cancelling"
    await asyncio.sleep(0)
    thinker.go_on()
    done = await ended(gateway, batch)
    results = [
        line for name in (done.output_file_id, done.error_file_id) if name for line in await lines_of(gateway, name)
    ]
    assert sorted(line["custom_id"] for line in results) == sorted(f"id-{n}" for n in range(20))
    with pytest.raises(openai.ConflictError):
        await gateway.openai.batches.cancel(batch.id)


async def test_each_key_has_its_own(tmp_path: Path) -> None:
    alice, bob = new_key(), new_key()
    keys = write(tmp_path / "keys.yaml", entry("alice", alice, requests_per_minute=20), entry("bob", bob))
    async with running(files_dir=tmp_path / "files", api_keys_file=keys) as gateway:
        file_id = await upload(gateway, [chat(n) for n in range(30)], extra_headers=bearer(alice))
        named = await gateway.http.post("/v1/audio/transcriptions", json={"file_id": file_id}, headers=bearer(bob))
        assert (named.status_code, named.json()["error"]["code"]) == (400, "file_not_found")
        wanted: dict[str, Any] = {"input_file_id": file_id, "endpoint": CHATS, "completion_window": "24h"}
        with pytest.raises(openai.BadRequestError, match="there is no file"):
            await gateway.openai.batches.create(**wanted, extra_headers=bearer(bob))
        batch = await gateway.openai.batches.create(**wanted, extra_headers=bearer(alice))
        async with asyncio.timeout(120):
            while (now := await gateway.http.get(f"/v1/batches/{batch.id}", headers=bearer(alice))).json()[
                "status"
            ] not in ENDED:
                await asyncio.sleep(0.1)
        assert now.json()["request_counts"] == {"total": 30, "completed": 30, "failed": 0}  # beside the key's rate
        for path in (f"batches/{batch.id}", f"files/{now.json()['output_file_id']}/content"):
            assert (await gateway.http.get(f"/v1/{path}", headers=bearer(bob))).status_code == 404
        assert (await gateway.http.get("/v1/batches", headers=bearer(bob))).json()["data"] == []


async def test_another_gateway_goes_on_with_it(tmp_path: Path) -> None:
    """With the lines that have no result yet."""
    async with running(files_dir=tmp_path / "files") as first:
        thinker = first.scripts["thinker"]
        batch = await begin(first, [chat(n) for n in range(12)])
        async with asyncio.timeout(60):
            while not thinker.ended:
                await asyncio.sleep(0.01)
    answered = len(thinker.ended)
    async with running(files_dir=tmp_path / "files") as second:
        done = await ended(second, batch)
        results = await lines_of(second, done.output_file_id)
        assert sorted(line["custom_id"] for line in results) == sorted(f"id-{n}" for n in range(12))
        assert len(second.scripts["thinker"].requests) <= 12 - answered + 4  # four lines were in progress


async def test_a_gateway_that_has_lost_it_changes_nothing(place: Place) -> None:
    body = {"status": "in_progress", "expires_at": 2**40, "request_counts": {"total": 2}}
    async with BatchStore(place(), "slow", 60) as slow, BatchStore(place(), "quick", 60) as quick:
        await slow.add(StoredBatch("batch_1", "ann", body, cancels=False), ["b", "a"])
        assert await slow.take(["a"]) is None  # of another system
        taken = await slow.take(["a", "b"])
        assert taken is not None
        assert await quick.take(["a", "b"]) is None
        await slow.add_line("batch_1", 0, False, {"custom_id": "a"})
        await quick.write(lambda db: db.execute(batches.update().values(held_until=0)))
        assert await quick.take(["a", "b"]) is not None
        for call in (slow.renew("batch_1"), slow.save(taken), slow.add_line("batch_1", 1, False, {})):
            with pytest.raises(BatchLost):
                await call
        assert await quick.done("batch_1") == {0}
        await quick.add_line("batch_1", 0, True, {"custom_id": "again"})  # it came to something before
        assert await quick.results("batch_1", False, -1) == [(0, '{"custom_id": "a"}')]
        found = await quick.get("batch_1", "ann")
        assert found is not None
        assert found.body["request_counts"] == {"total": 2, "completed": 1, "failed": 0}
        assert await quick.get("batch_1", "bob") is None
