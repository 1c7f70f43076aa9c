"""Media parts with a `uuid`: alone, it stands for the file that the same key sent with it before."""

import asyncio
import base64
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
import pytest_asyncio

from gateway.access.api_keys import new_key
from gateway.media.kept import KeptMedia, MediaName
from tests.pure.test_api_keys import bearer, entry, write
from tests.support.clients.pictures import png
from tests.support.samples.media import mp4, wav
from tests.support.systems.gateway import Running, running

pytestmark = pytest.mark.asyncio(loop_scope="module")
ANN, BOB = new_key(), new_key()
CHATS, BATCH, TOKENIZE, GENERATE = (
    *("/v1/chat/completions", "/v1/chat/completions/batch", "/tokenize"),
    "/inference/v1/generate",
)
MIB = 1024 * 1024


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def with_keys(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Running]:
    file = write(tmp_path_factory.mktemp("keys") / "keys.yaml", entry("ann", ANN), entry("bob", BOB))
    async with running(api_keys_file=file, media_cache_bytes=4 * MIB, max_body_bytes=8 * MIB) as gateway:
        yield gateway


@pytest_asyncio.fixture(loop_scope="module")
async def gateway(with_keys: Running) -> AsyncIterator[Running]:
    yield with_keys
    await with_keys.reset()


def url(content: bytes) -> dict[str, str]:
    return {"url": f"data:;base64,{base64.b64encode(content).decode()}"}


def body(path: str, *parts: dict[str, Any]) -> dict[str, Any]:
    if path == GENERATE:
        return {"token_ids": [5], "content_parts": [*parts]}
    messages: list[Any] = [{"role": "user", "content": [{"type": "text", "text": "see"}, *parts]}]
    return {"messages": [messages] if path == BATCH else messages} | ({} if path == TOKENIZE else {"model": "scripted"})


async def post(gateway: Running, *parts: dict[str, Any], path: str = CHATS, key: str = ANN) -> httpx.Response:
    return await gateway.http.post(path, json=body(path, *parts), headers=bearer(key))


def came(gateway: Running) -> list[bytes]:
    """The media of the thinker's last request."""
    start = gateway.scripts["thinker"].requests[-1]
    parts = [part.media for message in start.messages for part in message.content if part.HasField("media")]
    return [media.data for media in [*parts, *start.prompt.media]]


def is_unknown(response: httpx.Response, field: str, kind: str = "image", index: int = 0) -> bool:
    """Whether it is the 400 that says where the file is missing, in the words that vLLM's clients know."""
    error = response.json()["error"]
    words = f"{field}: Cache miss for {kind} at index {index} but data is not provided: send the {kind} again"
    told = response.status_code, error["param"], error["code"], error["message"].startswith(words)
    return told == (400, field, "unknown_media", True)


FILES: list[tuple[str, bytes, dict[str, str]]] = [
    ("image_url", png(1), url(png(1))),
    ("audio_url", wav(0.2), url(wav(0.2))),
    ("input_audio", wav(0.3), {"data": base64.b64encode(wav(0.3)).decode(), "format": "wav"}),
    ("video_url", mp4(1.0), url(mp4(1.0))),
]
UNSENT: list[Any] = [None, {}, {"url": None}, {"url": ""}]


@pytest.mark.parametrize(("kind", "content", "medium"), FILES)
async def test_a_uuid_alone_is_the_file_that_came_with_it(
    gateway: Running, kind: str, content: bytes, medium: dict[str, str]
) -> None:
    for path in (CHATS, BATCH, TOKENIZE, GENERATE):
        place = {BATCH: "messages[0][0].content[1]", GENERATE: "content_parts[0]"}.get(path, "messages[0].content[1]")
        name: dict[str, Any] = {"type": kind, "uuid": f"{path} {kind}"}
        of_kind = {"input_audio": "audio"}.get(kind, kind.removesuffix("_url"))
        assert is_unknown(await post(gateway, name | {kind: None}, path=path), place, of_kind)
        assert (await post(gateway, name | {kind: medium}, path=path)).status_code == 200
        for unsent in ({kind: each} for each in UNSENT):
            response = await post(gateway, name | unsent, path=path)
            assert response.status_code == 200, response.text
            assert came(gateway) == [content], (path, unsent)
        assert (await post(gateway, name, path=path)).status_code == 200  # the member itself is left out
        assert is_unknown(await post(gateway, name, path=path, key=BOB), place, of_kind)  # another key's


async def test_a_uuid_is_of_one_kind_and_of_the_last_file_that_came_with_it(gateway: Running) -> None:
    name = {"type": "image_url", "uuid": 7}
    for seed in (1, 2):
        both = await post(gateway, name | {"image_url": url(png(seed))}, name)
        assert both.status_code == 200, both.text
        assert came(gateway) == [png(seed)] * 2
        assert "x-quartet-ignored" not in both.headers
    assert (await post(gateway, name)).status_code == 200
    assert came(gateway) == [png(2)]
    sound = {"type": "audio_url", "uuid": 7}
    known = name | {"image_url": url(png(3)), "uuid": "x"}
    assert is_unknown(await post(gateway, known, sound), "messages[0].content[2]", "audio")
    assert is_unknown(await post(gateway, known, {**name, "uuid": "y"}), "messages[0].content[2]", index=1)
    broken = await post(gateway, name | {"image_url": url(b"no picture"), "uuid": "broken"})
    assert broken.json()["error"]["code"] == "invalid_media"
    assert is_unknown(await post(gateway, name | {"uuid": "broken"}), "messages[0].content[1]")


async def test_without_a_uuid_the_file_is_required(gateway: Running) -> None:
    for kind, _, _ in FILES:
        for unsent in UNSENT:
            for uuid in ({}, {"uuid": None}, {"uuid": ""}):
                response = await post(gateway, {"type": kind, kind: unsent, **uuid})
                error = response.json()["error"]
                assert response.status_code == 400
                assert error["param"].startswith(f"messages[0].content[1].{kind}"), error
    misspelt = await post(gateway, {"type": "image_url", "image_url": {"ulr": "data:,"}, "uuid": "a"})
    assert misspelt.json()["error"]["param"] == "messages[0].content[1].image_url.ulr"


async def test_the_longest_unused_of_the_key_that_has_most_is_forgotten_first(gateway: Running) -> None:
    def named(uuid: str, size: int | None = None, key: str = ANN) -> Any:
        medium = None if size is None else url(wav(0.1).ljust(size, b"\0"))
        return post(gateway, {"type": "audio_url", "audio_url": medium, "uuid": uuid}, key=key)

    million = 1_000_000  # of the 4 MiB: four files
    assert (await named("bob's", 1000, BOB)).status_code == 200
    for uuid, size in (*((uuid, million) for uuid in "abc"), ("a", None), ("d", million), ("e", million)):
        assert (await named(uuid, size)).status_code == 200
    assert [(await named(uuid)).status_code for uuid in "abcde"] == [200, 400, 200, 200, 200]
    assert (await named("bob's", key=BOB)).status_code == 200
    assert (await named("a", MIB + 1)).status_code == 200  # too large to be kept
    assert is_unknown(await named("a"), "messages[0].content[1]", "audio")


async def test_requests_hold_no_more_of_kept_files_than_of_bodies(gateway: Running) -> None:
    part: dict[str, Any] = {"type": "audio_url", "uuid": "large"}
    assert (await post(gateway, part | {"audio_url": url(wav(0.1).ljust(1_000_000, b"\0"))})).status_code == 200
    thinker = gateway.scripts["thinker"]
    thinker.hold = True
    asked = [asyncio.create_task(post(gateway, part)) for _ in range(16)]  # 12 MiB beyond what is free
    done, _ = await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)
    assert [(await each).json()["error"]["code"] for each in done] == ["too_many_large_bodies"] * len(done)
    await gateway.until(lambda: len(thinker.requests) - 1 + sum(each.done() for each in asked) == len(asked))
    thinker.go_on()
    statuses = [(await each).status_code for each in asked]
    assert set(statuses) == {200, 503}
    assert statuses.count(200) >= 8
    assert (await post(gateway, part)).status_code == 200


async def test_files_are_bounded_in_bytes_whatever_their_number() -> None:
    kept = KeptMedia(100 * 1024)
    for i in range(1000):
        kept.put(MediaName("a", str(i)), "image", b"1")
    assert sum(kept.get(MediaName("a", str(i)), "image") is not None for i in range(1000)) == 99
    for owner in "bcd":
        kept.put(MediaName(owner, "1"), "image", bytes(20 * 1024))
    assert all(kept.get(MediaName(owner, "1"), "image") for owner in "bcd")
    nothing = KeptMedia(0)
    nothing.put(MediaName(None, "1"), "image", b"")
    assert nothing.get(MediaName(None, "1"), "image") is None
