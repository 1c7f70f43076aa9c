"""A video belongs to one of several gateways: the others see it, delete it, and end it once that one is gone."""

import asyncio
import os
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from sqlalchemy import update
from structlog.testing import capture_logs

from gateway.answers.video_store import LeaseLost, VideoJob, VideoStore
from gateway.answers.video_tables import videos
from tests.support.systems.postgres import Place
from tests.support.systems.video import MODEL, VIDEO_INFO, create, gateway_before, scripted_dit

PATH = "/v1/videos"


def job(number: int = 1, **members) -> VideoJob:
    return VideoJob(f"video_{number}", MODEL, "a boat", "queued", 0, 1, 64, 48, 9, 16.0, **members)


@pytest.fixture
async def stores(place: Place, tmp_path: Path) -> AsyncIterator[list[VideoStore]]:
    """Those of three gateways."""
    async with AsyncExitStack() as stack:
        yield [await stack.enter_async_context(VideoStore(place(), 60, tmp_path / "files")) for _ in range(3)]


@pytest.fixture
async def stage():
    async with scripted_dit(VIDEO_INFO) as started:
        yield started


async def let_leases_end(store: VideoStore) -> None:
    await store.write(lambda connection: connection.execute(update(videos).values(held_until=0)))


async def test_a_video_is_the_same_at_every_gateway(stores: list[VideoStore]):
    first, second, _ = stores
    for number in (1, 2, 3):
        await first.add(job(number, owner="ada" if number == 2 else "bob", seed=str(2**64 - 1)))
    making = job(1, owner="bob", seed=str(2**64 - 1))
    making.status, making.progress = "in_progress", 40
    assert await first.keep(["video_1", "video_3", "video_9"], [making], renews=True) == {"video_1", "video_3"}
    assert await second.get("video_1", "bob") == making
    assert [await second.get("video_1", "ada"), await second.get("vid\0eo", None)] == [None, None]
    listed = [await second.page(after, 2, newest, "bob") for after, newest in ((None, True), ("video_1", False))]
    assert [[video.id for video in found or ()] for found in listed] == [["video_3", "video_1"], ["video_3"]]
    assert await second.page("video_2", 2, True, "bob") is None
    ended = job(1, owner="bob")
    ended.status, ended.progress, ended.expires_at = "completed", 100, time.time() + 60
    await first.end(ended)
    await first.end(ended)  # again, as the answer was lost
    assert await second.get("video_1") == ended
    ended.status = "failed"
    with pytest.raises(LeaseLost):
        await first.end(ended)


async def test_what_has_expired_is_gone_at_every_gateway(stores: list[VideoStore]):
    first, second, _ = stores
    await first.add(job())
    ended = job()
    ended.status, ended.expires_at = "completed", time.time() - 1
    await first.end(ended)
    second.files.file("video_1").write_bytes(b"video")
    assert (await second.get("video_1"), await second.page(None, 5, True)) == (None, [])
    assert await second.remove_expired() == 1
    assert not first.files.file("video_1").exists()
    assert await first.remove_expired() == 0


async def test_a_video_whose_lease_is_over_fails_once(stores: list[VideoStore]):
    first, second, third = stores
    for number in (1, 2):
        await first.add(job(number))
        for path in (first.files.part(f"video_{number}"), *first.files.inputs(f"video_{number}")):
            path.write_bytes(b"x")
    assert (await second.get("video_1")) == job(1)  # nobody ends what is held
    await let_leases_end(second)
    with capture_logs() as logs:
        await asyncio.gather(*(store.get("video_1") for store in (second, third) for _ in range(5)))
    assert [sorted(line["videos"]) for line in logs if line["event"] == "videos interrupted"] == [
        ["video_1", "video_2"]
    ]
    for store in stores:
        failed = await store.get("video_1")
        assert failed is not None
        assert (failed.status, failed.error_code, failed.completed_at) == ("failed", "interrupted", None)
        assert "stopped before" in str(failed.error_message)
        assert time.time() < (failed.expires_at or 0) <= time.time() + 60
    assert list(first.files.directory.iterdir()) == []


@pytest.mark.parametrize("way", ["ended", "deleted"])
async def test_a_holder_that_comes_too_late_changes_nothing(stores: list[VideoStore], way: str):
    first, second, _ = stores
    await first.add(job())
    if way == "ended":
        await let_leases_end(second)
    else:
        await second.remove("video_1")
    seen = await second.get("video_1")
    late = job()
    late.status, late.progress = "in_progress", 50
    assert await first.keep(["video_1"], [late], renews=True) == set()
    late.status = "completed"
    with pytest.raises(LeaseLost):
        await first.end(late)
    await first.give_up()
    assert await second.get("video_1") == seen
    assert (seen is None) == (way == "deleted")


async def test_a_lease_that_is_renewed_in_time_stays(stores: list[VideoStore]):
    """Also one that nobody has ended since it was over."""
    first, second, third = stores
    await first.add(job())
    first.live["video_1"] = job()
    await let_leases_end(second)
    await first.end_lost()  # its own
    assert await first.keep(["video_1"], [], renews=True) == {"video_1"}
    for other in (second, third):
        await other.end_lost()
        found = await other.get("video_1")
        assert found is not None
        assert found.status == "queued"


async def test_what_a_gateway_gives_up_is_its_own(stores: list[VideoStore]):
    first, second, third = stores
    await first.add(job(1))
    await second.add(job(2))
    await first.give_up()
    found = [await third.get(f"video_{number}") for number in (1, 2)]
    assert [video and video.status for video in found] == ["failed", "queued"]


async def test_files_that_no_video_has_are_removed_when_they_are_old(place: Place, tmp_path: Path):
    async with VideoStore(place(), 60, tmp_path / "files") as store:
        await store.add(job())
        kept = [store.files.inputs("video_1")[0], store.files.part("video_2"), tmp_path / "files/notes.txt"]
        orphans = [store.files.part("video_3"), store.files.file("video_3"), store.files.inputs("video_3")[1]]
        for path in (*kept, *orphans):
            path.write_bytes(b"x")
            if path != kept[1]:  # another gateway may be about to store its row
                os.utime(path, (0, 0))
    async with VideoStore(place(), 60, tmp_path / "files") as store:
        assert all(path.exists() for path in kept)
        assert not any(path.exists() for path in orphans)


async def test_two_gateways_with_one_directory(stage, tmp_path: Path):
    async with gateway_before(stage, tmp_path) as first, gateway_before(stage, tmp_path) as second:
        finished = await create(first)
        made = await first.reaches(finished, "completed")
        assert await second.video(finished) == made
        contents = [(await each.http.get(f"{PATH}/{finished}/content")).content for each in (first, second)]
        assert contents[0] == contents[1] != b""

        stage.script.hold, stage.script.after = True, 4  # started, and three of five steps
        making = await create(first)
        await first.until(stage.script.holding.is_set)
        steps = 99 * 3 // 5

        async def is_told() -> bool:
            video = await second.video(making)
            return (video["status"], video["progress"]) == ("in_progress", steps)

        await second.until(is_told)
        waiting = [video["id"] for video in (await second.http.get(PATH)).json()["data"]]
        assert waiting == [making, finished]
        assert (await second.http.delete(f"{PATH}/{making}")).status_code == 200
        for each in (first, second):
            assert (await each.http.get(f"{PATH}/{making}")).status_code == 404
        await first.until(lambda: stage.script.ended == ["done", "cancelled"])
        assert (await second.http.delete(f"{PATH}/{finished}")).status_code == 200
        assert (await first.http.get(f"{PATH}/{finished}")).status_code == 404
        await first.until(lambda: list(tmp_path.glob("video_*")) == [])


@pytest.mark.parametrize("steps", [0, 7])  # before it has begun, and while frames are written
async def test_a_gateway_stops_what_another_one_has_ended(stage, tmp_path: Path, steps: int):
    stage.script.hold, stage.script.after = True, steps
    async with gateway_before(stage, tmp_path) as gateway, VideoStore(tmp_path, 60) as other:
        making = await create(gateway)
        await gateway.until(stage.script.holding.is_set)
        ended = {"status": "failed", "error_code": "interrupted", "holder": None, "held_until": None}
        await other.write(lambda connection: connection.execute(update(videos).values(ended)))
        assert (await gateway.video(making))["status"] == "failed"  # what is stored counts
        await gateway.until(lambda: stage.script.ended == ["cancelled"])
        await gateway.until(lambda: list(tmp_path.glob("video_*")) == [])
        assert (await gateway.video(making))["error"]["code"] == "interrupted"
        stage.script.hold = False
        await gateway.reaches(await create(gateway), "completed")  # its place is free


async def test_a_prompt_that_no_database_keeps_is_refused(stage, tmp_path: Path):
    async with gateway_before(stage, tmp_path) as gateway:
        assert (await gateway.refusal(PATH, {"model": MODEL, "prompt": "a\0boat"}))[:2] == (400, "prompt")
        assert (await gateway.http.get(f"{PATH}/a%00b")).status_code == 404
        assert (await gateway.http.get(f"{PATH}?after=a%00b")).status_code == 400
