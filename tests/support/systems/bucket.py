"""A real S3 server in the tests' own process, and places of blobs: tests run on a folder and on it."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from tests.support.network.line import Line, line_to

KEY, SECRET = "quartet", "a secret of this test"
_OF_SERVER = ".nanio"  # what it notes down of objects


class Bucket:
    """Of a server that checks signatures. `url`: of its folder in the bucket. `folder`: what the server keeps it in."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.url = folder / "bucket", "s3://bucket/some/prefix"
        self.folder.mkdir()
        self._server: Any = None
        self.port = 0

    async def start(self) -> None:
        import uvicorn  # this is read at the start of all tests

        settings = import_module("nanio.config").Settings(data_dir=self.folder.parent, access_log=False)
        app = import_module("nanio.app").build_app(settings)
        options = {"log_config": None, "access_log": False, "lifespan": "off"}
        self._server = uvicorn.Server(uvicorn.Config(app, port=self.port, **options))
        self._server.capture_signals = contextlib.nullcontext  # signals are pytest's  # pyright: ignore
        self._task = asyncio.create_task(self._server.serve())
        while not self._server.started:
            await asyncio.sleep(0.005)
        self.port = self._server.servers[0].sockets[0].getsockname()[1]

    async def stop(self) -> None:
        if self._server is not None:
            self._server.should_exit = self._server.force_exit = True
            await self._task
            self._server = None

    def objects(self) -> list[str]:
        """Names of what is complete."""
        names = (str(each.relative_to(self.folder)) for each in self.folder.rglob("*") if each.is_file())
        return sorted(name for name in names if not name.startswith(_OF_SERVER))


@pytest_asyncio.fixture
async def bucket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Bucket]:
    """Without objects. The environment has its address and credentials."""
    pytest.importorskip("nanio")
    for name, value in (("NANIO_ACCESS_KEY", KEY), ("NANIO_SECRET_KEY", SECRET), ("AWS_REGION", "us-east-1")):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    bucket = Bucket(tmp_path)
    await bucket.start()
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{bucket.port}")
    yield bucket
    await bucket.stop()


@pytest_asyncio.fixture
async def line(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Line]:
    """By which the bucket is reached."""
    async with line_to(bucket.port) as line:
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{line.port}")
        yield line


@pytest.fixture(params=["folder", "bucket"])
def shared(request: pytest.FixtureRequest, postgres_url: str, tmp_path: Path) -> dict[str, Any]:
    """Settings of all gateways of a database and a place of blobs."""
    settings: dict[str, Any] = {"database_url": postgres_url, "files_dir": tmp_path / "files"}
    if request.param == "bucket":
        settings["blobs_url"] = request.getfixturevalue("bucket").url
    return settings


def blobs_left(folder: Path, pattern: str) -> list[str]:
    """Names of files below `folder` that match, and are not the server's own notes."""
    found = (path for path in folder.rglob(pattern) if path.is_file())
    return sorted(path.name for path in found if not any(part.startswith(_OF_SERVER) for part in path.parts))
