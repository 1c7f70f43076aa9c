"""Uploaded files over HTTP, and what requests make of them."""

import asyncio
import base64
import os
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest
import pytest_asyncio

from tests.support.clients.voices import keys
from tests.support.samples.media import png
from tests.support.systems.gateway import Running, running

pytestmark = pytest.mark.asyncio(loop_scope="module")
FILES = "/v1/files"
TEXT = b"Anna has seven keys.\n"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def kept(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[tuple[Running, Path]]:
    folder = tmp_path_factory.mktemp("state") / "files"
    limits = {"max_file_bytes": 20_000_000, "max_files_bytes": 40_000_000, "max_files_per_key": 5}
    async with running(files_dir=folder, max_body_bytes=1_000_000, **limits) as gateway:
        yield gateway, folder


@pytest_asyncio.fixture(loop_scope="module")
async def gateway(kept: tuple[Running, Path]) -> AsyncIterator[Running]:
    """Without files."""
    yield kept[0]
    async for file in await kept[0].openai.files.list():
        await kept[0].openai.files.delete(file.id)
    await kept[0].reset()


def blobs(folder: Path) -> list[Path]:
    return [each for each in (folder / "blobs").rglob("*") if each.is_file()]


async def test_a_file_from_its_upload_to_its_removal(gateway, kept):
    began = int(time.time())
    file = await gateway.openai.files.create(file=("letters/anna.txt", TEXT), purpose="user_data")
    assert (file.filename, file.bytes, file.object, file.purpose) == ("anna.txt", len(TEXT), "file", "user_data")
    assert (file.status, file.id[:5]) == ("processed", "file-")
    assert began <= file.created_at <= time.time()
    assert file.expires_at - file.created_at == 30 * 86_400
    assert await gateway.openai.files.retrieve(file.id) == file
    content = await gateway.openai.files.content(file.id)
    assert content.content == TEXT
    assert content.response.headers["content-length"] == str(len(TEXT))
    assert content.response.headers["content-disposition"] == "attachment; filename*=UTF-8''anna.txt"
    (blob,) = blobs(kept[1])
    assert (blob.name, blob.read_bytes(), blob.stat().st_mode & 0o777) == (file.id, TEXT, 0o600)
    assert (kept[1] / "blobs").stat().st_mode & 0o777 == 0o700

    deleted = await gateway.openai.files.delete(file.id)
    assert (deleted.id, deleted.deleted, deleted.object) == (file.id, True, "file")
    assert blobs(kept[1]) == []
    for ask in (gateway.openai.files.retrieve, gateway.openai.files.content, gateway.openai.files.delete):
        with pytest.raises(openai.NotFoundError, match="there is no file"):
            await ask(file.id)


async def test_a_large_file_is_never_in_memory_as_a_whole(gateway, kept):
    """Larger than all bodies together may be."""
    content = os.urandom(15_000_000)
    file = await gateway.openai.files.create(file=("a.bin", content), purpose="vision")
    assert file.bytes == len(content)
    assert (await gateway.openai.files.content(file.id)).content == content
    assert gateway.app.state.bodies.size == 0
    assert len(blobs(kept[1])) == 1


async def test_files_are_listed_in_pages(gateway):
    made = []
    for i, purpose in enumerate(("vision", "user_data", "batch", "evals", "assistants")):
        made.append(await gateway.openai.files.create(file=(f"{i}.txt", TEXT), purpose=purpose))
    assert [file async for file in await gateway.openai.files.list()] == made[::-1]
    assert [file async for file in await gateway.openai.files.list(limit=2, order="asc")] == made
    first = await gateway.openai.files.list(limit=2)
    assert (first.data, first.has_more) == ([made[4], made[3]], True)
    rest = await gateway.openai.files.list(limit=3, after=made[3].id)
    assert (rest.data, rest.has_more) == ([made[2], made[1], made[0]], False)
    assert (await gateway.openai.files.list(purpose="batch")).data == [made[2]]
    for query, member in (("limit=0", "limit"), ("limit=10001", "limit"), ("order=up", "order"), ("after=x", "after")):
        response = await gateway.http.get(f"{FILES}?{query}")
        assert (response.status_code, response.json()["error"]["param"]) == (400, member)


@pytest.mark.parametrize("is_first", [True, False])
async def test_the_file_may_be_before_its_fields(gateway, is_first):
    parts: list[Any] = [("purpose", (None, "user_data")), ("file", ("ä b.txt", TEXT))]
    response = await gateway.http.post(FILES, files=parts[::-1] if is_first else parts)
    assert (response.status_code, response.json()["filename"]) == (200, "ä b.txt")
    content = await gateway.http.get(f"{FILES}/{response.json()['id']}/content")
    assert content.headers["content-disposition"] == "attachment; filename*=UTF-8''%C3%A4%20b.txt"


REFUSED: list[tuple[list[Any], str, str]] = [
    ([("file", ("a", TEXT))], "purpose", "required"),
    ([("purpose", (None, "user_data"))], "file", "required"),
    ([("purpose", (None, "fine-tune")), ("file", ("a", TEXT))], "purpose", "no model is trained here"),
    ([("purpose", (None, "profit")), ("file", ("a", TEXT))], "purpose", "must be one of"),
    ([("purpose", (None, "batch")), ("file", ("a", b""))], "file", "the file is empty"),
    ([("purpose", (None, "batch")), ("file", (None, "a.txt"))], "file", "curl sends one by -F file=@PATH"),
    ([("purpose", (None, "batch")), ("file", ("a", TEXT)), ("file", ("b", TEXT))], "file", "twice"),
    ([("purpose", (None, "batch")), ("flie", ("a", TEXT))], "flie", "unknown parameter"),
    ([("purpose", (None, "batch")), ("purpos", (None, "a")), ("file", ("a", TEXT))], "purpos", "unknown"),
    (
        [("purpose", (None, "batch")), ("expires_after[seconds]", (None, "9")), ("file", ("a", TEXT))],
        "expires_after.anchor",
        "required",
    ),
    (
        [
            *(("purpose", (None, "batch")), ("expires_after[anchor]", (None, "created_at"))),
            *(("expires_after[seconds]", (None, "9")), ("file", ("a", TEXT))),
        ],
        "expires_after.seconds",
        "3600",
    ),
]


@pytest.mark.parametrize(("parts", "member", "reason"), REFUSED)
async def test_what_is_refused_leaves_nothing(gateway, kept, parts, member, reason):
    response = await gateway.http.post(FILES, files=parts)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, member)
    assert reason in error["message"]
    assert blobs(kept[1]) == []
    assert (await gateway.openai.files.list()).data == []


async def test_no_form_is_refused(gateway, kept):
    for content, kind in ((b"{}", "application/json"), (b"x", "multipart/form-data"), (b"--x\r\n", _FORM)):
        response = await gateway.http.post(FILES, content=content, headers={"content-type": kind})
        assert (response.status_code, response.json()["error"]["code"]) == (400, "invalid_form"), kind
    cut = _body(b"x" * 100).removesuffix(b"--x--\r\n")
    response = await gateway.http.post(FILES, content=cut, headers={"content-type": _FORM})
    assert (response.status_code, response.json()["error"]["code"]) == (400, "invalid_form")
    assert blobs(kept[1]) == []


_FORM = "multipart/form-data; boundary=x"


def _body(content: bytes) -> bytes:
    purpose = b'--x\r\ncontent-disposition: form-data; name="purpose"\r\n\r\nuser_data\r\n'
    head = b'--x\r\ncontent-disposition: form-data; name="file"; filename="a.bin"\r\n\r\n'
    return purpose + head + content + b"\r\n--x--\r\n"


@pytest.mark.parametrize("size", [1000, 12_000_000])
async def test_of_an_upload_that_is_cut_nothing_is_left(gateway, kept, size):
    body = _body(bytes(size + size // 2))
    url = gateway.http.base_url
    _, writer = await asyncio.open_connection(url.host, url.port)
    head = f"POST {FILES} HTTP/1.1\r\nhost: x\r\ncontent-type: {_FORM}\r\ncontent-length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body[:size])
    await writer.drain()
    admission = gateway.app.state.gateway.admission
    await gateway.until(lambda: admission.in_flight == 1)
    if size > 10_000_000:  # the first parts of it are on the disk
        await gateway.until(lambda: blobs(kept[1]))
    writer.close()
    await gateway.until(lambda: admission.in_flight == 0)
    await gateway.until(lambda: not blobs(kept[1]))
    assert (await gateway.openai.files.list()).data == []


async def test_limits_of_one_of_all_and_of_a_key(gateway, kept):
    with pytest.raises(openai.APIStatusError, match="larger than the 20000000 bytes") as caught:
        await gateway.openai.files.create(file=("a", bytes(20_000_001)), purpose="batch")
    assert (caught.value.status_code, caught.value.code) == (413, "file_too_large")
    response = await gateway.http.post(FILES, content=bytes(23_000_000), headers={"content-type": _FORM})
    assert (response.status_code, response.json()["error"]["code"]) == (413, "body_too_large")
    assert blobs(kept[1]) == []
    for _ in range(2):
        await gateway.openai.files.create(file=("a", bytes(18_000_000)), purpose="batch")
    with pytest.raises(openai.BadRequestError, match="max_files_bytes") as caught:
        await gateway.openai.files.create(file=("a", bytes(4_000_001)), purpose="batch")
    assert caught.value.code == "too_many_files"
    assert len(blobs(kept[1])) == 2
    for _ in range(3):
        await gateway.openai.files.create(file=("a", TEXT), purpose="batch")
    with pytest.raises(openai.BadRequestError, match="max_files_per_key"):
        await gateway.openai.files.create(file=("a", TEXT), purpose="batch")


async def test_a_key_sees_its_own_files_only(tmp_path):
    async with running(files_dir=tmp_path / "files", api_keys_file=keys(tmp_path), max_files_per_key=1) as gateway:
        alice, bob = (gateway.openai.with_options(api_key=name) for name in ("alice", "bob"))
        file = await alice.files.create(file=("a.txt", TEXT), purpose="user_data")
        assert (await alice.files.list()).data == [file]
        assert (await bob.files.list()).data == []
        for ask in (bob.files.retrieve, bob.files.content, bob.files.delete):
            with pytest.raises(openai.NotFoundError):
                await ask(file.id)
        with pytest.raises(openai.BadRequestError, match="after"):
            await bob.files.list(after=file.id)
        for client, status in ((alice, 200), (bob, 400)):
            part = {"type": "file", "file": {"file_id": file.id}}
            response = await gateway.http.post(
                "/v1/chat/completions", json=ask_of(part), headers={"authorization": f"Bearer {client.api_key}"}
            )
            assert response.status_code == status, response.text
        with pytest.raises(openai.BadRequestError, match="this API key has 1 files"):
            await alice.files.create(file=("b.txt", TEXT), purpose="user_data")
        await bob.files.create(file=("b.txt", TEXT), purpose="user_data")
        assert await alice.files.retrieve(file.id) == file
        assert (await gateway.http.get(FILES)).status_code == 401


async def test_expired_files_are_gone_and_removed(tmp_path):
    async with running(files_dir=tmp_path / "files", file_ttl_s=2) as gateway:
        hour = {"anchor": "created_at", "seconds": 3600}
        kept = await gateway.openai.files.create(file=("a", TEXT), purpose="batch", expires_after=hour)
        assert kept.expires_at == kept.created_at + 3600
        gone = [await gateway.openai.files.create(file=("a", TEXT), purpose="batch") for _ in range(2)]
        while (await gateway.openai.files.list()).data != [kept]:
            await asyncio.sleep(0.1)
        with pytest.raises(openai.NotFoundError):
            await gateway.openai.files.retrieve(gone[0].id)  # this use removes it
        assert {blob.name for blob in blobs(tmp_path / "files")} == {kept.id, gone[1].id}
        assert (await gateway.refusal(ask_of({"type": "file", "file": {"file_id": gone[1].id}})))[0] == 400
        await gateway.app.state.gateway.files.sweep()
        assert [blob.name for blob in blobs(tmp_path / "files")] == [kept.id]


async def test_files_outlive_the_gateway_and_a_new_one_sweeps_at_its_start(tmp_path):
    folder = tmp_path / "files"
    async with running(files_dir=folder, file_ttl_s=1) as gateway:
        gone = await gateway.openai.files.create(file=("b.txt", TEXT), purpose="batch")
    async with running(files_dir=folder) as gateway:
        kept = await gateway.openai.files.create(file=("a.txt", TEXT), purpose="batch")
    (left,) = (blob for blob in blobs(folder) if blob.name == kept.id)
    orphan, young, cut = left.parent / "file-orphan", left.parent / "file-young", left.parent / "file-cut#1"
    for path in (orphan, young, cut):
        path.write_bytes(b"x")
    for path in (orphan, cut, left):
        os.utime(path, (time.time() - 10_000,) * 2)
    await asyncio.sleep(max(0.0, gone.expires_at + 1 - time.time()))
    async with running(files_dir=folder) as gateway:
        await gateway.until(lambda: {blob.name for blob in blobs(folder)} == {kept.id, "file-young"})
        assert (await gateway.openai.files.content(kept.id)).content == TEXT


async def test_bytes_that_somebody_removed_are_told_as_gone(gateway, kept):
    file = await gateway.openai.files.create(file=("a.txt", TEXT), purpose="batch")
    for blob in blobs(kept[1]):
        blob.unlink()
    with pytest.raises(openai.NotFoundError, match="its bytes were removed"):
        await gateway.openai.files.content(file.id)


def ask_of(*parts: dict[str, Any]) -> dict[str, Any]:
    return {"model": "scripted", "messages": [{"role": "user", "content": list(parts)}]}


def read_by_thinker(gateway: Running) -> list[Any]:
    """What it was last sent: texts, and the bytes of media."""
    parts = gateway.scripts["thinker"].requests[-1].messages[-1].content
    return [part.media.data if part.HasField("media") else part.text for part in parts]


async def uploaded(gateway: Running, name: str, content: bytes) -> str:
    return (await gateway.openai.files.create(file=(name, content), purpose="user_data")).id


async def test_a_chat_reads_files(gateway):
    image, text = await uploaded(gateway, "a.png", png()), await uploaded(gateway, "a.txt", TEXT)
    parts = [{"type": "file", "file": {"file_id": each}} for each in (image, text, text)]
    inline = {"type": "file", "file": {"file_data": base64.b64encode(TEXT).decode(), "filename": "b.md"}}
    completion = await gateway.openai.chat.completions.create(**ask_of(*parts, inline))
    assert completion.choices[0].message.content
    told = TEXT.decode()
    assert read_by_thinker(gateway) == [png(), f"a.txt:\n{told}", f"a.txt:\n{told}", f"b.md:\n{told}"]


async def test_responses_read_files_and_keep_their_ids(gateway):
    image, text = await uploaded(gateway, "a.bin", png()), await uploaded(gateway, "a.txt", TEXT)
    content = [{"type": "input_image", "file_id": image}, {"type": "input_file", "file_id": text}]
    ask: Any = {"model": "scripted", "input": [{"role": "user", "content": content}]}
    response = await gateway.openai.responses.create(**ask)
    assert read_by_thinker(gateway) == [png(), f"a.txt:\n{TEXT.decode()}"]
    (item,) = (await gateway.openai.responses.input_items.list(response.id)).data
    assert [part.file_id for part in item.content] == [image, text]
    assert "image_url" not in item.content[0].to_dict()

    await gateway.openai.responses.create(model="scripted", input="and?", previous_response_id=response.id)
    first = gateway.scripts["thinker"].requests[-1].messages[0].content
    assert [part.media.data for part in first if part.HasField("media")] == [png()]
    await gateway.openai.files.delete(image)
    with pytest.raises(openai.BadRequestError, match="there is no file") as caught:
        await gateway.openai.responses.create(model="scripted", input="and?", previous_response_id=response.id)
    assert caught.value.param == "previous_response_id"


async def test_a_tool_that_returns_a_file_shows_it(gateway):
    call = {"type": "function_call", "call_id": "c1", "name": "look", "arguments": "{}"}
    output = [{"type": "input_image", "file_id": await uploaded(gateway, "a.png", png())}]
    result = {"type": "function_call_output", "call_id": "c1", "output": output}
    await gateway.openai.responses.create(model="scripted", input=[{"role": "user", "content": "hi"}, call, result])
    assert read_by_thinker(gateway) == [png()]


@pytest.mark.parametrize("path", ["/tokenize", "/v1/chat/completions/batch", "/v1/chat/completions/render"])
async def test_all_that_take_messages_read_files(gateway, path):
    part = {"type": "file", "file": {"file_id": await uploaded(gateway, "a.png", png())}}
    body = ask_of(part)
    if path.endswith("batch"):
        body["messages"] = [body["messages"]]
    response = await gateway.http.post(path, json=body)
    assert response.status_code == 200, response.text
    assert read_by_thinker(gateway) == [png()]


CHAT_FILE = "messages[0].content[0].file"
UNREADABLE: list[tuple[dict[str, Any], str, str]] = [
    ({"file_id": "file-x"}, f"{CHAT_FILE}.file_id", "file_not_found"),
    ({"file_id": "../../etc/passwd"}, f"{CHAT_FILE}.file_id", "file_not_found"),
    ({"file_id": "PDF"}, f"{CHAT_FILE}.file_id", "invalid_value"),
    ({"file_id": "WRONG"}, f"{CHAT_FILE}.file_id", "invalid_media"),
    ({"file_data": "AAAA"}, f"{CHAT_FILE}.file_data", "invalid_value"),
    ({"file_id": "file-x", "file_data": "AAAA"}, CHAT_FILE, "invalid_value"),
    ({"filename": "a.txt"}, CHAT_FILE, "invalid_value"),
]


@pytest.mark.parametrize(("file", "member", "code"), UNREADABLE)
async def test_files_that_are_not_read_are_refused_by_their_member(gateway, file, member, code):
    contents = {"PDF": ("a.pdf", TEXT), "WRONG": ("a.txt", b"\xff\xfe\xff")}
    if file.get("file_id") in contents:
        file = {"file_id": await uploaded(gateway, *contents[file["file_id"]])}
    status, error = await gateway.refusal(ask_of({"type": "file", "file": file}))
    assert (status, error["param"], error["code"]) == (400, member, code), error


async def test_a_response_names_the_file_that_is_missing(gateway):
    for part in ({"type": "input_image", "file_id": "file-x"}, {"type": "input_file", "file_id": "file-x"}):
        with pytest.raises(openai.BadRequestError) as caught:
            await gateway.openai.responses.create(model="scripted", input=[{"role": "user", "content": [part]}])
        assert (caught.value.param, caught.value.code) == ("input[0].content[0].file_id", "file_not_found")


async def test_files_have_the_limits_of_media(tmp_path):
    async with running(files_dir=tmp_path, media_max_bytes=1000, media_max_parts=2) as gateway:
        large = await uploaded(gateway, "a.png", bytes(1001))
        status, error = await gateway.refusal(ask_of({"type": "file", "file": {"file_id": large}}))
        assert (status, error["param"], error["code"]) == (400, f"{CHAT_FILE}.file_id", "invalid_media")
        parts = [{"type": "file", "file": {"file_id": f"file-{i}"}} for i in range(3)]
        status, error = await gateway.refusal(ask_of(*parts))
        assert (status, error["param"]) == (400, "messages[0].content[2].file.file_id")


async def test_files_that_a_request_names_count_as_its_body(gateway):
    large = await uploaded(gateway, "a.png", bytes(2_000_000))
    status, error = await gateway.refusal(ask_of({"type": "file", "file": {"file_id": large}}))
    assert (status, error["code"]) == (503, "too_many_large_bodies")
    await gateway.until(lambda: gateway.app.state.bodies.size == 0)


async def test_without_files_the_store_is_not_asked(tmp_path):
    async with running(files_dir=tmp_path / "files") as gateway:
        assert (await gateway.chat(ask_of({"type": "text", "text": "hi"}))).status_code == 200
        await gateway.openai.responses.create(model="scripted", input="hi")
    assert not (tmp_path / "files").exists()
