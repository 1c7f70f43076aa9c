"""What the processes of one gateway share, and what they say together."""

import asyncio
import os
import sqlite3
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from gateway.access import shared as shared_state
from gateway.access.api_keys import ApiKey, ApiKeyEntry, digest
from gateway.access.shared import SharedState
from gateway.answers.transcripts import Transcripts
from gateway.errors import ApiError
from gateway.http.workers import merge
from gateway.workers import supervisor
from tests.support.disks import fill, small_disk

PAGE = """\
# HELP quartet_gateway_requests_total HTTP requests ended
# TYPE quartet_gateway_requests_total counter
quartet_gateway_requests_total{{path="/x"}} {requests}
# HELP quartet_gateway_replicas Replicas known
# TYPE quartet_gateway_replicas gauge
quartet_gateway_replicas{{stage="thinker"}} 2.0
# HELP vllm:num_requests_running Requests
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{{model_name="m"}} 7.0
"""


def test_what_a_killed_gateway_left_is_removed_and_what_a_running_one_has_is_not(tmp_path: Path):
    left = tmp_path / "quartet-gateway-left"
    left.mkdir()
    (left / "shared.sqlite").touch()
    with supervisor._directory(tmp_path) as first:
        assert not left.exists()
        with supervisor._directory(tmp_path) as second:
            assert first != second
            assert Path(first).exists()
    assert not list(tmp_path.iterdir())


def test_the_metrics_of_all_are_told_apart_and_those_of_the_stages_told_once():
    merged = merge.metrics([(i, httpx.Response(200, text=PAGE.format(requests=i + 1))) for i in range(3)])
    samples = {
        (sample.name, sample.labels.get("worker")): sample.value
        for family in text_string_to_metric_families(bytes(merged.body).decode())
        for sample in family.samples
    }
    assert samples == {
        ("quartet_gateway_requests_total", "0"): 1.0,
        ("quartet_gateway_requests_total", "1"): 2.0,
        ("quartet_gateway_requests_total", "2"): 3.0,
        ("quartet_gateway_replicas", None): 2.0,
        ("vllm:num_requests_running", None): 7.0,
    }


def test_a_process_that_starts_anew_has_nothing_running(tmp_path: Path):
    entry = ApiKeyEntry(name="alice", sha256=digest("x"), max_concurrent_requests=2)  # pyright: ignore[reportCallIssue]
    keys = [ApiKey(entry, SharedState(tmp_path / "shared.sqlite", worker)) for worker in range(2)]
    with keys[0].request(), keys[1].request():
        for key in keys:
            with pytest.raises(ApiError, match="has 2 requests in progress"), key.request():
                pass
        # process 1 was killed in the middle of its request
        anew = ApiKey(entry, SharedState(tmp_path / "shared.sqlite", 1))
        with anew.request():
            pass


def test_a_rate_is_that_of_all_processes(tmp_path: Path):
    entry = ApiKeyEntry(name="alice", sha256=digest("x"), requests_per_minute=3)  # pyright: ignore[reportCallIssue]
    keys = [ApiKey(entry, SharedState(tmp_path / "shared.sqlite", worker)) for worker in range(2)]
    for i in range(3):
        with keys[i % 2].request():
            pass
    for key in keys:
        with pytest.raises(ApiError, match="may make 3 requests a minute"), key.request():
            pass


def test_a_transcript_is_known_to_all_and_only_the_newest_are_kept(tmp_path: Path, monkeypatch):
    monkeypatch.setattr("gateway.answers.transcripts._MAX_TRANSCRIPTS", 3)
    first, second = (Transcripts(60, SharedState(tmp_path / "shared.sqlite", worker)) for worker in range(2))
    ids = [first.new_id() for _ in range(5)]
    for i, (audio_id, expires_at) in enumerate(ids):
        (first if i % 2 else second).put(audio_id, expires_at, f"said {i}")
    assert [second.get(audio_id) for audio_id, _ in ids] == [None, None, "said 2", "said 3", "said 4"]


def alone(shared: SharedState) -> ApiKey:
    """A key that may have one request."""
    return ApiKey(ApiKeyEntry(name="dave", sha256=digest("x"), max_concurrent_requests=1), shared)  # pyright: ignore[reportCallIssue]


def test_on_a_full_disk_requests_are_counted_in_and_out(tmp_path: Path):
    with small_disk(tmp_path / "disk", 16) as disk:
        keys = [alone(SharedState(disk / "counts.sqlite", worker)) for worker in range(2)]
        with keys[0].request():
            fill(disk)
        for i in range(2000):  # more than is written between two checkpoints
            with keys[i % 2].request():
                pass
        with keys[0].request(), pytest.raises(ApiError, match="has 1 requests in progress"), keys[1].request():
            pass


async def test_a_place_that_cannot_be_given_back_is_given_back_later(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(shared_state, "_BUSY_S", 0.01)
    monkeypatch.setattr(shared_state, "_AGAIN_S", 0.02)
    keys = [alone(SharedState(tmp_path / "counts.sqlite", worker)) for worker in range(2)]
    other = sqlite3.connect(tmp_path / "counts.sqlite", isolation_level=None)
    with keys[0].request():
        other.execute("BEGIN IMMEDIATE")
    with pytest.raises(ApiError) as refused, keys[1].request():
        pass
    assert (refused.value.status, refused.value.code, bool(refused.value.retry_after_s)) == (
        503,
        "storage_failed",
        True,
    )
    other.execute("ROLLBACK")
    async with asyncio.timeout(60):
        while True:  # without another request of the process that had the place
            with suppress(ApiError), keys[1].request():
                break
            await asyncio.sleep(0.01)


def test_an_answer_does_not_fail_for_its_transcript(tmp_path: Path):
    with small_disk(tmp_path / "disk", 16) as disk:
        transcripts = Transcripts(60, SharedState(disk / "shared.sqlite"))
        (disk / "filler").write_bytes(bytes(4 * 1024 * 1024))
        for i in range(20):
            transcripts.put(f"audio_{i}", int(time.time()) + 60, "x" * 1024 * 1024)
        assert transcripts.get("audio_0")


@pytest.mark.skipif(not os.access("/dev/shm", os.W_OK), reason="no /dev/shm here")
def test_what_is_counted_lies_where_no_client_writes():
    assert supervisor._memory().stat().st_dev != Path(tempfile.gettempdir()).stat().st_dev
