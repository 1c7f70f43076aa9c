"""Samples of voices where several gateways find them: in a folder, or in a bucket of a real S3 server."""

import asyncio
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import select

from gateway.answers.voice_store import UploadedVoice, VoiceStore
from gateway.answers.voice_tables import voices
from gateway.errors import ApiError
from gateway.store.blobs import Blobs
from gateway.store.database import Call, Result
from tests.support.clients.voices import IMITATOR, PIPELINE, RATE_HZ, VOICES, heard, listed, speak, upload
from tests.support.clock import until
from tests.support.network.line import Line
from tests.support.scripted.code2wav import PCM16
from tests.support.systems.bucket import Bucket, blobs_left
from tests.support.systems.gateway import running
from tests.support.systems.postgres import Place

ANNA = UploadedVoice("voice_1", "Anna", "c", "", 1, 0, "ada")
AWAY = "uploaded voices cannot be read or written now, as their storage cannot be reached; try again"


def samples(folder: Path) -> list[str]:
    """Names of files that are any voice's."""
    return blobs_left(folder, "voice_*")


async def test_any_gateway_speaks_in_a_voice_at_once_and_removes_it(shared: dict[str, Any], tmp_path: Path):
    async with (
        running(PIPELINE, IMITATOR, voices_dir=tmp_path / "one", **shared) as one,
        running(PIPELINE, IMITATOR, voices_dir=tmp_path / "other", **shared) as other,
    ):
        made = (await upload(one)).json()["id"]
        assert samples(tmp_path) == [made]
        assert (await speak(other, voice="anna")).content == PCM16
        (start,) = other.scripts["talker"].requests
        assert len(heard(start)) == 1.5 * RATE_HZ
        assert (await upload(other)).status_code == 409
        assert (await other.http.delete(f"{VOICES}/anna")).status_code == 200
        assert samples(tmp_path) == []
        for each in (one, other):
            assert (await each.http.delete(f"{VOICES}/{made}")).status_code == 404
            assert (await speak(each, voice=made)).json()["error"]["param"] == "voice"
    assert not (tmp_path / "one").exists()


async def test_a_bucket_that_is_away(bucket: Bucket, tmp_path: Path):
    async with running(PIPELINE, IMITATOR, voices_dir=tmp_path / "voices", blobs_url=bucket.url) as gateway:
        await upload(gateway)
        await bucket.stop()
        for refused in (
            await upload(gateway, name="bert"),
            await speak(gateway, voice="anna"),
            await gateway.http.delete(f"{VOICES}/anna"),
        ):
            error = refused.json()["error"]
            assert (refused.status_code, error["code"], error["message"]) == (503, "storage_unavailable", AWAY)
            assert refused.headers["retry-after"] == "5"
        assert await listed(gateway) == ["anna"]
        await bucket.start()
        assert (await speak(gateway, voice="anna")).content == PCM16
        assert (await gateway.http.delete(f"{VOICES}/anna")).status_code == 200
        assert (await listed(gateway), bucket.objects()) == ([], [])


async def test_a_bucket_that_goes_away_while_a_sample_goes_there(bucket: Bucket, line: Line, tmp_path: Path):
    line.most_bytes = (100_000, None)  # in the middle of the sample
    async with VoiceStore(tmp_path / "voices", 5, 5, Blobs(bucket.url, "blobs_url")) as store:
        adding = asyncio.create_task(store.add(ANNA, bytes(1_000_000)))
        await line.full.wait()
        line.cut()
        with pytest.raises(ApiError, match=AWAY):
            await adding
        assert (await store.all_of(None), bucket.objects()) == ([], [])


async def test_voices_of_a_file_from_before(bucket: Bucket, tmp_path: Path):
    """A gateway that gets a bucket goes on with those that it has."""
    async with VoiceStore(tmp_path / "voices", 5, 5) as store:
        await store.add(ANNA, b"in a row")
    bert = UploadedVoice("voice_2", "Bert", "c", "", 1, 0, "ada")
    async with VoiceStore(tmp_path / "voices", 5, 5, Blobs(bucket.url, "blobs_url")) as store:
        await store.add(bert, b"in a blob")
        rows = await store.read(lambda connection: connection.execute(select(voices.c.sample)).scalars().all())
        assert rows == [b"in a row", b""]
        assert [await store.sample(voice) for voice in (ANNA, bert)] == [b"in a row", b"in a blob"]
        assert [name.rpartition("/")[2] for name in bucket.objects()] == ["voice_2"]
        for voice in (ANNA, bert):
            await store.remove(voice)
            assert await store.sample(voice) is None
        assert bucket.objects() == []


async def test_an_upload_that_is_cancelled_while_its_row_is_written(place: Place, tmp_path: Path):
    class Noted(VoiceStore):
        async def write(self, call: Call[Result]) -> Result:
            writing.set()
            return await super().write(call)

        async def erase(self, call: Call[Result]) -> Result:
            assert released.is_set(), "the row that is to be removed is there only afterwards"
            return await super().erase(call)

    folder, writing, released = tmp_path / "samples", asyncio.Event(), threading.Event()
    async with VoiceStore(place(), 5, 5) as other, Noted(place(), 5, 5, Blobs(folder, "files_dir")) as store:

        def hold() -> None:
            with other.database.transaction(writes=True) as connection:
                other.database.lock(connection, other.name)
                asyncio.run_coroutine_threadsafe(cancelled(), loop).result()
                released.set()

        async def cancelled() -> None:
            adding = asyncio.create_task(store.add(ANNA, b"x"))
            ended.append(adding)
            await writing.wait()  # and it waits for the lock
            assert samples(folder) == ["voice_1"]
            adding.cancel()
            for _ in range(20):
                await asyncio.sleep(0)

        loop, ended = asyncio.get_running_loop(), list[asyncio.Task[None]]()
        await other.database.run(hold)
        with pytest.raises(asyncio.CancelledError):
            await ended[0]
        assert (await other.all_of(None), samples(folder)) == ([], [])


async def test_of_uploads_of_one_name_at_once_one_is_left(place: Place, tmp_path: Path):
    folder = tmp_path / "samples"
    async with (
        VoiceStore(place(), 5, 5, Blobs(folder, "files_dir")) as one,
        VoiceStore(place(), 5, 5, Blobs(folder, "files_dir")) as other,
    ):
        made = [UploadedVoice(f"voice_{i}", "Anna", "c", "", 1, 0, "ada") for i in range(6)]
        ended = await asyncio.gather(
            *((one, other)[i % 2].add(voice, b"x") for i, voice in enumerate(made)), return_exceptions=True
        )
        assert ended.count(None) == 1
        assert all(isinstance(error, ApiError) and error.status == 409 for error in ended if error is not None)
        (left,) = await one.all_of(None)
        assert samples(folder) == [left.id]


async def test_what_a_crash_left_is_swept(bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Each database removes its own."""
    blobs = Blobs(bucket.url, "blobs_url")
    async with VoiceStore(tmp_path / "one", 5, 5, blobs) as one, VoiceStore(tmp_path / "other", 5, 5, blobs) as other:
        await one.add(ANNA, b"x")
        orphan = UploadedVoice("voice_2", "Bert", "c", "", 1, 0, "ada")
        await other.add(orphan, b"y")
        await VoiceStore(tmp_path / "other", 5, 5).remove(orphan)  # as a crash before the row
        await other.sweep()
        assert len(bucket.objects()) == 2  # young ones may get a row
        later = time.time() + 7200
        monkeypatch.setattr("gateway.store.row_blobs.time.time", lambda: later)
    one, other = (VoiceStore(tmp_path / name, 5, 5, blobs) for name in ("one", "other"))
    for store in (one, other):  # the first thing that they do
        store.begin()
    await until(lambda: len(bucket.objects()) == 1)
    assert await one.sample(ANNA) == b"x"
    for store in (one, other):
        await store.close()


async def test_a_sample_that_somebody_removed(tmp_path: Path):
    async with VoiceStore(tmp_path / "voices", 5, 5, Blobs(tmp_path / "samples", "files_dir")) as store:
        await store.add(ANNA, b"x")
        (path,) = (path for path in tmp_path.rglob("voice_1"))
        path.unlink()
        assert await store.sample(ANNA) is None
        await store.remove(ANNA)
        assert await store.all_of(None) == []
