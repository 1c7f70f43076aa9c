"""Videos made of videos over HTTP, with a scripted stage and OpenAI's own client."""

import base64
import json
from typing import Any

import openai
import pytest

from gateway.access.api_keys import digest, new_key
from gateway.pipeline.dit import media_of
from quartet.v1 import dit_pb2, media_pb2, server_info_pb2
from tests.support.samples.media import mp4
from tests.support.systems.video import DRAWN_SEED, VIDEO_INFO, create, gateway_before, scripted_dit

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # OpenAI's client about its own videos
PATH = "/v1/videos"
ONE_SECOND = mp4(1.0, sound=False)
TASKS = [*VIDEO_INFO.tasks, dit_pb2.DIT_TASK_VIDEO_TO_VIDEO]


def info_with(**more) -> server_info_pb2.DitInfo:
    info = server_info_pb2.DitInfo(**more)
    info.MergeFrom(VIDEO_INFO)
    info.tasks[:] = TASKS
    return info


@pytest.fixture
async def stage():
    async with scripted_dit(info_with()) as started:
        yield started


@pytest.fixture
async def gateway(stage, tmp_path):
    async with gateway_before(stage, tmp_path) as client:
        yield client


async def clip(gateway) -> tuple[str, bytes]:
    """A finished video: its id and file."""
    made = await create(gateway, seed=1)
    await gateway.reaches(made, "completed")
    file = (await gateway.http.get(f"{PATH}/{made}/content")).content
    gateway.script.requests.clear()
    gateway.script.media = b""
    return made, file


async def test_official_client_edits_a_file(gateway):
    _, file = await clip(gateway)
    video = await gateway.openai.videos.edit(
        prompt="at night", video=("boat.mp4", file, "video/mp4"), extra_body={"num_inference_steps": 3, "size": "96x64"}
    )
    assert (await gateway.reaches(video.id, "completed"))["remixed_from_video_id"] is None
    (start,) = gateway.script.requests
    assert (start.prompt, start.num_inference_steps, start.width, start.num_frames) == ("at night", 3, 96, 0)
    assert (start.video.kind, start.video.field, start.video.size_bytes) == (
        media_pb2.MEDIA_KIND_VIDEO,
        "video",
        len(file),
    )
    assert bytes(gateway.script.media) == file


@pytest.mark.parametrize("how", ["remix", "json", "form"])
async def test_a_video_is_made_of_another(gateway, how):
    made, file = await clip(gateway)
    if how == "remix":
        video = (await gateway.openai.videos.remix(made, prompt="at night")).model_dump()
    else:  # the client's `edit` sends files only
        form = {"prompt": (None, "at night"), "video[id]": (None, made)}
        sent = {"files": form} if how == "form" else {"json": {"prompt": "at night", "video": {"id": made}}}
        video = (await gateway.http.post(f"{PATH}/edits", **sent)).json()
    assert (video["remixed_from_video_id"], video["status"], video["seconds"]) == (made, "queued", "0.5625")
    done = await gateway.reaches(video["id"], "completed")
    assert (done["remixed_from_video_id"], done["quartet"]["seed"]) == (made, DRAWN_SEED)
    assert bytes(gateway.script.media) == file


@pytest.mark.parametrize("how", ["json", "form"])
async def test_a_video_and_a_control_video(tmp_path, how):
    async with scripted_dit(info_with(control_video=True)) as stage, gateway_before(stage, tmp_path) as gateway:
        files: Any = dict.fromkeys(("video", "control_video"), ("x.mp4", ONE_SECOND, "video/mp4"))
        url = "data:video/mp4;base64," + base64.b64encode(ONE_SECOND).decode()
        if how == "json":
            members = {"prompt": "x", "num_frames": 9, "quartet": {"dit": {"video": url, "control_video": url}}}
            response = await gateway.http.post(PATH, json=members)
        else:
            response = await gateway.http.post(PATH, data={"prompt": "x", "num_frames": "9"}, files=files)
        assert response.status_code == 200, response.text
        await gateway.reaches(response.json()["id"], "completed")
        (start,) = gateway.script.requests
        assert [each.size_bytes for each in media_of(start)] == [len(ONE_SECOND)] * 2
        assert (start.num_frames, bytes(gateway.script.media)) == (9, ONE_SECOND * 2)
        for body, param in (
            ({"prompt": "x"}, "quartet.dit.control_video"),
            ({"prompt": "x", "quartet": {"dit": {"video": url}}}, "quartet.dit.control_video"),
        ):
            assert (await gateway.refusal(PATH, body))[:2] == (400, param)


async def test_what_is_refused(gateway, tmp_path):
    made, file = await clip(gateway)
    url = "data:video/mp4;base64," + base64.b64encode(file).decode()
    picture = {"image_url": "data:image/png;base64,AAAA"}
    for path, body, expected in (
        (f"{PATH}/edits", {"prompt": "x"}, (400, "video")),
        (f"{PATH}/edits", {"prompt": "x", "video": {"id": "video_x"}}, (404, "video.id")),
        (f"{PATH}/edits", {"prompt": "x", "video": {"id": made}, "quartet": {"dit": {"video": url}}}, (400, None)),
        (f"{PATH}/edits", {"video": {"id": made}}, (400, "prompt")),
        (f"{PATH}/video_x/remix", {"prompt": "x"}, (404, "video_id")),
        (f"{PATH}/{made}/remix", {"prompt": "x", "input_reference": picture}, (400, "video_id")),
        (PATH, {"prompt": "x", "quartet": {"dit": {"video": url}}, "input_reference": picture}, (400, None)),
        (PATH, {"prompt": "x", "quartet": {"dit": {"control_video": url}}}, (400, "quartet.dit.control_video")),
        (PATH, {"prompt": "x", "quartet": {"dit": {"video": "data:video/mp4;base64,AAAA"}}}, (400, None)),
    ):
        status, param, _ = await gateway.refusal(path, body)
        assert (status, param) == (expected[0], expected[1] or "quartet.dit.video"), (path, body)
    two = [("video", ("a.mp4", file)), ("control_video", ("b.mp4", file))]
    response = await gateway.http.post(f"{PATH}/edits", data={"prompt": "x", "video[id]": made}, files=two)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "video")
    gateway.script.hold = True
    waiting = await create(gateway)
    status, param, message = await gateway.refusal(f"{PATH}/{waiting}/remix", {"prompt": "x"})
    gateway.script.hold = False
    assert (status, param) == (404, "video_id")
    assert "only when it is completed" in message
    async with scripted_dit(VIDEO_INFO) as other, gateway_before(other, tmp_path / "other") as client:
        assert (await client.refusal(PATH, {"prompt": "x", "quartet": {"dit": {"video": url}}}))[:2] == (
            400,
            "quartet.dit.video",
        )
    changes = server_info_pb2.DitInfo()
    changes.CopyFrom(VIDEO_INFO)
    changes.tasks[:] = [dit_pb2.DIT_TASK_VIDEO_TO_VIDEO]
    async with scripted_dit(changes) as other, gateway_before(other, tmp_path / "changes") as client:
        assert (await client.refusal(PATH, {"prompt": "x"}))[:2] == (400, "quartet.dit.video")


async def test_another_ones_video_is_not_there(stage, tmp_path):
    """A remix of it is a 404, as reading it is."""
    ada_key, ben_key = new_key(), new_key()
    entries = ({"name": name, "sha256": digest(key)} for name, key in (("ada", ada_key), ("ben", ben_key)))
    keys = tmp_path / "keys.yaml"
    keys.write_text(json.dumps({"keys": list(entries)}))
    async with gateway_before(stage, tmp_path / "jobs", api_keys_file=keys) as gateway:
        ada, ben = (gateway.openai.with_options(api_key=key).videos for key in (ada_key, ben_key))
        made = await ada.create_and_poll(prompt="x", poll_interval_ms=20)
        with pytest.raises(openai.NotFoundError):
            await ben.remix(made.id, prompt="y")
        assert (await ada.remix(made.id, prompt="y")).remixed_from_video_id == made.id
