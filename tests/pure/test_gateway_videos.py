"""`/v1/videos` over HTTP, with a scripted stage and OpenAI's own client."""

import asyncio
import base64
import io
import time
from pathlib import Path

import av
import numpy as np
import openai
import pytest
from openai.types import Video
from PIL import Image
from structlog.testing import capture_logs

from quartet.v1 import dit_pb2, server_info_pb2
from services.common.errors import InternalError, InvalidInput, QueueFull, Unavailable
from tests.support.systems.video import (
    DRAWN_SEED,
    FPS,
    MODEL,
    RATE_HZ,
    SOUND_INFO,
    STEPS,
    VIDEO_INFO,
    create,
    decode_mp4,
    frames_of,
    gateway_before,
    samples_of,
    scripted_dit,
)

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # OpenAI's client about its own videos
]
PATH = "/v1/videos"
ASK = {"model": MODEL, "prompt": "a boat"}


def png(width: int = 32, height: int = 32) -> bytes:
    file = io.BytesIO()
    Image.new("1", (width, height)).save(file, "PNG")
    return file.getvalue()


@pytest.fixture
def gateway(video_gateway):
    return video_gateway


@pytest.fixture
def jobs_dir(gateway) -> Path:
    """Where the gateway keeps its videos."""
    return gateway.jobs_dir


async def test_official_client_from_creation_to_file(gateway):
    videos = gateway.openai.videos
    video = await videos.create_and_poll(
        prompt="a boat", model=MODEL, seconds="1", size="96x64", poll_interval_ms=20, extra_body={"seed": 7}
    )
    assert isinstance(video, Video)
    assert (video.status, video.progress, video.object, video.model) == ("completed", 100, "video", MODEL)
    assert (video.prompt, video.size, video.seconds, video.error) == ("a boat", "96x64", "1.062", None)
    assert video.completed_at
    assert video.expires_at
    assert video.created_at <= video.completed_at <= time.time()
    assert video.expires_at - video.completed_at == pytest.approx(86400, abs=1)
    assert video.model_dump()["quartet"] == {"seed": 7, "num_frames": 17, "frames_per_second": FPS}

    content = await (await videos.download_content(video.id)).aread()
    assert content.find(b"moov") < content.find(b"mdat")  # plays while it loads
    frames, rate = decode_mp4(content)
    (start,) = gateway.script.requests
    assert (start.width, start.height, start.num_frames, start.seed, start.count) == (96, 64, 17, 7, 1)
    assert frames.shape == (17, 64, 96, 3)
    assert rate == FPS
    assert np.abs(frames.astype(int) - frames_of(start)).mean() < 4

    assert [listed.id async for listed in videos.list()] == [video.id]
    deleted = await videos.delete(video.id)
    assert (deleted.id, deleted.deleted, deleted.object) == (video.id, True, "video.deleted")
    with pytest.raises(openai.NotFoundError):
        await videos.retrieve(video.id)


async def test_defaults_are_the_model_s(gateway):
    created = (await gateway.http.post(PATH, json={"prompt": "a boat"})).json()
    assert (created["status"], created["progress"], created["size"]) == ("queued", 0, "64x48")
    assert (created["completed_at"], created["expires_at"], created["error"]) == (None, None, None)
    video = await gateway.reaches(created["id"], "completed")
    assert video["quartet"] == {"seed": DRAWN_SEED, "num_frames": 9, "frames_per_second": FPS}
    (start,) = gateway.script.requests
    fields = {field.name for field, _ in start.ListFields()}
    assert fields == {"request_id", "prompt", "count", "num_frames", "pixel_format", "progress_interval_ms"}
    assert start.request_id == created["id"]


async def test_a_video_has_its_sound(tmp_path, monkeypatch):
    info = server_info_pb2.DitInfo()
    info.CopyFrom(VIDEO_INFO)
    info.soundtrack_rate_hz = RATE_HZ
    async with scripted_dit(info) as stage, gateway_before(stage, tmp_path) as client:
        video_id = await create(client)
        await client.reaches(video_id, "completed")
        content = (await client.http.get(f"{PATH}/{video_id}/content")).content
        (start,) = client.script.requests
        monkeypatch.setattr("tests.support.systems.video.samples_of", lambda start: np.zeros((5, 3), np.float32))
        await client.reaches(await create(client), "failed")  # no sound has three channels
    frames, _ = decode_mp4(content)
    assert np.abs(frames.astype(int) - frames_of(start)).mean() < 4
    with av.open(io.BytesIO(content)) as container:
        (track,) = container.streams.audio
        assert (track.codec_context.name, track.rate, track.channels) == ("aac", RATE_HZ, 2)
        heard = np.concatenate([frame.to_ndarray() for frame in container.decode(track)], axis=1)  # pyright: ignore[reportAttributeAccessIssue]
    sent = samples_of(start).T
    assert len(sent.T) <= len(heard.T) < len(sent.T) + 2048  # frames of AAC are whole
    assert np.square(heard[:, : len(sent.T)] - sent).sum() < 0.01 * np.square(sent).sum()


async def test_one_frame_of_a_model_of_images_and_videos_is_of_a_prompt_alone(tmp_path):
    info = server_info_pb2.DitInfo()
    info.CopyFrom(VIDEO_INFO)
    info.tasks[:] = [dit_pb2.DIT_TASK_TEXT_TO_VIDEO, dit_pb2.DIT_TASK_TEXT_TO_IMAGE, dit_pb2.DIT_TASK_IMAGE_TO_VIDEO]
    files = {"input_reference": ("a.png", png())}
    async with scripted_dit(info) as stage, gateway_before(stage, tmp_path) as client:
        for field, value in (("num_frames", "1"), ("seconds", "0.01")):
            response = await client.http.post(PATH, data={"prompt": "a boat", field: value}, files=files)
            error = response.json()["error"]
            assert (response.status_code, error["param"]) == (400, field)
            assert "ask for 5 or more" in error["message"]
        response = await client.http.post(PATH, data={"prompt": "a boat", "num_frames": "5"}, files=files)
        assert response.status_code == 200
        await client.reaches(response.json()["id"], "completed")


async def test_ranges_of_the_file(gateway):
    video_id = await create(gateway)
    await gateway.reaches(video_id, "completed")
    path = f"{PATH}/{video_id}/content"
    whole = await gateway.http.get(path)
    assert (whole.status_code, whole.headers["content-type"]) == (200, "video/mp4")
    part = await gateway.http.get(path, headers={"range": "bytes=100-199"})
    assert (part.status_code, part.content) == (206, whole.content[100:200])
    assert part.headers["content-range"] == f"bytes 100-199/{len(whole.content)}"
    assert (await gateway.http.get(path, headers={"range": "bytes=9999999-"})).status_code == 416


@pytest.mark.parametrize("how", ["form", "object in a form", "json", "uploaded"])
async def test_a_first_frame(gateway, how):
    picture = png()
    url = "data:image/png;base64," + base64.b64encode(picture).decode()
    more = {"seed": 3, "lora": {"film": 0.5}, "num_inference_steps": 4, "guidance_scale": 2.5, "negative_prompt": "fog"}
    if how == "uploaded":
        file = await gateway.openai.files.create(file=("boat.png", picture), purpose="user_data")
        await create(gateway, input_reference={"file_id": file.id}, **more)
    elif how == "json":
        await create(gateway, input_reference={"image_url": url}, **more)
    else:
        # the client's own argument takes files only
        file = {"input_reference": ("boat.png", picture, "image/png")} if how == "form" else {}
        body = more if how == "form" else more | {"input_reference": {"image_url": url}}
        await gateway.openai.videos.create(prompt="a boat", model=MODEL, **file, extra_body=body)
    await gateway.until(lambda: gateway.script.ended == ["done"])
    (start,) = gateway.script.requests
    assert bytes(gateway.script.media) == picture
    assert (start.seed, start.num_inference_steps, start.guidance_scale) == (3, 4, 2.5)
    assert (start.negative_prompt, start.loras[0].name, start.loras[0].weight) == ("fog", "film", 0.5)


async def test_progress_follows_the_steps(gateway):
    gateway.script.hold, gateway.script.after = True, 3  # started, and two steps of five
    video_id = await create(gateway)
    await gateway.reaches(video_id, "in_progress")

    async def two_fifths() -> bool:
        return (await gateway.video(video_id))["progress"] == 99 * 2 // STEPS

    await gateway.until(two_fifths)
    response = await gateway.http.get(f"{PATH}/{video_id}/content")
    assert response.status_code == 404
    assert response.json()["error"]["code"] == "video_not_completed"


@pytest.mark.parametrize("after", [0, 3, STEPS + 2])  # before it starts, at step two, while frames come
async def test_deleting_cancels(gateway, jobs_dir, after):
    gateway.script.hold, gateway.script.after = True, after
    video_id = await create(gateway)
    await gateway.until(gateway.script.holding.is_set)
    deleted = await asyncio.gather(*(gateway.http.delete(f"{PATH}/{video_id}") for _ in range(2)))
    assert 200 in {response.status_code for response in deleted}
    await gateway.until(lambda: gateway.script.ended == ["cancelled"])
    assert (await gateway.http.get(f"{PATH}/{video_id}")).status_code == 404
    assert list(jobs_dir.glob("video_*")) == []


async def test_pages_of_the_list(gateway):
    ids = [await create(gateway) for _ in range(5)]
    newest = (await gateway.http.get(PATH, params={"limit": 2})).json()
    assert [video["id"] for video in newest["data"]] == [ids[4], ids[3]]
    assert (newest["object"], newest["has_more"], newest["last_id"]) == ("list", True, ids[3])
    last = (await gateway.http.get(PATH, params={"limit": 2, "after": ids[1]})).json()
    assert [video["id"] for video in last["data"]] == [ids[0]]
    assert last["has_more"] is False
    listed = [video.id async for video in gateway.openai.videos.list(limit=2, order="asc")]
    assert listed == ids
    limits = [{"limit": limit} for limit in ("0", "101", "x", "1" * 5000)]
    for params in (*limits, {"order": "up"}, {"after": "video_none"}):
        response = await gateway.http.get(PATH, params=params)
        assert (response.status_code, response.json()["error"]["param"]) == (400, next(iter(params)))


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"prompt": ""}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"seconds": 0}, "seconds"),
        ({"seconds": "soon"}, "seconds"),
        ({"seconds": "nan"}, "seconds"),
        ({"seconds": 4}, "seconds"),
        ({"seconds": 1, "num_frames": 17}, "num_frames"),
        ({"num_frames": 18}, "num_frames"),
        ({"num_frames": 37}, "num_frames"),
        ({"size": "big"}, "size"),
        ({"size": "65x48"}, "size"),
        ({"size": "0x48"}, "size"),
        ({"size": "4096x4096"}, "size"),
        ({"num_inference_steps": 0}, "num_inference_steps"),
        ({"num_inference_steps": 51}, "num_inference_steps"),
        ({"guidance_scale": -1}, "guidance_scale"),
        ({"lora": {"none": 1}}, "lora"),
        ({"lora": 3}, "lora"),
        ({"input_reference": {"file_id": "f"}}, "input_reference.file_id"),
        ({"input_reference": {"file_id": "f", "image_url": "data:,x"}}, "input_reference"),
        ({"input_reference": {}}, "input_reference"),
        ({"input_reference": {"image_url": "data:image/png;base64,AAAA"}}, "input_reference"),
        ({"input_reference": {"image_url": "ftp://host/x.png"}}, "input_reference"),
        ({"fps": 24}, "fps"),
    ],
)
async def test_bad_members_are_refused_by_name(gateway, change, param):
    status, named, message = await gateway.refusal(PATH, ASK | change)
    assert (status, named) == (400, param), message
    assert (await gateway.http.get(PATH)).json()["data"] == []


async def test_bad_forms(gateway):
    def form(**fields):
        return {name: (None, value) for name, value in fields.items()}

    for files, param in (
        (form(prompt="x", num_inference_steps="many"), "num_inference_steps"),
        (form(prompt="x", lora="none"), "lora"),
        (form(prompt="x", lora="[" * 100_000), "lora"),
        (form(prompt="x", guidance_scale="inf"), "guidance_scale"),
        (form(prompt="x") | {"lora[film]": (None, "nan")}, "lora.film"),
        (form(prompt="x") | {"input_reference": ("x.png", b"no picture")}, "input_reference"),
        (form(prompt="x") | {"input_reference": ("x.png", png(20_000, 20_000))}, "input_reference"),
        (form(prompt="x") | {"mask": ("x.png", png())}, "mask"),
        (form(seconds="1"), "prompt"),
    ):
        response = await gateway.http.post(PATH, files=files)
        assert (response.status_code, response.json()["error"]["param"]) == (400, param), response.text
    broken = {"content-type": "multipart/form-data"}
    assert (await gateway.http.post(PATH, content=b"--", headers=broken)).status_code == 400


@pytest.mark.parametrize("number", ["1e999", "NaN"])
async def test_numbers_that_are_none(gateway, number):
    for member, param in (('"guidance_scale": %s', "guidance_scale"), ('"lora": {"film": %s}', "lora.film")):
        response = await gateway.http.post(PATH, content='{"prompt": "x", %s}' % (member % number))
        assert (response.status_code, response.json()["error"]["param"]) == (400, param)


async def test_frames_larger_than_a_file_can_have(tmp_path, monkeypatch):
    info = server_info_pb2.DitInfo()
    info.CopyFrom(VIDEO_INFO)
    info.max_pixels = 2**24
    async with scripted_dit(info) as stage, gateway_before(stage, tmp_path) as gateway:
        for size in ("16400x16", "16x32768"):
            status, named, message = await gateway.refusal(PATH, ASK | {"size": size})
            assert (status, named, "at most 16384 pixels" in message) == (400, "size", True)
        video_id = await create(gateway, size="16384x16", num_frames=1)
        await gateway.reaches(video_id, "completed")
        # a size that the model chose is known at the end only
        monkeypatch.setattr(
            "tests.support.systems.video.frames_of", lambda start: np.zeros((1, 16, 16400, 3), np.uint8)
        )
        video = await gateway.reaches(await create(gateway), "failed")
        assert (video["error"]["code"], video["error"]["message"][:6]) == ("invalid_value", "size: ")


async def test_the_api_page_has_them(gateway):
    paths = (await gateway.http.get("/openapi.json")).json()["paths"]
    body = paths[PATH]["post"]["requestBody"]["content"]
    assert body["multipart/form-data"]["schema"]["properties"]["input_reference"]["format"] == "binary"
    assert "image_url" in str(body["application/json"]["schema"]["properties"]["input_reference"])
    assert set(paths["/v1/videos/{video_id}"]) == {"get", "delete"}
    assert "audio/wav" in paths["/v1/audio/generations"]["post"]["responses"]["200"]["content"]


async def test_other_models_and_tasks_are_refused(gateway, tmp_path):
    assert (await gateway.refusal(PATH, ASK | {"model": "other"}))[:2] == (404, "model")
    async with scripted_dit(SOUND_INFO) as stage, gateway_before(stage, tmp_path / "sound") as client:
        assert (await client.refusal(PATH, ASK))[:2] == (400, "model")
    animates = server_info_pb2.DitInfo()
    animates.CopyFrom(VIDEO_INFO)
    animates.tasks[:] = [dit_pb2.DIT_TASK_IMAGE_TO_VIDEO]
    async with scripted_dit(animates) as stage, gateway_before(stage, tmp_path / "animates") as client:
        assert (await client.refusal(PATH, ASK))[:2] == (400, "input_reference")


@pytest.mark.parametrize(
    ("error", "code", "says"),
    [
        (InvalidInput("start.width", "too wide"), "invalid_value", "size: too wide"),
        (InternalError("secret"), "internal_error", "internal error"),
    ],
)
async def test_a_failed_video_says_why(gateway, jobs_dir, error, code, says):
    gateway.script.error, gateway.script.after = error, STEPS + 2
    video = await gateway.reaches(await create(gateway), "failed")
    assert video["error"]["code"] == code
    assert says in video["error"]["message"]
    assert "secret" not in video["error"]["message"]
    assert video["completed_at"] is None
    assert video["expires_at"] > time.time()
    assert list(jobs_dir.glob("video_*")) == []


async def test_a_full_disk(gateway, jobs_dir):
    gateway.script.hold, gateway.script.after = True, 1
    video_id = await create(gateway)
    await gateway.reaches(video_id, "in_progress")
    (jobs_dir / f"{video_id}.part").symlink_to("/dev/full")
    gateway.script.release.set()
    video = await gateway.reaches(video_id, "failed")
    assert (video["error"]["code"], "No space left" in video["error"]["message"]) == ("storage_failed", True)
    assert list(jobs_dir.glob("video_*")) == []
    await gateway.reaches(await create(gateway), "completed")  # the place is free again


async def test_a_stage_that_is_busy_is_asked_again(gateway):
    gateway.script.error = QueueFull("full", 0.05)
    video_id = await create(gateway)
    await gateway.until(lambda: len(gateway.script.requests) > 2)
    assert (await gateway.video(video_id))["status"] == "queued"
    gateway.script.error = None
    await gateway.reaches(video_id, "completed")


async def test_a_stage_that_is_away_is_waited_for(gateway):
    gateway.script.error = Unavailable("draining")
    video_id = await create(gateway)
    await gateway.until(lambda: gateway.script.requests)
    assert (await gateway.video(video_id))["status"] == "queued"
    gateway.script.error = None
    await gateway.reaches(video_id, "completed")
    gateway.script.error, gateway.script.after = Unavailable("10.1.2.3:50052: Socket closed"), 2
    with capture_logs() as logs:
        video = await gateway.reaches(await create(gateway), "failed")  # it had begun
        await gateway.until(lambda: any(line["event"] == "video" for line in logs))
    assert video["error"] == {"code": "stage_unavailable", "message": "the dit cannot answer now; try again in 1 s"}
    (line,) = [line for line in logs if line["event"] == "video"]
    assert "10.1.2.3:50052: Socket closed" in line["detail"]


async def test_a_stage_that_does_not_fit_the_pipeline_is_not_waited_for(tmp_path):
    info = server_info_pb2.DitInfo()
    info.CopyFrom(VIDEO_INFO)
    info.needs_source = True
    async with scripted_dit(info) as stage, gateway_before(stage, tmp_path) as gateway:
        video = await gateway.reaches(await create(gateway), "failed")
        assert video["error"]["code"] == "stage_unavailable"
        assert "give it a source" in video["error"]["message"]
        assert stage.script.requests == []
