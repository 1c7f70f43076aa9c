"""`POST /v1/audio/generations` over HTTP, with a scripted stage."""

import asyncio
import io

import av
import numpy as np
import pytest
import soundfile

from quartet.v1 import dit_pb2
from services.common.errors import InternalError, InvalidInput, QueueFull
from tests.support.systems.video import DRAWN_SEED, MODEL, RATE_HZ, VIDEO_INFO, gateway_before, samples_of, scripted_dit

pytestmark = pytest.mark.asyncio(loop_scope="module")
PATH = "/v1/audio/generations"
ASK = {"model": MODEL, "prompt": "rain on a tin roof"}


@pytest.fixture
def gateway(sound_gateway):
    return sound_gateway


@pytest.mark.parametrize("file_format", ["wav", "flac"])
async def test_lossless_files_are_stereo_16_bit_and_equal_the_samples(gateway, file_format):
    body = ASK | {"seconds": 0.75, "seed": 7, "response_format": file_format}
    response = await gateway.http.post(PATH, json=body, headers={"x-request-id": "mine"})
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == f"audio/{file_format}"
    assert (response.headers["x-request-id"], response.headers["x-quartet-seed"]) == ("mine", "7")
    assert response.headers["x-quartet-sample-rate-hz"] == str(RATE_HZ)
    samples, rate_hz = soundfile.read(io.BytesIO(response.content), dtype="int16")
    assert soundfile.info(io.BytesIO(response.content)).subtype == "PCM_16"
    (start,) = gateway.script.requests
    expected = np.clip(np.rint(samples_of(start) * 32768), -32768, 32767).astype(np.int16)
    assert rate_hz == RATE_HZ
    assert samples.shape == (int(0.75 * RATE_HZ), 2)
    np.testing.assert_array_equal(samples, expected)
    assert (start.request_id, start.audio_s, start.seed, start.count) == ("mine", 0.75, 7, 1)


@pytest.mark.parametrize(("file_format", "kind"), [("mp3", "mpeg"), ("opus", "ogg"), ("aac", "aac")])
async def test_lossy_files_are_stereo(gateway, file_format, kind):
    response = await gateway.http.post(PATH, json=ASK | {"response_format": file_format})
    assert response.headers["content-type"] == f"audio/{kind}"
    with av.open(io.BytesIO(response.content)) as container:
        frames = list(container.decode(audio=0))  # pyright: ignore[reportAttributeAccessIssue]
        assert container.streams.audio[0].channels == 2
    assert sum(f.samples / f.sample_rate for f in frames) == pytest.approx(0.5, abs=0.15)  # lossy codecs pad
    left, right = np.concatenate([f.to_ndarray() for f in frames], axis=1)[:2]
    assert np.abs(left).max() == pytest.approx(2 * np.abs(right).max(), rel=0.2)


async def test_everything_reaches_the_stage_and_what_is_left_out_does_not(gateway):
    more = {"negative_prompt": "wind", "num_inference_steps": 9, "guidance_scale": 3.5, "n": 1, "user": "me"}
    assert (await gateway.http.post(PATH, json=ASK | more)).status_code == 200
    response = await gateway.http.post(PATH, json={"prompt": "rain"})  # the model is the only one
    assert response.headers["x-quartet-seed"] == str(DRAWN_SEED)
    full, bare = gateway.script.requests
    assert (full.prompt, full.negative_prompt) == (ASK["prompt"], "wind")
    assert (full.num_inference_steps, full.guidance_scale) == (9, 3.5)
    fields = {field.name for field, _ in bare.ListFields()}
    assert fields == {"request_id", "prompt", "count", "progress_interval_ms"}


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"model": None, "prompt": ""}, "prompt"),
        ({"seconds": 0}, "seconds"),
        ({"seconds": 48}, "seconds"),
        ({"seconds": "1"}, "seconds"),
        ({"n": 2}, "n"),
        ({"response_format": "wma"}, "response_format"),
        ({"num_inference_steps": 0}, "num_inference_steps"),
        ({"num_inference_steps": 51}, "num_inference_steps"),
        ({"guidance_scale": -1}, "guidance_scale"),
        ({"seed": -1}, "seed"),
        ({"lora": {"none": 1.0}}, "lora"),
        ({"sedd": 1}, "sedd"),
    ],
)
async def test_bad_members_are_refused_by_name(gateway, change, param):
    status, named, message = await gateway.refusal(PATH, ASK | change)
    assert (status, named) == (400, param), message
    assert gateway.script.requests == []


@pytest.mark.parametrize("number", ["1e999", "NaN"])
async def test_numbers_that_are_none(gateway, number):
    for member, param in (('"guidance_scale": %s', "guidance_scale"), ('"lora": {"x": %s}', "lora.x")):
        response = await gateway.http.post(PATH, content='{"prompt": "x", %s}' % (member % number))
        assert (response.status_code, response.json()["error"]["param"]) == (400, param)


async def test_other_models_and_tasks_are_refused(gateway, tmp_path):
    assert (await gateway.refusal(PATH, ASK | {"model": "other"}))[:2] == (404, "model")
    async with scripted_dit(VIDEO_INFO) as stage, gateway_before(stage, tmp_path / "other") as client:
        assert (await client.refusal(PATH, ASK))[:2] == (400, "model")


@pytest.mark.parametrize(
    ("error", "status", "param"),
    [
        (InvalidInput("start.audio_s", "too long"), 400, "seconds"),
        (InvalidInput("loras[0].name", "unknown"), 400, "lora"),
        (QueueFull("full", 3), 429, None),
        (InternalError("secret"), 500, None),
    ],
)
async def test_errors_of_the_stage(gateway, error, status, param):
    gateway.script.error = error
    response = await gateway.http.post(PATH, json=ASK)
    body = response.json()["error"]
    assert (response.status_code, body["param"]) == (status, param)
    assert "secret" not in body["message"]
    assert response.headers.get("retry-after") == ("3" if status == 429 else None)


async def test_a_client_that_leaves_ends_the_stage_s_work(gateway):
    gateway.script.hold, gateway.script.after = True, 3
    asking = asyncio.create_task(gateway.http.post(PATH, json=ASK))
    await gateway.script.holding.wait()
    asking.cancel()
    await gateway.until(lambda: gateway.script.ended == ["cancelled"])


async def test_samples_beyond_full_scale_are_clipped(gateway, monkeypatch):
    monkeypatch.setattr("tests.support.systems.video.samples_of", lambda start: np.array([[2, -2], [0, 1]], np.float32))
    response = await gateway.http.post(PATH, json=ASK)
    samples, _ = soundfile.read(io.BytesIO(response.content), dtype="int16")
    assert samples.tolist() == [[32767, -32768], [0, 32767]]


async def test_several_at_once_are_not_mixed_up(gateway):
    lengths = [0.1, 0.2, 0.3, 0.4]
    responses = await asyncio.gather(*(gateway.http.post(PATH, json=ASK | {"seconds": s}) for s in lengths))
    heard = [soundfile.info(io.BytesIO(response.content)).frames for response in responses]
    assert heard == [int(s * RATE_HZ) for s in lengths]
    assert all(isinstance(start, dit_pb2.DitStart) for start in gateway.script.requests)
