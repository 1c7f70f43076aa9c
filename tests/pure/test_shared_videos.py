"""Videos of gateways that share a database and a place of files, a folder or a bucket of a real S3 server, but no
directory."""

import asyncio
import random
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from sqlalchemy import update

from gateway.answers.video_files import VideoFiles
from gateway.answers.video_store import VideoJob, VideoStore
from gateway.answers.video_tables import videos
from gateway.store.blobs import Blobs
from quartet.v1 import dit_pb2, server_info_pb2
from tests.support.clock import put_forward, until
from tests.support.network.line import Line
from tests.support.systems.bucket import Bucket, blobs_left
from tests.support.systems.postgres import Place
from tests.support.systems.video import (
    MODEL,
    VIDEO_INFO,
    Client,
    create,
    decode_mp4,
    frames_of,
    gateway_before,
    scripted_dit,
)

PATH = "/v1/videos"
AWAY = "videos cannot be stored or read now, as their storage cannot be reached; try again"


@pytest.fixture
async def stage():
    info = server_info_pb2.DitInfo()
    info.CopyFrom(VIDEO_INFO)
    info.tasks.append(dit_pb2.DIT_TASK_VIDEO_TO_VIDEO)
    async with scripted_dit(info) as started:
        yield started


@pytest.fixture
async def two(stage, shared: dict[str, Any], tmp_path: Path) -> AsyncIterator[list[Client]]:
    """Gateways, each with a directory of its own."""
    async with AsyncExitStack() as stack:
        yield [
            await stack.enter_async_context(gateway_before(stage, tmp_path / name, **shared)) for name in ("one", "two")
        ]


def left(folder: Path) -> list[str]:
    """Names of files that are any video's."""
    return blobs_left(folder, "video_*")


async def test_any_gateway_has_what_another_one_made(two: list[Client], tmp_path: Path):
    first, second = two
    made = await create(first, seed=7)
    await first.reaches(made, "completed")
    assert left(tmp_path / "one") == left(tmp_path / "two") == []
    path = f"{PATH}/{made}/content"
    whole, same = [await each.http.get(path) for each in two]
    assert (whole.status_code, whole.headers["content-type"]) == (200, "video/mp4")
    assert whole.headers["content-disposition"] == f'attachment; filename="{made}.mp4"'
    assert whole.headers["content-length"] == str(len(whole.content))
    assert whole.content == same.content
    (start,) = first.script.requests
    assert decode_mp4(whole.content)[0].shape == frames_of(start).shape

    assert (await second.http.head(path)).headers["content-length"] == str(len(whole.content))
    assert (await second.http.delete(f"{PATH}/{made}")).status_code == 200
    for each in two:
        assert (await each.http.get(path)).status_code == 404
    assert left(tmp_path) == []


@pytest.mark.parametrize(
    ("asked", "first", "behind"),
    [
        ("bytes=100-199", 100, 200),
        ("bytes=100-", 100, None),
        ("bytes=-50", -50, None),
        ("Bytes = 0-0", 0, 1),
        ("bytes=10-99999999", 10, None),
    ],
)
async def test_a_range_is_the_same_at_any_gateway(two: list[Client], asked: str, first: int, behind: int | None):
    made = await create(two[0])
    await two[0].reaches(made, "completed")
    path = f"{PATH}/{made}/content"
    whole = await two[0].http.get(path)
    part = await two[1].http.get(path, headers={"range": asked})
    assert (part.status_code, part.content) == (206, whole.content[first:behind])
    begin = first % len(whole.content)
    assert part.headers["content-range"] == f"bytes {begin}-{begin + len(part.content) - 1}/{len(whole.content)}"
    for name in ("etag", "last-modified"):
        assert part.headers[name] == whole.headers[name]
        again = await two[1].http.get(path, headers={"range": asked, "if-range": whole.headers[name]})
        assert again.content == part.content


async def test_ranges_that_are_none(two: list[Client]):
    made = await create(two[0])
    await two[0].reaches(made, "completed")
    path = f"{PATH}/{made}/content"
    whole = (await two[0].http.get(path)).content
    for asked in ("bytes=9999999-", "bytes=-0"):
        refused = await two[1].http.get(path, headers={"range": asked})
        assert (refused.status_code, refused.headers["content-range"]) == (416, f"bytes */{len(whole)}")
    for asked in ("bytes=9-3", "bytes=0-1,5-9", "bytes=-", "lines=1-2", "bytes=x-9"):
        answer = await two[1].http.get(path, headers={"range": asked})
        assert (answer.status_code, answer.content) == (200, whole)
    other = await two[1].http.get(path, headers={"range": "bytes=0-1", "if-range": '"another file"'})
    assert (other.status_code, other.content) == (200, whole)


async def test_another_gateway_makes_a_video_of_it(two: list[Client]):
    first, second = two
    made = await create(first)
    await first.reaches(made, "completed")
    file = (await first.http.get(f"{PATH}/{made}/content")).content
    first.script.media.clear()
    remixed = await second.http.post(f"{PATH}/{made}/remix", json={"model": MODEL, "prompt": "at night"})
    assert (await second.reaches(remixed.json()["id"], "completed"))["remixed_from_video_id"] == made
    assert first.script.media == file


async def test_what_has_expired_is_removed_by_any_gateway(
    stage, shared: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    async with gateway_before(stage, tmp_path / "one", video_ttl_s=3600, **shared) as gateway:
        await gateway.reaches(await create(gateway), "completed")
    assert len(left(tmp_path)) == 1
    now = time.time
    monkeypatch.setattr(time, "time", lambda: now() + 3600)
    async with gateway_before(stage, tmp_path / "two", video_ttl_s=3600, **shared) as gateway:
        await gateway.until(lambda: left(tmp_path) == [])


async def test_videos_of_a_directory_from_before(stage, bucket: Bucket, tmp_path: Path):
    """A gateway that gets a bucket goes on with those that it has."""
    async with gateway_before(stage, tmp_path / "jobs") as gateway:
        made = await create(gateway)
        await gateway.reaches(made, "completed")
        file = (await gateway.http.get(f"{PATH}/{made}/content")).content
    async with gateway_before(stage, tmp_path / "jobs", blobs_url=bucket.url) as gateway:
        path = f"{PATH}/{made}/content"
        assert (await gateway.http.get(path)).content == file
        assert (await gateway.http.get(path, headers={"range": "bytes=5-9"})).content == file[5:10]
        new = await create(gateway)
        await gateway.reaches(new, "completed")
        assert left(tmp_path / "jobs") == [f"{made}.mp4"]
        assert [name.rpartition("/")[2] for name in bucket.objects()] == [new]
        assert (await gateway.http.delete(f"{PATH}/{made}")).status_code == 200
        assert left(tmp_path / "jobs") == []


async def test_a_file_that_somebody_removed(two: list[Client], tmp_path: Path):
    made = await create(two[0])
    await two[0].reaches(made, "completed")
    (path,) = (path for path in tmp_path.rglob(made) if path.is_file())
    path.unlink()
    answer = await two[1].http.get(f"{PATH}/{made}/content")
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "not_found")
    assert "removed from the server's storage" in answer.json()["error"]["message"]


async def test_a_bucket_that_is_away_when_a_video_is_asked_for(stage, bucket: Bucket, tmp_path: Path):
    async with gateway_before(stage, tmp_path / "jobs", blobs_url=bucket.url) as gateway:
        made = await create(gateway)
        await gateway.reaches(made, "completed")
        await bucket.stop()
        asked = [("GET", f"{made}/content"), ("POST", f"{made}/remix"), ("DELETE", made)]
        for method, path in asked:
            body = {"model": MODEL, "prompt": "at night"} if method == "POST" else None
            answer = await gateway.http.request(method, f"{PATH}/{path}", json=body)
            error = answer.json()["error"]
            assert (answer.status_code, error["code"], error["message"]) == (503, "storage_unavailable", AWAY)
            assert answer.headers["retry-after"] == "5"
        await bucket.start()
        assert (await gateway.http.delete(f"{PATH}/{made}")).status_code == 200
        assert bucket.objects() == []


@pytest.mark.parametrize("comes_back", [True, False])
async def test_a_bucket_that_goes_away_while_a_video_goes_there(
    stage, bucket: Bucket, line: Line, tmp_path: Path, comes_back: bool
):
    """It has a minute to come back."""
    line.most_bytes = (2000, None)  # in the middle of the file
    async with gateway_before(stage, tmp_path / "jobs", blobs_url=bucket.url) as gateway:
        made = await create(gateway)
        await line.full.wait()
        line.cut()
        if comes_back:
            line.most_bytes = (None, None)
            await line.join()
            await gateway.reaches(made, "completed")
            assert [name.rpartition("/")[2] for name in bucket.objects()] == [made]
        else:
            put_forward(60)
            video = await gateway.reaches(made, "failed")
            assert video["error"] == {"code": "storage_unavailable", "message": AWAY}
            assert bucket.objects() == []
        assert left(tmp_path / "jobs") == []


async def test_a_bucket_that_goes_away_while_a_video_comes_from_there(stage, bucket: Bucket, line: Line, tmp_path):
    """The client sees that the file is not whole, and gets the rest later."""
    async with gateway_before(stage, tmp_path / "jobs", blobs_url=bucket.url) as gateway:
        made = await create(gateway)
        await gateway.reaches(made, "completed")
        (name,) = bucket.objects()
        large = random.randbytes(16 * 1024 * 1024)  # more than any buffer on the way
        await Blobs(bucket.url, "blobs_url").put(name.removeprefix("some/prefix/"), _once(large))
        line.cut()
        line.most_bytes = (None, 8 * 1024 * 1024)
        await line.join()
        path, received = f"{PATH}/{made}/content", bytearray()
        async with gateway.http.stream("GET", path) as answer:
            assert (answer.status_code, answer.headers["content-length"]) == (200, str(len(large)))
            cutting = asyncio.create_task(_cut_when_full(line))
            with pytest.raises(httpx.RemoteProtocolError):
                await _receive(answer, received)
            await cutting
        assert 0 < len(received) < len(large)
        line.most_bytes = (None, None)
        await line.join()
        rest = {"range": f"bytes={len(received)}-", "if-range": answer.headers["etag"]}
        answer = await gateway.http.get(path, headers=rest)
        assert answer.status_code == 206
        assert received + answer.content == large


async def _once(content: bytes) -> AsyncIterator[bytes]:
    yield content


async def _cut_when_full(line: Line) -> None:
    await line.full.wait()
    line.cut()


async def _receive(answer: httpx.Response, received: bytearray) -> None:
    async for piece in answer.aiter_raw():
        received += piece


@pytest.fixture(params=["folder", "bucket"])
def blobs(request: pytest.FixtureRequest, tmp_path: Path) -> Blobs:
    if request.param == "folder":
        return Blobs(tmp_path / "files/blobs", "files_dir")
    return Blobs(request.getfixturevalue("bucket").url, "blobs_url")


async def _put(store: VideoStore, video_id: str) -> None:
    store.files.part(video_id).write_bytes(b"a file")
    await store.files.share(video_id)


async def _there(store: VideoStore) -> list[str]:
    found = []
    for video in ("new", "making", "done", "failed", "none"):
        if (pieces := await store.files.open(f"video_{video}")) is not None:
            async with aclosing(pieces):
                assert b"".join([piece async for piece in pieces]) == b"a file"
            found.append(video)
    return found


async def test_what_no_video_has_is_swept(blobs: Blobs, place: Place, tmp_path: Path):
    """Once it is old: what is young may be that of a job whose end is being stored."""
    async with VideoStore(place(), 60, tmp_path / "one", blobs) as store:
        for video in ("making", "done", "failed"):
            await store.add(VideoJob(f"video_{video}", MODEL, "a boat", "queued", 0, 1, 64, 48, 9, 16.0))
        for video, status in (("done", "completed"), ("failed", "failed")):
            changed = update(videos).where(videos.c.id == f"video_{video}").values(status=status)
            await store.write(lambda connection, changed=changed: connection.execute(changed))
        store.live["video_making"] = replace(VideoJob("video_making", MODEL, "", "queued", 0, 1, 64, 48, 9, 16.0))
        for video in ("making", "done", "failed", "none"):
            await _put(store, f"video_{video}")
        await store.sweep()
        assert await _there(store) == ["making", "done", "failed", "none"]
        assert left(tmp_path / "one") == ["video_making.part", "video_none.part"]
        old = time.time() + 7200
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("time.time", lambda: old)
            await store.sweep()
        assert await _there(store) == ["making", "done"]
        assert left(tmp_path / "one") == ["video_making.part"]


async def test_the_holder_of_a_deleted_video_takes_back_what_it_shares(
    stage, two: list[Client], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """It was deleted at the other gateway just before its file was there."""
    first, second = two
    share, begins, goes_on, ends = VideoFiles.share, asyncio.Event(), asyncio.Event(), asyncio.Event()
    seen = list[str]()

    async def late(self: VideoFiles, video_id: str) -> None:
        begins.set()
        await goes_on.wait()
        await asyncio.shield(share(self, video_id))
        seen.extend(left(tmp_path))
        ends.set()

    monkeypatch.setattr(VideoFiles, "share", late)
    made = await create(first)
    await begins.wait()
    assert (await second.http.delete(f"{PATH}/{made}")).status_code == 200
    goes_on.set()
    await ends.wait()
    assert seen == [made, f"{made}.part"]
    await until(lambda: left(tmp_path) == [])
    assert (await first.http.get(f"{PATH}/{made}")).status_code == 404
