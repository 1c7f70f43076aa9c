"""`quartet database move`: what a gateway of 0.2.0 kept is in PostgreSQL afterwards."""

import time
from pathlib import Path

from typer.testing import CliRunner

from cli.main import app
from gateway.answers.video_store import VideoStore
from gateway.answers.voice_store import UploadedVoice, VoiceStore
from gateway.dialects.responses.items import new_id
from gateway.dialects.responses.store import ResponseStore, Thread
from gateway.store.blobs import Blobs
from gateway.store.postgres import PostgresDatabase
from tests.pure.test_store_migrations import RESPONSES, VERSIONS, VIDEOS, VOICES, released


def move(*flags: str, url: str | None) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["database", "move", *flags], env={"QUARTET_GATEWAY_DATABASE_URL": url})
    return done.exit_code, done.output


async def test_all_is_moved_and_goes_on(tmp_path: Path, postgres_url: str) -> None:
    threads = "".join(
        f"""
        INSERT INTO threads VALUES ('resp_{n}', 'ada', 7, {time.time()}, 600, NULL, '{{"status": "completed"}}');
        INSERT INTO items (id, thread, is_output, body) VALUES ('msg_{n}', 'resp_{n}', 0, '{{"id": "msg_{n}"}}');
        """
        for n in range(450)
    )
    released(tmp_path / "responses/responses.sqlite", 1, RESPONSES + threads)
    voices = "INSERT INTO voices VALUES (7, 'voice_1', 'Anna', 'c', '', 1.5, 7, 'ada', x'0102');"
    released(tmp_path / "voices/voices.sqlite", 1, VOICES + voices)
    samples = Blobs(tmp_path / "samples", "files_dir")
    async with VoiceStore(tmp_path / "voices", 5, 5, samples) as before:
        await before.add(UploadedVoice("voice_8", "Zoe", "c", "", 1, 8, "bob"), b"\3\4")
    columns = "id, model, prompt, status, progress, created_at, width, height, frames, frames_per_second"
    videos = f"INSERT INTO videos ({columns}) VALUES ('video_1', 'm', 'p', 'completed', 100, 7, 64, 48, 9, 16.0);"
    released(tmp_path / "jobs/videos.sqlite", 3, VIDEOS.format(VERSIONS[3]) + videos)
    (tmp_path / "jobs/video_1.mp4").write_bytes(b"a file")
    flags = [f"--{name}-dir={tmp_path / name}" for name in ("responses", "voices", "jobs")]
    status, said = move(*flags, url=postgres_url)
    assert (status, said.splitlines()) == (
        0,
        [
            "moved responses: 450 threads, 0 events, 450 items",
            "moved voices: 1 voice_spaces, 2 voices",
            "moved videos: 0 video_spaces, 1 videos",
        ],
    )
    database = PostgresDatabase(postgres_url)
    async with (
        ResponseStore(database, 1000, 1 << 20) as responses,
        VoiceStore(database, 5, 5, samples) as kept,
        VideoStore(database, 60, tmp_path / "jobs") as jobs,
    ):
        assert await responses.items("resp_449") == [{"id": "msg_449"}]
        await responses.put(Thread(new_id("resp"), 0, None, {}), "ada", [{"id": "later"}])  # numbered behind those
        (anna, zoe) = await kept.all_of(None)
        assert [await kept.sample(voice) for voice in (anna, zoe)] == [b"\1\2", b"\3\4"]
        await kept.add(UploadedVoice("voice_2", "Bert", "c", "", 1, 8, "ada"), b"")
        assert [voice.name for voice in await kept.all_of("ada")] == ["Anna", "Bert"]
        assert (video := await jobs.get("video_1")) is not None
        assert jobs.files.file(video.id).read_bytes() == b"a file"
    database.close()
    status, said = move(*flags, url=postgres_url)
    assert status == 1
    assert "its table threads has rows; move to an empty database" in said


def test_what_cannot_be_moved_is_told(tmp_path: Path, postgres_url: str) -> None:
    assert "--database-url" in move(f"--responses-dir={tmp_path}", url=None)[1]
    assert "name what to move" in move(url=postgres_url)[1]
    assert "there is no file" in move(f"--voices-dir={tmp_path}", url=postgres_url)[1]
    (tmp_path / "responses.sqlite").write_text("no database")
    assert "responses_dir" in move(f"--responses-dir={tmp_path}", url=postgres_url)[1]
    released(tmp_path / "other/responses.sqlite", 1, RESPONSES)
    nowhere = "postgresql://ann:a-secret@127.0.0.1:1/quartet"
    status, said = move(f"--responses-dir={tmp_path / 'other'}", url=nowhere)
    assert status == 1
    assert "database_url postgresql://ann:***@127.0.0.1:1/quartet" in said
    assert "a-secret" not in said
    assert "write it as postgresql" in move(f"--responses-dir={tmp_path / 'other'}", url="mysql://host/quartet")[1]
