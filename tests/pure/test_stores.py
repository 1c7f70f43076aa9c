"""The gateway's stores on full disks, and damaged ones."""

import time
from pathlib import Path

import pytest
from sqlalchemy import insert
from structlog.testing import capture_logs

from gateway import __main__ as program
from gateway.answers.files.files import Files
from gateway.answers.files.store import StoredFile
from gateway.answers.video_store import VideoJob, VideoStore
from gateway.answers.voice_store import UploadedVoice, VoiceStore
from gateway.dialects.responses.store import ResponseStore, Thread
from gateway.dialects.responses.tables import threads
from gateway.errors import ApiError
from gateway.settings import GatewaySettings
from gateway.store.errors import StoreError
from tests.support.disks import fill, small_disk
from tests.support.systems.gateway import SPEECH
from tests.support.systems.postgres import Place

SECRET = "a word that nobody else says"
MIB = 1024 * 1024


def thread(name: str) -> Thread:
    return Thread(name, int(time.time()), None, {"status": "completed"})


def said(text: str) -> dict:
    return {"id": "msg_1", "type": "message", "role": "user", "content": [{"type": "input_text", "text": text}]}


def responses(directory: Path) -> ResponseStore:
    return ResponseStore(directory, ttl_s=1000, max_bytes=256 * MIB)


async def test_on_a_full_disk_responses_are_deleted_and_others_can_be_kept(tmp_path: Path):
    with small_disk(tmp_path / "disk", 40) as disk:
        async with responses(disk / "responses") as store:
            await store.put(thread("resp_large"), None, [said("x" * 12 * MIB)])  # more than the reserve
            await store.put(thread("resp_small"), None, [said("y")])
        async with responses(disk / "responses") as store:
            filler = fill(disk)
            with pytest.raises(ApiError):
                await store.put(thread("resp_more"), None, [said("z" * 8 * MIB)])
            for name in ("resp_small", "resp_large"):
                await store.remove(name)
                assert await store.get(name, None) is None
            await store.put(thread("resp_more"), None, [said("z")])
            assert await store.get("resp_more", None)
            filler.unlink()


async def test_what_clients_said_is_in_no_log(place: Place):
    incomplete = insert(threads).values(id="resp_1", body=SECRET)
    async with ResponseStore(place(), ttl_s=1000, max_bytes=MIB) as store:
        with capture_logs() as logs, pytest.raises(ApiError) as caught:
            await store.write(lambda connection: connection.execute(incomplete))
    assert caught.value.code == "storage_failed"
    assert "constraint" in str(logs)
    assert SECRET not in str(logs)


async def test_on_a_full_disk_uploads_leave_nothing_and_files_are_deleted(tmp_path: Path):
    async def pieces(size: int):
        for _ in range(size):
            yield bytes(MIB)

    with small_disk(tmp_path / "disk", 40) as disk:
        settings = GatewaySettings(pipeline=SPEECH, files_dir=disk / "files")
        described = StoredFile("", "", "batch", "a", 0, 0, time.time() + 1000)
        files = Files(settings.files_dir, settings)
        kept = await files.create(pieces(2), "ada", lambda: described)
        for size in (60, 4):
            if size == 4:  # no part of it has room
                fill(disk)
            with pytest.raises(ApiError) as caught:
                await files.create(pieces(size), "ada", lambda: described)
            assert (caught.value.status, caught.value.code) == (500, "storage_failed")
            assert [each.name for each in (disk / "files/blobs").rglob("file-*")] == [kept.id]
        await files.delete(kept)
        assert await files.get(kept.id, None) is None
        assert list((disk / "files/blobs").rglob("file-*")) == []
        await files.store.close()


async def test_on_a_full_disk_videos_and_voices_are_deleted(tmp_path: Path):
    with small_disk(tmp_path / "disk", 40) as disk:
        async with VideoStore(disk / "videos", 60) as videos, VoiceStore(disk / "voices", 10, 10) as voices:
            await videos.add(VideoJob("video_1", "m", "p", "completed", 100, 0, 64, 64, 8, 8.0))
            videos.files.file("video_1").write_bytes(bytes(MIB))
            voice = UploadedVoice("voice_1", "Ann", "Ann", "", 1.0, 0, None)
            await voices.add(voice, bytes(2 * MIB))
            fill(disk)
            await voices.remove(voice)
            assert await voices.sample(voice) is None
            fill(disk)
            await videos.remove("video_1")
            assert await videos.get("video_1") is None
            assert not videos.files.file("video_1").exists()


async def test_nothing_of_a_deleted_response_stays_on_disk(tmp_path: Path):
    async with responses(tmp_path) as store:
        await store.put(thread("resp_1"), None, [said(f"{SECRET} {i}") for i in range(200)])
    assert SECRET.encode() in (tmp_path / "responses.sqlite").read_bytes()
    async with responses(tmp_path) as store:
        await store.remove("resp_1")
        left = [path.name for path in tmp_path.iterdir() if SECRET.encode() in path.read_bytes()]
        assert not left


@pytest.mark.parametrize("damage", ["header", "middle"])
async def test_a_damaged_file_ends_the_start(tmp_path: Path, damage: str, monkeypatch: pytest.MonkeyPatch):
    async with responses(tmp_path) as store:
        await store.put(thread("resp_1"), None, [said("x" * MIB)])
    responses(tmp_path).check()
    file = tmp_path / "responses.sqlite"
    content = bytearray(file.read_bytes())
    begin = 0 if damage == "header" else 4096
    content[begin : begin + 4096] = b"\xff" * 4096
    file.write_bytes(content)
    with pytest.raises(StoreError, match="responses_dir"):
        responses(tmp_path).check()
    monkeypatch.setattr("sys.argv", ["gateway", "--pipeline", "text", "--responses-dir", str(tmp_path)])
    monkeypatch.setattr("services.common.telemetry.logs.configure", lambda *_: None)
    with pytest.raises(SystemExit, match="responses_dir"):
        program.main()
