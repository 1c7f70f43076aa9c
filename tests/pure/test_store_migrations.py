"""Tables of stores: what 0.2.0 left in SQLite files goes on, and revisions lead to what the code takes for granted."""

import contextlib
import sqlite3
import time
from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext

from gateway.access.usage_store import UsageStore
from gateway.answers.batches.store import BatchStore
from gateway.answers.files.store import FileStore
from gateway.answers.transcript_store import TranscriptStore
from gateway.answers.video_store import VideoJob, VideoStore
from gateway.answers.voice_store import UploadedVoice, VoiceStore
from gateway.dialects.responses.store import ResponseStore
from gateway.errors import ApiError
from gateway.http.neighbours.store import NeighbourStore
from gateway.store.store import Store
from tests.support.systems.postgres import Place

RESPONSES = """
CREATE TABLE threads (
    id TEXT PRIMARY KEY, owner TEXT NOT NULL, created_at INTEGER NOT NULL, used_at REAL NOT NULL,
    bytes INTEGER NOT NULL, previous TEXT, body TEXT NOT NULL
);
CREATE INDEX threads_by_use ON threads (used_at);
CREATE TABLE items (
    sequence INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL,
    thread TEXT NOT NULL REFERENCES threads (id) ON DELETE CASCADE, is_output INTEGER NOT NULL, body TEXT NOT NULL
);
CREATE INDEX items_by_thread ON items (thread);
CREATE INDEX items_by_id ON items (id);
"""
VOICES = """
CREATE TABLE voices (
    sequence INTEGER PRIMARY KEY AUTOINCREMENT,
    id TEXT NOT NULL UNIQUE, name TEXT NOT NULL COLLATE NOCASE, consent TEXT NOT NULL, text TEXT NOT NULL,
    seconds REAL NOT NULL, created_at INTEGER NOT NULL, owner TEXT,
    sample BLOB NOT NULL
);
"""
VIDEOS = """
CREATE TABLE videos (
    sequence INTEGER PRIMARY KEY AUTOINCREMENT,
    id TEXT NOT NULL UNIQUE, model TEXT NOT NULL, prompt TEXT NOT NULL, status TEXT NOT NULL,
    progress INTEGER NOT NULL, created_at INTEGER NOT NULL, completed_at INTEGER, expires_at REAL,
    width INTEGER NOT NULL, height INTEGER NOT NULL, frames INTEGER NOT NULL, frames_per_second REAL NOT NULL,
    seed TEXT,
    error_code TEXT, error_message TEXT{}
);
CREATE INDEX videos_by_end ON videos (expires_at);
"""
VERSIONS = {1: "", 2: ", owner TEXT", 3: ", owner TEXT, remixed_from TEXT"}  # of videos


def released(file: Path, version: int, statements: str) -> None:
    """A file as a gateway of 0.2.0 or before left it."""
    file.parent.mkdir(exist_ok=True)
    with contextlib.closing(sqlite3.connect(file)) as database:
        database.executescript(f"{statements} PRAGMA user_version = {version};")


async def test_responses_of_a_release_before(tmp_path: Path):
    rows = f"""
    INSERT INTO threads VALUES ('resp_1', 'ada', 7, {time.time()}, 600, NULL, '{{"status": "completed"}}');
    INSERT INTO items (id, thread, is_output, body) VALUES ('msg_1', 'resp_1', 0, '{{"id": "msg_1"}}');
    """
    released(tmp_path / "responses.sqlite", 1, RESPONSES + rows)
    for _ in range(2):  # made new once, then as it is
        async with ResponseStore(tmp_path, ttl_s=1000, max_bytes=1 << 20) as store:
            found = await store.get("resp_1", "ada")
            assert found is not None
            assert (found.body, found.created_at, found.holder) == ({"status": "completed"}, 7, None)
            assert await store.items("resp_1") == [{"id": "msg_1"}]


async def test_voices_of_a_release_before(tmp_path: Path):
    rows = """
    INSERT INTO voices (id, name, consent, text, seconds, created_at, owner, sample)
    VALUES ('voice_1', 'Anna', 'Anna agreed', 'A tone.', 1.5, 7, 'ada', x'0102'),
    ('voice_2', 'BERT', 'c', '', 1, 8, NULL, x'');
    """
    released(tmp_path / "voices.sqlite", 1, VOICES + rows)
    for _ in range(2):
        async with VoiceStore(tmp_path, 5, 5) as store:
            anna, bert = await store.all_of(None)
            assert anna == UploadedVoice("voice_1", "Anna", "Anna agreed", "A tone.", 1.5, 7, "ada")
            assert await store.sample(anna) == b"\1\2"
            assert await store.find("aNNA", "ada") == anna
            assert await store.find("bert", None) == bert
            with pytest.raises(ApiError, match="there is a voice"):
                await store.add(UploadedVoice("voice_3", "anna", "c", "", 1, 9, "ada"), b"")


@pytest.mark.parametrize("version", VERSIONS)
async def test_videos_of_a_release_before(tmp_path: Path, version: int):
    """What was unfinished belongs to no gateway any more."""
    columns = "id, model, prompt, status, progress, created_at, width, height, frames, frames_per_second, seed"
    rows = f"""
    INSERT INTO videos ({columns}) VALUES
    ('video_1', 'm', 'a boat', 'completed', 100, 7, 64, 48, 9, 16.0, '18446744073709551615'),
    ('video_2', 'm', 'a boat', 'in_progress', 40, 8, 64, 48, 9, 16.0, NULL);
    """
    released(tmp_path / "videos.sqlite", version, VIDEOS.format(VERSIONS[version]) + rows)
    (tmp_path / "video_1.mp4").write_bytes(b"finished")
    (tmp_path / "video_2.part").write_bytes(b"unfinished")
    for _ in range(2):
        async with VideoStore(tmp_path, 60) as store:
            seed = "18446744073709551615"
            expected = VideoJob("video_1", "m", "a boat", "completed", 100, 7, 64, 48, 9, 16.0, seed=seed)
            assert await store.get("video_1") == expected
            second = await store.get("video_2")
            assert second is not None
            assert (second.status, second.error_code) == ("failed", "interrupted")
        assert {path.name for path in tmp_path.glob("video_*")} == {"video_1.mp4"}


@pytest.mark.parametrize(
    "kind", ["responses", "voices", "videos", "files", "usage", "transcripts", "batches", "neighbours"]
)
async def test_revisions_lead_to_the_tables_of_the_code(place: Place, kind: str, tmp_path: Path):
    stores = {
        "responses": lambda: ResponseStore(place(), 60, 1 << 20),
        "voices": lambda: VoiceStore(place(), 1, 1),
        "videos": lambda: VideoStore(place(), 60, tmp_path / "files"),
        "files": lambda: FileStore(place(), 1, 1),
        "usage": lambda: UsageStore(place()),
        "transcripts": lambda: TranscriptStore(place()),
        "batches": lambda: BatchStore(place(), "gateway", 60),
        "neighbours": lambda: NeighbourStore(place()),
    }
    store: Store = stores[kind]()
    async with store:
        table = f"{store.name}_revision"

        def differences(connection) -> list:
            context = MigrationContext.configure(connection, opts={"version_table": table})
            return compare_metadata(context, store.tables)

        assert await store.read(differences) == []
