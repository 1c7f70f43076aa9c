"""A gateway is killed in the middle of a video's way to the bucket."""

from pathlib import Path

import psycopg
import pytest

from tests.support.network.line import Line
from tests.support.systems.bucket import Bucket
from tests.support.systems.video import VIDEO_INFO, create, gateway_before, gateway_process, scripted_dit

pytestmark = pytest.mark.long


def left(folder: Path) -> list[str]:
    """Names of files that are any video's."""
    return [path.name for path in folder.glob("video_*")]


async def test_a_gateway_that_is_killed_while_a_video_goes_to_the_bucket(
    bucket: Bucket, line: Line, tmp_path: Path, postgres_url: str
) -> None:
    """Another gateway ends it, and nothing is left in the bucket, nor in its own directory once it is back."""
    settings = {"database_url": postgres_url, "blobs_url": bucket.url, "files_dir": tmp_path / "files"}
    async with scripted_dit(VIDEO_INFO) as stage, gateway_before(stage, tmp_path / "other", **settings) as other:
        line.most_bytes = (2000, None)
        async with gateway_process(stage, tmp_path / "jobs", **settings) as (gateway, process):
            made = await create(gateway)
            await line.full.wait()
            assert left(tmp_path / "jobs") == [f"{made}.part"]
            process.kill()
            await process.wait()
        async with await psycopg.AsyncConnection.connect(postgres_url, autocommit=True) as database:
            await database.execute("UPDATE videos SET held_until = 0")
        assert (await other.video(made))["error"]["code"] == "interrupted"
        line.most_bytes = (None, None)
        async with gateway_before(stage, tmp_path / "jobs", **settings) as again:
            assert (await again.video(made))["error"]["code"] == "interrupted"
            assert left(tmp_path / "jobs") == []
        assert bucket.objects() == []
