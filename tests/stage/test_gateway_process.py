"""The gateway's process: what it loads, and when it does not start."""

import asyncio
import signal
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

import httpx
import pytest

from gateway.access.api_keys import digest, new_key
from tests.support.network.certificates import flags, issue, make
from tests.support.systems.gateway import SPEECH
from tests.support.systems.stack import free_port
from tests.support.systems.video import STEPS, VIDEO_INFO, create, decode_mp4, gateway_process, scripted_dit

COMMAND = [sys.executable, "-m", "gateway", f"--pipeline={SPEECH}"]


def refused(*flags: str) -> str:
    """What a gateway says that does not start."""
    ended = subprocess.run([*COMMAND, "--port=0", *flags], capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 1
    return ended.stderr


def test_the_gateway_needs_no_engine():
    code = "import sys, gateway.app; print(*sorted({'torch', 'vllm', 'transformers', 'openai'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.strip() == ""


def test_without_its_file_of_keys_it_does_not_start(tmp_path: Path):
    missing = refused("--host=0.0.0.0", f"--api-keys-file={tmp_path}/none.yaml")
    assert f"{tmp_path}/none.yaml:1: cannot be read" in missing


@pytest.mark.parametrize(("key", "reason"), [(None, ": No such file or directory"), ("short", " has 5 bytes")])
def test_without_a_signing_key_in_its_file_it_does_not_start(tmp_path: Path, key: str | None, reason: str):
    file = tmp_path / "signing.key"
    if key is not None:
        file.write_text(key)
    for workers in (1, 2):
        said = refused(f"--signing-key-file={file}", f"--workers={workers}")
        assert said.startswith(f"--signing-key-file: {file}{reason}")
        assert "openssl rand" in said


async def test_with_keys_it_listens_for_others(tmp_path: Path):
    file = tmp_path / "keys.yaml"
    file.write_text(f'keys:\n  - name: alice\n    sha256: "{digest(new_key())}"\n')
    port = free_port()
    process = subprocess.Popen([*COMMAND, f"--port={port}", "--host=0.0.0.0", f"--api-keys-file={file}"])
    try:
        async with asyncio.timeout(120), httpx.AsyncClient() as client:
            while True:
                assert process.poll() is None
                try:
                    answer = await client.get(f"http://127.0.0.1:{port}/health")
                    break
                except httpx.TransportError:
                    await asyncio.sleep(0.05)
        assert answer.json() == {"status": "ok"}
    finally:
        process.terminate()
        process.wait()


def test_it_does_not_start_with_an_expired_certificate(tmp_path: Path):
    directory = make(tmp_path, "gateway")
    issue(directory, "gateway", -timedelta(minutes=1))
    said = refused(*flags(directory, "gateway"))
    assert f"--tls-cert: {directory}/gateway/tls.crt expired at" in said


@pytest.mark.long
async def test_a_killed_gateway_loses_no_video(tmp_path: Path):
    """kill -9 with a finished video, one in the making and one that waits: the next gateway says so of each, once the
    leases are over."""
    async with scripted_dit(VIDEO_INFO) as stage:
        async with gateway_process(stage, tmp_path / "jobs", max_running_videos=1) as (gateway, process):
            finished = await create(gateway)
            await gateway.reaches(finished, "completed")
            content = (await gateway.http.get(f"/v1/videos/{finished}/content")).content
            stage.script.hold, stage.script.after = True, STEPS + 2  # while frames come
            running, waiting = await create(gateway), await create(gateway)
            await gateway.until(stage.script.holding.is_set)
            await gateway.reaches(running, "in_progress")
            process.kill()
            await process.wait()
        await gateway.until(lambda: stage.script.ended == ["done", "cancelled"])
        (tmp_path / "jobs" / f"{running}.part").write_bytes(b"the encoder holds back what is so short a video")

        async with gateway_process(stage, tmp_path / "jobs") as (gateway, _):
            for video_id in (running, waiting):
                await gateway.reaches(video_id, "failed")
            listed = (await gateway.http.get("/v1/videos")).json()["data"]
            assert [video["id"] for video in listed] == [waiting, running, finished]
            for video in listed[:2]:
                assert video["status"] == "failed"
                assert video["error"]["code"] == "interrupted"
                assert "stopped before" in video["error"]["message"]
                assert video["expires_at"] > time.time()
            assert listed[2]["status"] == "completed"
            assert (await gateway.http.get(f"/v1/videos/{finished}/content")).content == content
            assert len(decode_mp4(content)[0]) == VIDEO_INFO.default_frames
            left = {path.name for path in (tmp_path / "jobs").glob("video_*")}
            assert left == {f"{finished}.mp4"}


@pytest.mark.long
async def test_a_gateway_that_stood_still_gives_its_video_up(tmp_path: Path):
    """SIGSTOP for longer than a lease: another gateway has ended its video, and it changes nothing of that."""
    async with (
        scripted_dit(VIDEO_INFO) as stage,
        gateway_process(stage, tmp_path / "jobs") as (first, process),
        gateway_process(stage, tmp_path / "jobs") as (second, _),
    ):
        stage.script.hold, stage.script.after = True, STEPS + 2  # while frames come
        making = await create(first)
        await second.reaches(making, "in_progress")
        await first.until(stage.script.holding.is_set)
        process.send_signal(signal.SIGSTOP)
        try:
            failed = await second.reaches(making, "failed")
        finally:
            process.send_signal(signal.SIGCONT)
        assert failed["error"]["code"] == "interrupted"
        await first.until(lambda: stage.script.ended == ["cancelled"])
        for gateway in (first, second):
            assert await gateway.video(making) == failed
        await first.until(lambda: list((tmp_path / "jobs").glob("video_*")) == [])
        stage.script.hold = False
        await second.reaches(await create(first), "completed")
