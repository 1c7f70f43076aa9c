"""Blobs in a folder, and in a bucket of a real S3 server."""

import asyncio
import os
import time
from collections.abc import AsyncIterator
from pathlib import Path

import openai
import pytest

from gateway.store.blobs import PART_BYTES, Blobs
from gateway.store.errors import StoreError, StoreUnavailable
from tests.support.systems.bucket import Bucket, bucket
from tests.support.systems.gateway import running

__all__ = ["bucket"]
LARGE = os.urandom(3 * PART_BYTES + 7)


@pytest.fixture(params=["folder", "bucket"])
def blobs(request: pytest.FixtureRequest, tmp_path: Path) -> Blobs:
    if request.param == "folder":
        return Blobs(tmp_path / "blobs", "files_dir")
    return Blobs(request.getfixturevalue("bucket").url, "blobs_url")


async def pieces(content: bytes, size: int = 65_536) -> AsyncIterator[bytes]:
    for i in range(0, len(content), size):
        yield content[i : i + size]


async def read(blobs: Blobs, name: str, start: int = 0, end: int | None = None) -> bytes | None:
    found = await blobs.open(name, start, end)
    return None if found is None else b"".join([piece async for piece in found])


@pytest.mark.parametrize("size", [0, 1, 100_000, PART_BYTES, PART_BYTES + 1, len(LARGE)])
async def test_what_is_put_is_read(blobs: Blobs, size: int):
    assert await blobs.put("a/one", pieces(LARGE[:size])) == size
    assert await blobs.size("a/one") == size
    assert await read(blobs, "a/one") == LARGE[:size]


async def test_a_range_is_read(blobs: Blobs):
    await blobs.put("a/one", pieces(LARGE))
    for start, end in ((0, 10), (10, 12), (PART_BYTES - 1, PART_BYTES + 1), (len(LARGE) - 3, None), (5, 5), (5, 4)):
        assert await read(blobs, "a/one", start, end) == (LARGE[start:end] if end is None or end > start else b"")


async def test_what_is_put_twice_is_the_second(blobs: Blobs):
    await blobs.put("a/one", pieces(LARGE))
    await blobs.put("a/one", pieces(b"second"))
    assert await read(blobs, "a/one") == b"second"


async def test_what_is_not_there(blobs: Blobs):
    await blobs.put("a/one", pieces(b"x"))
    await blobs.delete("a/one")
    await blobs.delete("a/one")
    assert await read(blobs, "a/one") is await blobs.size("a/one") is None


@pytest.mark.parametrize("size", [10, len(LARGE)])
async def test_what_is_cut_is_not_there(blobs: Blobs, size: int, tmp_path: Path):
    async def cut() -> AsyncIterator[bytes]:
        async for piece in pieces(LARGE[:size]):
            yield piece
        raise KeyError("cut")

    with pytest.raises(KeyError):
        await blobs.put("a/one", cut())
    assert await blobs.size("a/one") is None
    assert left_in(tmp_path) == []


@pytest.mark.parametrize("size", [10, len(LARGE)])
async def test_what_is_cancelled_is_not_there(blobs: Blobs, size: int, tmp_path: Path):
    given = asyncio.Event()

    async def endless() -> AsyncIterator[bytes]:
        async for piece in pieces(LARGE[:size]):
            yield piece
        given.set()
        await asyncio.sleep(3600)

    putting = asyncio.create_task(blobs.put("a/one", endless()))
    await given.wait()
    putting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await putting
    assert await blobs.size("a/one") is None
    assert left_in(tmp_path) == []


def left_in(folder: Path) -> list[Path]:
    return [each for each in folder.rglob("*") if each.is_file() and each.stat().st_size]


async def test_those_of_before_are_listed_within_their_folder(blobs: Blobs):
    for name in ("a/one", "a/two", "b/three"):
        await blobs.put(name, pieces(b"x"))
    assert sorted([name async for names in blobs.older("a", time.time() + 10) for name in names]) == ["a/one", "a/two"]
    assert [name async for names in blobs.older("a", time.time() - 10) for name in names] == []
    assert [name async for names in blobs.older("c", time.time() + 10) for name in names] == []


async def test_a_folder_is_private(tmp_path: Path):
    (tmp_path / "blobs").mkdir(mode=0o755)
    blobs = Blobs(tmp_path / "blobs", "files_dir")
    for content in (b"x", LARGE):
        await blobs.put("a/one", pieces(content))
        assert (tmp_path / "blobs/a/one").stat().st_mode & 0o777 == 0o600
    assert (tmp_path / "blobs").stat().st_mode & 0o777 == 0o700


async def test_a_folder_that_cannot_be_used_is_named(tmp_path: Path):
    (tmp_path / "blobs").write_text("no folder")
    with pytest.raises(StoreError, match=f"files_dir {tmp_path}/blobs: cannot be used: .*exists") as caught:
        await Blobs(tmp_path / "blobs", "files_dir").put("a", pieces(b"x"))
    assert not isinstance(caught.value, StoreUnavailable)


@pytest.mark.parametrize("content", [b"x", LARGE])
async def test_a_bucket_that_is_away_is_unavailable(bucket: Bucket, content: bytes):
    blobs = Blobs(bucket.url, "blobs_url")
    await blobs.put("a/one", pieces(b"first"))
    await bucket.stop()
    with pytest.raises(StoreUnavailable, match="blobs_url s3://bucket/some/prefix"):
        await blobs.put("a/two", pieces(content))
    with pytest.raises(StoreUnavailable):
        await read(blobs, "a/one")
    await bucket.start()
    assert await read(blobs, "a/one") == b"first"
    assert bucket.objects() == ["some/prefix/a/one"]


async def test_a_bucket_that_is_not_there_and_wrong_credentials_are_no_outage(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch
):
    for content in (b"x", LARGE):
        with pytest.raises(StoreError, match="NoSuchBucket") as caught:
            await Blobs("s3://other/prefix", "blobs_url").put("a", pieces(content))
        assert not isinstance(caught.value, StoreUnavailable)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "another")
    with pytest.raises(StoreError, match="SignatureDoesNotMatch") as caught:
        await Blobs(bucket.url, "blobs_url").put("a", pieces(b"x"))
    assert not isinstance(caught.value, StoreUnavailable)


async def test_a_gateways_files_are_in_a_bucket(bucket: Bucket, tmp_path: Path):
    async with running(files_dir=tmp_path / "files", blobs_url=bucket.url) as gateway:
        file = await gateway.openai.files.create(file=("a.bin", LARGE), purpose="user_data")
        (name,) = bucket.objects()
        assert name.startswith("some/prefix/")
        assert name.endswith(f"/{file.id}")
        assert (await gateway.openai.files.content(file.id)).content == LARGE
        await bucket.stop()
        for ask in (gateway.openai.files.content, gateway.openai.files.delete):
            with pytest.raises(openai.APIStatusError, match="files cannot be stored or read now") as caught:
                await ask(file.id)
            assert (caught.value.status_code, caught.value.response.headers["retry-after"]) == (503, "5")
        await bucket.start()
        await gateway.openai.files.delete(file.id)
        assert bucket.objects() == []
    assert not (tmp_path / "files/blobs").exists()
