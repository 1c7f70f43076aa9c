"""Videos from being taken on to being forgotten: places, limits of time, stops, and the directory that keeps them."""

import asyncio
import contextlib
import pwd
import sqlite3
import time

import pytest
from structlog.testing import capture_logs

from gateway.answers.video_jobs import VideoJobs
from gateway.answers.video_store import VideoJob as StoredVideo
from gateway.answers.video_store import VideoStore
from gateway.pipeline.config import load_pipeline
from gateway.pipeline.stage import Stage
from gateway.settings import GatewaySettings
from gateway.store.errors import StoreError
from quartet.v1 import dit_pb2
from services.common.errors import QueueFull, Unavailable
from tests.support.clock import put_forward
from tests.support.systems.video import FPS, MODEL, PIPELINE, STEPS, VIDEO_INFO, create, gateway_before, scripted_dit

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # OpenAI's client about its own videos
PATH = "/v1/videos"
ASK = {"model": MODEL, "prompt": "a boat"}


@pytest.fixture
async def stage():
    async with scripted_dit(VIDEO_INFO) as started:
        yield started


async def test_so_many_at_a_time_and_no_more_than_may_wait(stage, tmp_path):
    stage.script.hold = True
    async with gateway_before(stage, tmp_path, max_running_videos=2, max_queued_videos=1, drain_timeout_s=1) as gateway:
        ids = [await create(gateway) for _ in range(3)]
        await gateway.until(lambda: stage.running == 2)
        refused = await gateway.http.post(PATH, json=ASK)
        assert refused.status_code == 429
        assert refused.json()["error"]["code"] == "queue_full"
        assert int(refused.headers["retry-after"]) >= 1
        assert (await gateway.video(ids[2]))["status"] == "queued"
        stage.script.hold = False
        await gateway.http.delete(f"{PATH}/{ids[0]}")  # makes room
        await gateway.reaches(ids[2], "completed")
        assert stage.most == 2


@pytest.mark.parametrize("error", [Unavailable("draining"), QueueFull("full", retry_after_s=1)])
async def test_the_wait_for_a_stage_takes_nothing_from_a_video_s_time(stage, tmp_path, error, monkeypatch):
    make, refused = VideoJobs._make, asyncio.Event()

    async def making(*arguments) -> None:
        try:
            await make(*arguments)
        finally:
            refused.set()

    monkeypatch.setattr(VideoJobs, "_make", making)
    stage.script.error = error
    async with gateway_before(stage, tmp_path, video_timeout_s=600) as gateway:
        video_id = await create(gateway)
        for _ in range(2):
            refused.clear()
            await refused.wait()
            put_forward(600)  # while it waits
        assert (await gateway.video(video_id))["status"] == "queued"
        stage.script.error = None
        await gateway.reaches(video_id, "completed")


class SlowStore(VideoStore):
    """A store whose additions are on disk before anyone hears of it."""

    def __init__(self, directory, ttl_s: float) -> None:
        super().__init__(directory, ttl_s)
        self.added, self.go_on = asyncio.Event(), asyncio.Event()

    async def add(self, video) -> None:
        await super().add(video)
        self.added.set()
        await self.go_on.wait()


async def test_a_video_deleted_while_it_is_taken_on(tmp_path):
    video = StoredVideo("video_1", MODEL, "a boat", "queued", 0, int(time.time()), 64, 48, 9, FPS)
    away = Stage("dit", load_pipeline(PIPELINE, {"dit": "127.0.0.1:9"}).stages["dit"])
    settings = GatewaySettings(pipeline=PIPELINE, max_running_videos=1, max_queued_videos=1, drain_timeout_s=1)
    store = SlowStore(tmp_path, 60)
    async with store, VideoJobs(store, settings) as jobs:
        start = dit_pb2.DitStart(request_id=video.id)
        submitting = asyncio.create_task(jobs.submit(video, away, start, [], on_end=lambda: None))
        await store.added.wait()
        assert await jobs.delete(video.id)
        store.go_on.set()
        await submitting
        assert await store.get(video.id) is None


async def test_a_video_that_takes_too_long(stage, tmp_path):
    stage.script.hold = True
    async with gateway_before(stage, tmp_path, video_timeout_s=600) as gateway:
        video_id = await create(gateway)
        await stage.script.holding.wait()
        put_forward(600)
        video = await gateway.reaches(video_id, "failed")
        assert video["error"]["code"] == "deadline_exceeded"
        await gateway.until(lambda: stage.script.ended == ["cancelled"])


async def test_what_has_expired_is_removed(stage, tmp_path, monkeypatch):
    async with gateway_before(stage, tmp_path, video_ttl_s=3600) as gateway:
        video_id = await create(gateway)
        await gateway.reaches(video_id, "completed")
        assert len(list(tmp_path.glob("video_*"))) == 1
        now = time.time
        monkeypatch.setattr(time, "time", lambda: now() + 3600)
        put_forward(60)  # it looks every minute
        await gateway.until(lambda: not list(tmp_path.glob("video_*")))
        assert (await gateway.http.get(f"{PATH}/{video_id}")).status_code == 404
        assert (await gateway.http.get(PATH)).json()["data"] == []


async def test_stopping_finishes_what_runs(stage, tmp_path):
    stage.script.hold, stage.script.after = True, 2
    with capture_logs() as logs:
        async with gateway_before(stage, tmp_path, max_running_videos=1, drain_timeout_s=600) as gateway:
            first, second = await create(gateway), await create(gateway)
            await gateway.reaches(first, "in_progress")

            async def go_on() -> None:
                await gateway.until(lambda: any(line["event"] == "draining videos" for line in logs))
                stage.script.release.set()

            going_on = asyncio.create_task(go_on())
        await going_on
    async with gateway_before(stage, tmp_path) as gateway:
        assert (await gateway.video(first))["status"] == "completed"
        assert (await gateway.video(second))["error"]["code"] == "interrupted"
    assert len(stage.script.requests) == 1


async def test_what_runs_at_the_end_of_the_drain_is_cancelled(stage, tmp_path):
    stage.script.hold, stage.script.after = True, STEPS + 2  # while frames come
    async with gateway_before(stage, tmp_path, drain_timeout_s=1) as gateway:
        video_id = await create(gateway)
        await gateway.until(stage.script.holding.is_set)
    await gateway.until(lambda: stage.script.ended == ["cancelled"])
    async with gateway_before(stage, tmp_path) as gateway:
        assert (await gateway.video(video_id))["error"]["code"] == "interrupted"
        assert list(tmp_path.glob("video_*")) == []


@pytest.mark.parametrize("state", [None, "state"])
def test_where_videos_are_kept(monkeypatch, tmp_path, state):
    monkeypatch.delenv("QUARTET_GATEWAY_JOBS_DIR")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    if state:
        monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / state))
    expected = tmp_path / (state or ".local/state") / "quartet/jobs"
    assert GatewaySettings(pipeline=PIPELINE).jobs_dir == expected


def test_a_user_without_a_home(monkeypatch):
    """Such a user's gateway without videos starts; one with videos says what to do."""
    monkeypatch.delenv("QUARTET_GATEWAY_JOBS_DIR")
    for name in ("HOME", "XDG_STATE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", {}.__getitem__)  # KeyError, as for an id that has no entry
    settings = GatewaySettings.load([f"--pipeline={PIPELINE}"])
    assert settings.jobs_dir is None
    with pytest.raises(StoreError, match="--jobs-dir"):
        VideoStore(settings.jobs_dir, settings.video_ttl_s)


async def test_directories_that_cannot_be_used(tmp_path):
    (tmp_path / "file").write_text("")
    newer = tmp_path / "newer"
    newer.mkdir()
    with contextlib.closing(sqlite3.connect(newer / "videos.sqlite")) as database:
        database.execute("PRAGMA user_version = 99")
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken/videos.sqlite").write_bytes(b"not a database" * 1000)
    for directory, says in ((tmp_path / "file", "cannot be used"), (newer, "version"), (tmp_path / "broken", "used")):
        with pytest.raises(StoreError, match=says) as error:
            VideoStore(directory, 60).check()
        assert str(directory) in str(error.value)
    async with VideoStore(tmp_path / "good", 60):
        VideoStore(tmp_path / "good", 60).check()  # another gateway may use it, too
    assert (tmp_path / "good").stat().st_mode & 0o777 == 0o700
