"""What is known of uploaded files, in SQLite and in PostgreSQL, also where several gateways have one place."""

import asyncio
import time
from dataclasses import replace
from pathlib import Path

import pytest

from gateway.answers.files.files import Files
from gateway.answers.files.store import FileStore, StoredFile
from gateway.errors import ApiError
from gateway.settings import GatewaySettings
from gateway.store.database import Database
from tests.support.systems.bucket import Bucket
from tests.support.systems.gateway import SPEECH
from tests.support.systems.postgres import Place

MOST_BYTES, MOST = 1000, 3
FILE = StoredFile("file-1", "ada", "user_data", "a.txt", 10, int(time.time()), time.time() + 86_400)


def store_of(place: Database | Path) -> FileStore:
    return FileStore(place, MOST_BYTES, MOST)


async def test_gateways_of_one_place_have_the_same_files(place: Place):
    async with store_of(place()) as one, store_of(place()) as other:
        assert one.space == other.space != ""
        await one.add(FILE)
        assert await other.get("file-1", "ada") == FILE
        assert await other.get("file-1", None) == FILE
        assert await other.get("file-1", "bob") is None
        await other.remove(["file-1"])
        assert await one.get("file-1", "ada") is None


async def test_of_uploads_at_once_no_more_are_taken_than_may_be(place: Place):
    async with store_of(place()) as one, store_of(place()) as other:
        files = [replace(FILE, id=f"file-{i}") for i in range(8)]
        added = await asyncio.gather(
            *((one, other)[i % 2].add(file) for i, file in enumerate(files)), return_exceptions=True
        )
        assert added.count(None) == MOST
        refused = [error for error in added if error is not None]
        assert all(isinstance(error, ApiError) and error.code == "too_many_files" for error in refused)
        with pytest.raises(ApiError, match="max_files_bytes"):
            await one.add(replace(FILE, id="file-b", owner="bob", bytes=MOST_BYTES - 10 * MOST + 1))
        await one.add(replace(FILE, id="file-b", owner="bob", bytes=MOST_BYTES - 10 * MOST))


async def test_pages_and_what_has_expired(place: Place):
    async with store_of(place()) as store:
        for i, purpose in enumerate(("batch", "vision", "batch")):
            await store.add(replace(FILE, id=f"file-{i}", purpose=purpose))
        gone = replace(FILE, id="file-gone", owner="bob", expires_at=time.time() - 1)
        await store.add(gone)
        page = await store.page(None, 2, "desc", None, None)
        assert page is not None
        assert [file.id for file in page] == ["file-2", "file-1"]
        page = await store.page("file-0", 9, "asc", "batch", "ada")
        assert page is not None
        assert [file.id for file in page] == ["file-2"]
        assert await store.page("file-0", 9, "asc", None, "bob") is None
        assert await store.get("file-gone", None) is None
        assert await store.expired() == await store.expired(["file-gone", "file-0"]) == ["file-gone"]
        assert await store.expired(["file-0"]) == []
        assert await store.known(["file-gone", "file-1", "file-x"]) == {"file-gone", "file-1"}


async def test_databases_that_share_a_bucket_leave_each_other_alone(tmp_path: Path, bucket: Bucket):
    """Each sweeps what its own rows do not have."""
    settings = GatewaySettings(
        pipeline=SPEECH, blobs_url=bucket.url, files_dir=tmp_path, max_files_bytes=10**6, max_files_per_key=9
    )

    async def pieces():
        yield b"x" * 10

    one, other = Files(tmp_path / "one", settings), Files(tmp_path / "other", settings)
    first = await one.create(pieces(), "ada", lambda: FILE)
    second = await other.create(pieces(), "ada", lambda: FILE)
    await other.store.remove([second.id])  # as a crash before the row
    old = time.time() + 7200
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("gateway.store.row_blobs.time.time", lambda: old)
        await one.sweep()
        await other.sweep()
    assert [name.rpartition("/")[2] for name in bucket.objects()] == [first.id]
    for files in (one, other):
        await files.store.close()
