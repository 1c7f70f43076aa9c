"""`POST /v1/images/generations` and `/v1/images/edits` over HTTP, with a scripted stage and OpenAI's own client."""

import asyncio
import json

import numpy as np
import openai
import pytest

from cli.plan import DIT_PIPELINE as DIT
from quartet.v1 import dit_pb2, server_info_pb2
from services.common.errors import InternalError, InvalidInput, QueueFull, Unavailable
from tests.support.clients.pictures import (
    ASK,
    EDIT,
    GENERATE,
    MODEL,
    bomb,
    noise,
    pixels,
    png,
    said,
    same,
    shown,
    spoken,
)
from tests.support.scripted.dit import DIT_STEPS, DIT_THOUGHTS, DRAWN_SEED, PICTURES, picture_of
from tests.support.systems.gateway import running

pytestmark = pytest.mark.asyncio(loop_scope="module")
CHAT = "/v1/chat/completions"
SHOWN = {"image_url": shown(png())["image_url"]["url"]}


def events(text: str) -> list[dict]:
    """The events of a stream; each is named by its type."""
    found = []
    for block in text.strip().split("\n\n"):
        name, data = block.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


@pytest.fixture
def gateway(picture_gateway):
    return picture_gateway


async def test_what_the_model_wrote_before_is_in_the_answer_whole_and_streamed(gateway):
    thinks = {"quartet": {"dit": {"arguments": {"think": True}}}}
    for extra, thoughts in ((thinks, DIT_THOUGHTS), ({}, None)):
        body = await gateway.openai.images.generate(**ASK, extra_body=extra)
        assert body.model_extra["quartet"].get("thoughts") == thoughts
        stream = await gateway.openai.images.generate(**ASK, stream=True, extra_body=extra)
        last = [event async for event in stream][-1]
        assert last.model_extra["quartet"].get("thoughts") == thoughts


async def test_a_picture(gateway):
    body = await gateway.openai.images.generate(**ASK)
    (picture,) = body.data
    same(pixels(picture.b64_json), DRAWN_SEED)
    assert (body.size, body.output_format, body.background, body.quality) == ("64x48", "png", "opaque", "auto")
    assert body.usage is None
    assert body.model_extra["quartet"]["seed"] == DRAWN_SEED
    assert body.model_extra["quartet"]["num_inference_steps"] == DIT_STEPS
    assert body.model_extra["quartet"]["timings"]["dit"]["prefill_ms"] == 2
    (start,) = gateway.scripts["dit"].requests
    assert (start.prompt, start.count, start.width, start.previews) == ("a boat", 1, 0, 0)
    assert not any(map(start.HasField, ("seed", "negative_prompt", "num_inference_steps", "guidance_scale", "mask")))


async def test_every_member_reaches_the_stage(gateway):
    body = await gateway.openai.images.generate(
        **ASK,
        n=3,
        size="96x32",
        quality="high",
        background="opaque",
        moderation="low",
        response_format="b64_json",
        user="u",
        extra_body={
            "quartet": {"dit": {"arguments": {"strength": 0.5, "sizes": [1, 2]}}},
            "negative_prompt": "rain",
            "num_inference_steps": 7,
            "guidance_scale": 2.5,
            "seed": 5,
            "lora": [{"name": "ink", "weight": 0.5}, {"name": "oil"}],
            "safety_identifier": "s",
        },
        extra_headers={"x-request-id": "mine"},
    )
    for i, picture in enumerate(body.data):
        same(pixels(picture.b64_json), 5 + i, 96, 32)
    assert len(body.data) == 3
    assert body.size == "96x32"
    (start,) = gateway.scripts["dit"].requests
    assert (start.request_id, start.count, start.width, start.height, start.seed) == ("mine", 3, 96, 32, 5)
    assert (start.negative_prompt, start.num_inference_steps, start.guidance_scale) == ("rain", 7, 2.5)
    assert [(lora.name, lora.weight) for lora in start.loras] == [("ink", 0.5), ("oil", 1.0)]
    assert json.loads(start.arguments) == {"strength": 0.5, "sizes": [1, 2]}
    metrics = (await gateway.http.get("/metrics")).text
    assert "quartet_gateway_images_total" in metrics


@pytest.mark.parametrize("model", ["dall-e-2", "dall-e-3", "gpt-image-1-mini", "chatgpt-image-latest", "", None])
async def test_models_of_openais_are_the_one_that_makes_images(gateway, model):
    body = {"model": model, "prompt": "a cat", "n": 1, "size": "64x64", "response_format": "url", "style": "vivid"}
    response = await gateway.http.post("/v1/images/generations", json=body)
    assert response.status_code == 200, response.text
    assert response.headers["x-quartet-ignored"] == "style"
    assert response.json()["data"][0]["b64_json"]


@pytest.mark.parametrize("lora", ["ink", {"ink": 1}, ["ink"], [{"name": "ink"}]])
async def test_the_spellings_of_lora(gateway, lora):
    assert (await gateway.http.post(GENERATE, json=ASK | {"lora": lora})).status_code == 200
    (start,) = gateway.scripts["dit"].requests
    assert [(lora.name, lora.weight) for lora in start.loras] == [("ink", 1.0)]


async def test_the_model_need_not_be_named_and_auto_is_its_size(gateway):
    body = await gateway.openai.images.generate(prompt="a boat", size="auto")
    same(pixels(body.data[0].b64_json), DRAWN_SEED)


@pytest.mark.parametrize("file_format", ["jpeg", "webp"])
async def test_other_formats(gateway, file_format):
    sizes = []
    for quality in (None, 0, 60):
        options = {} if quality is None else {"output_compression": quality}
        body = await gateway.openai.images.generate(**ASK, output_format=file_format, **options)
        picture = pixels(body.data[0].b64_json, file_format.upper())
        assert picture.shape == (48, 64, 3)
        assert body.output_format == file_format
        sizes.append(len(body.data[0].b64_json))
        if quality is None:
            np.testing.assert_allclose(picture.astype(int), picture_of(DRAWN_SEED), atol=12)
    assert sizes[0] > sizes[2] > sizes[1]


async def test_a_stream_with_partial_images(gateway):
    stream = await gateway.openai.images.generate(**ASK, stream=True, partial_images=2, extra_body={"seed": 3})
    first, second, last = [event async for event in stream]
    for i, event in enumerate((first, second)):
        assert event.type == "image_generation.partial_image"
        assert (event.partial_image_index, event.size) == (i, "16x12")
        same(pixels(event.b64_json), 1001 + i, 16, 12)
    assert last.type == "image_generation.completed"
    assert (last.size, last.output_format, last.background, last.quality) == ("64x48", "png", "opaque", "auto")
    same(pixels(last.b64_json), 3)
    assert last.model_extra["quartet"]["seed"] == 3
    assert last.model_extra["quartet"]["timings"]["dit"]["total_ms"] == 5


async def test_a_stream_of_several_pictures_with_progress(gateway):
    ask = ASK | {"stream": True, "n": 2, "seed": 3, "quartet": {"progress": True}}
    response = await gateway.http.post(GENERATE, json=ask)
    assert response.headers["content-type"].startswith("text/event-stream")
    found = events(response.text)
    progress = [event for event in found if event["type"] == "quartet.progress"]
    assert [(event["step"], event["output"]) for event in progress] == [
        (step, output) for step in range(1, DIT_STEPS + 1) for output in range(2)
    ]
    assert progress[0]["num_inference_steps"] == DIT_STEPS
    one, two = [event for event in found if event["type"] == "image_generation.completed"]
    for event, output in ((one, 1), (two, 0)):  # as they are done
        assert (event["quartet"]["output"], event["quartet"]["seed"]) == (output, 3 + output)
        same(pixels(event["b64_json"]), 3 + output)
    assert found[-1] == two
    assert "timings" in two["quartet"]
    assert "timings" not in one["quartet"]


async def test_no_more_previews_than_steps_leave_room_for(gateway):
    ask = ASK | {"stream": True, "partial_images": 3, "num_inference_steps": 2}
    found = events((await gateway.http.post(GENERATE, json=ask)).text)
    assert [event["type"].split(".")[1] for event in found] == ["partial_image", "completed"]


async def test_an_edit(gateway):
    files = [png(1), png(2)]
    body = await gateway.openai.images.edit(
        **ASK, image=files, n=2, size="64x64", output_format="png", extra_body={"seed": 8, "guidance_scale": 1.5}
    )
    assert len(body.data) == 2
    for i, picture in enumerate(body.data):
        same(pixels(picture.b64_json), 8 + i, 64, 64)
    (start,) = gateway.scripts["dit"].requests
    assert [(image.field, image.size_bytes) for image in start.images] == [
        ("image[0]", len(files[0])),
        ("image[1]", len(files[1])),
    ]
    assert not start.HasField("mask")
    assert (start.count, start.seed, start.guidance_scale, start.width) == (2, 8, 1.5, 64)
    assert bytes(gateway.scripts["dit"].media) == b"".join(files)


async def test_an_edit_of_a_large_picture_with_a_mask(gateway):
    image, mask = noise(1), noise(2)  # several chunks each
    body = await gateway.openai.images.edit(
        **ASK, image=("i.png", image), mask=mask, extra_body={"lora": '[{"name": "oil", "weight": 2}]'}
    )
    same(pixels(body.data[0].b64_json), DRAWN_SEED)
    (start,) = gateway.scripts["dit"].requests
    assert (start.images[0].field, start.mask.field, start.width) == ("image", "mask", 0)
    assert [(lora.name, lora.weight) for lora in start.loras] == [("oil", 2.0)]
    assert bytes(gateway.scripts["dit"].media) == image + mask


async def test_an_edit_in_json(gateway):
    urls = [shown(png(i))["image_url"] for i in range(2)]
    image, mask = ({"image_url": each["url"]} for each in urls)
    body = (await gateway.http.post(EDIT, json=ASK | {"images": [image], "mask": mask, "seed": 8})).json()
    same(pixels(body["data"][0]["b64_json"]), 8)
    (start,) = gateway.scripts["dit"].requests
    assert ([each.field for each in start.images], start.mask.field) == (["images[0]"], "mask")
    assert bytes(gateway.scripts["dit"].media) == png(0) + png(1)


async def test_a_streamed_edit(gateway):
    stream = await gateway.openai.images.edit(**ASK, image=png(), stream=True, partial_images=1)
    partial, completed = [event async for event in stream]
    assert (partial.type, completed.type) == ("image_edit.partial_image", "image_edit.completed")
    same(pixels(completed.b64_json), DRAWN_SEED)


@pytest.mark.parametrize(
    ("changes", "status", "param"),
    [
        ({"model": "other"}, 404, "model"),
        ({"prompt": None}, 400, "prompt"),
        ({"prompt": ""}, 400, "prompt"),
        ({"prompt": "x" * 200_000}, 400, "prompt"),
        ({"stile": "vivid"}, 400, "stile"),
        ({"n": 0}, 400, "n"),
        ({"n": PICTURES.max_count + 1}, 400, "n"),
        ({"size": "big"}, 400, "size"),
        ({"size": "0x64"}, 400, "size"),
        ({"size": "64x50"}, 400, "size"),
        ({"size": "512x512"}, 400, "size"),
        ({"size": "99999x99999"}, 400, "size"),
        ({"quality": "best"}, 400, "quality"),
        ({"response_format": "file"}, 400, "response_format"),
        ({"output_format": "gif"}, 400, "output_format"),
        ({"output_compression": 50}, 400, "output_compression"),
        ({"output_format": "jpeg", "output_compression": 101}, 400, "output_compression"),
        ({"background": "transparent"}, 400, "background"),
        ({"partial_images": 2}, 400, "partial_images"),
        ({"stream": True, "partial_images": 4}, 400, "partial_images"),
        ({"quartet": {"progress": True}}, 400, "quartet.progress"),
        ({"num_inference_steps": 0}, 400, "num_inference_steps"),
        ({"num_inference_steps": 51}, 400, "num_inference_steps"),
        ({"guidance_scale": -1}, 400, "guidance_scale"),
        ({"seed": -1}, 400, "seed"),
        ({"seed": 2**64}, 400, "seed"),
        ({"lora": "chalk"}, 400, "lora"),
        ({"lora": [{"name": "ink", "strength": 1}]}, 400, "lora"),
        ({"lora": ["ink", {"name": "ink"}]}, 400, "lora"),
    ],
)
async def test_bad_requests_name_the_field(refusing, changes, status, param):
    response = await refusing.http.post(GENERATE, json=ASK | changes)
    error = response.json()["error"]
    assert (response.status_code, error["param"], error["type"]) == (status, param, "invalid_request_error")
    assert error["message"].startswith(f"{param}: ")


@pytest.mark.parametrize(
    ("member", "param"), [({"guidance_scale": "N"}, "guidance_scale"), ({"lora": {"ink": "N"}}, "lora.ink")]
)
@pytest.mark.parametrize("number", ["1e999", "NaN"])
async def test_numbers_that_are_none(refusing, member, param, number):
    chat = {"model": MODEL, "messages": [{"role": "user", "content": "x"}], "quartet": {"dit": member}}
    for path, body, named in ((GENERATE, ASK | member, param), (CHAT, chat, f"quartet.dit.{param}")):
        response = await refusing.http.post(path, content=json.dumps(body).replace('"N"', number))
        assert (response.status_code, response.json()["error"]["param"]) == (400, named)


@pytest.mark.parametrize(("file_format", "most"), [("webp", 16_383), ("jpeg", 65_500)])
async def test_sizes_that_a_format_has_not(gateway, monkeypatch, file_format, most):
    stage = gateway.app.state.gateway.pipeline.output("image")
    large = server_info_pb2.GetServerInfoResponse()
    large.CopyFrom(stage.info)
    large.dit.max_pixels = 2**24
    monkeypatch.setattr(stage, "info", large)
    size = f"16x{most // 16 * 16 + 16}"
    response = await gateway.http.post(GENERATE, json=ASK | {"size": size, "output_format": file_format})
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, "size")
    assert f"{file_format} has at most {most} pixels" in error["message"]
    options = {"dit": {"size": size, "output_format": file_format}}
    chat = {"model": MODEL, "messages": [{"role": "user", "content": "x"}]}
    assert (await gateway.refusal(chat | {"quartet": options}))[1]["param"] == "quartet.dit.size"
    assert gateway.scripts["dit"].requests == []

    body = await gateway.openai.images.generate(**ASK, size=f"16x{most // 16 * 16}", output_format=file_format)
    assert pixels(body.data[0].b64_json, file_format.upper()).shape == (most // 16 * 16, 16, 3)
    assert (await gateway.http.post(GENERATE, json=ASK | {"size": size})).status_code == 200  # png

    # a size that the model chose is known at the end only
    monkeypatch.setattr("tests.support.scripted.dit.picture_of", lambda *_: picture_of(0, 8, most + 1))
    response = await gateway.http.post(GENERATE, json=ASK | {"output_format": file_format})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "size")
    status, error = await gateway.refusal(chat | {"quartet": {"dit": {"output_format": file_format}}})
    assert (status, error["param"]) == (400, "quartet.dit.size")


@pytest.fixture
def steered(gateway, monkeypatch):
    """Its model has two ControlNets."""
    stage = gateway.app.state.gateway.pipeline.output("image")
    info = server_info_pb2.GetServerInfoResponse()
    info.CopyFrom(stage.info)
    info.dit.control_images = 2
    monkeypatch.setattr(stage, "info", info)
    return gateway


async def test_a_model_of_videos_that_makes_images_is_asked_for_an_image(gateway, monkeypatch):
    await gateway.openai.images.generate(**ASK)
    stage = gateway.app.state.gateway.pipeline.output("image")
    info = server_info_pb2.GetServerInfoResponse()
    info.CopyFrom(stage.info)
    info.dit.frames_multiple = 4
    info.dit.tasks[:] = [dit_pb2.DIT_TASK_TEXT_TO_VIDEO, dit_pb2.DIT_TASK_TEXT_TO_IMAGE]
    monkeypatch.setattr(stage, "info", info)
    await gateway.openai.images.generate(**ASK)
    asked = [start.task for start in gateway.scripts["dit"].requests]
    assert asked == [dit_pb2.DIT_TASK_UNSPECIFIED, dit_pb2.DIT_TASK_TEXT_TO_IMAGE]


async def test_control_images_reach_the_stage(steered):
    edges, depths = png(1), png(2)
    urls = [shown(file)["image_url"]["url"] for file in (edges, depths)]
    asked = {"dit": {"control_images": urls, "arguments": {"controlnet_conditioning_scale": 0.5}}}
    await steered.openai.images.generate(**ASK, extra_body={"quartet": asked})
    edit = [("image", png(3)), ("mask", png(4)), ("control_image[]", edges), ("control_image[]", depths)]
    assert (await steered.http.post(EDIT, data=ASK, files=edit)).status_code == 200
    chat = {"model": MODEL, "messages": [said(spoken("x"))], "quartet": asked}
    assert (await steered.http.post(CHAT, json=chat)).status_code == 200
    script = steered.scripts["dit"]
    first, second, third = script.requests
    assert [(len(each.images), each.HasField("mask")) for each in (first, second)] == [(0, False), (1, True)]
    for start in (first, third):
        assert json.loads(start.arguments) == asked["dit"]["arguments"]
        assert [each.field for each in start.control_images] == [f"quartet.dit.control_images[{i}]" for i in (0, 1)]
    assert [each.field for each in second.control_images] == ["control_image[0]", "control_image[1]"]
    assert bytes(script.media) == edges + depths + png(3) + png(4) + edges + depths + edges + depths
    (model,) = (await steered.http.get("/v1/models")).json()["data"]
    assert model["quartet"]["control_images"] == 2


async def test_control_images_of_a_model_that_takes_none(refusing):
    asked = {"quartet": {"dit": {"control_images": [shown(png())["image_url"]["url"]]}}}
    error = (await refusing.http.post(GENERATE, json=ASK | asked)).json()["error"]
    assert (error["param"], "this model takes none" in error["message"]) == ("quartet.dit.control_images", True)


async def test_a_number_of_control_images_that_is_not_the_models(steered, refusing):
    url = shown(png())["image_url"]["url"]
    for urls in ([url], []):
        response = await steered.http.post(GENERATE, json=ASK | {"quartet": {"dit": {"control_images": urls}}})
        error = response.json()["error"]
        assert (response.status_code, error["param"]) == (400, "quartet.dit.control_images")
        assert f"there are {len(urls)}; this model needs 2" in error["message"]
    broken = {"quartet": {"dit": {"control_images": [url, "data:image/png;base64,AAAA"]}}}
    error = (await steered.http.post(GENERATE, json=ASK | broken)).json()["error"]
    assert (error["param"], error["code"]) == ("quartet.dit.control_images[1]", "invalid_media")


async def test_the_pixels_of_all_images_together(tmp_path):
    async with running(DIT, jobs_dir=tmp_path, media_max_request_image_pixels=3000) as gateway:

        async def refused(*files) -> tuple[str, str]:
            error = (await gateway.http.post(EDIT, data=ASK, files=files)).json()["error"]
            return error["param"], error["code"]

        assert await refused(*[("image[]", png())] * 3) == ("image[2]", "invalid_media")
        assert await refused(("image", png(width=50, height=50)), ("mask", png())) == ("mask", "invalid_media")
        ask = {"model": MODEL, "messages": [said(spoken("x"), *[shown(png())] * 3)]}
        assert (await gateway.refusal(ask))[1]["param"] == "messages[0].content[3]"
        assert gateway.scripts["dit"].requests == []
        assert (await gateway.http.post(EDIT, data=ASK, files=[("image[]", png())] * 2)).status_code == 200


async def test_running_requests_are_counted(gateway):
    script = gateway.scripts["dit"]
    script.hold = True
    asking = asyncio.create_task(gateway.http.post(GENERATE, json=ASK))
    await script.holding.wait()
    assert "quartet_gateway_running_requests 1.0" in (await gateway.http.get("/metrics")).text
    script.release.set()
    await asking
    await gateway.until(lambda: gateway.app.state.gateway.admission.in_flight == 0)
    assert "quartet_gateway_running_requests 0.0" in (await gateway.http.get("/metrics")).text


async def test_bodies_that_are_none(gateway):
    assert (await gateway.http.post(GENERATE, content=b"{")).json()["error"]["code"] == "invalid_json"
    response = await gateway.http.post(EDIT, content=b"x", headers={"content-type": "image/png"})
    assert (response.status_code, response.json()["error"]["code"]) == (400, "invalid_form")
    response = await gateway.http.post(EDIT, content=b"x", headers={"content-type": "multipart/form-data"})
    assert (response.status_code, response.json()["error"]["code"]) == (400, "invalid_form")


@pytest.mark.parametrize(
    ("files", "fields", "param"),
    [
        ([], {}, "image"),
        ([("image", b"nonsense")], {}, "image"),
        ([("image", b"")], {}, "image"),
        ([("image", b"GIF89a" + bytes(100))], {}, "image"),
        ([("image", b"<svg xmlns='http://www.w3.org/2000/svg'/>")], {}, "image"),
        ([("image", bomb())], {}, "image"),
        ([("image[]", png()), ("image[]", b"nonsense")], {}, "image[1]"),
        ([("image[]", png())] * 4, {}, "image"),
        ([("image", png()), ("mask", b"nonsense")], {}, "mask"),
        ([("image", png()), ("mask", png()), ("mask", png())], {}, "mask"),
        ([("image[]", png()), ("image[]", png()), ("mask", png())], {}, "mask"),
        ([("image", png()), ("photo", png())], {}, "photo"),
        ([("image", png())], {"n": "many"}, "n"),
        ([("image", png())], {"size": "7x7"}, "size"),
        ([("image", png())], {"num_inference_steps": "0"}, "num_inference_steps"),
        ([("image", png())], {"stream": "perhaps"}, "stream"),
        ([("image", png())], {"lora": "chalk"}, "lora"),
        ([("image", png())], {"lora": "[" * 100_000}, "lora"),
        ([("image", png())], {"lora": '{"ink": 1e999}'}, "lora.ink"),
        ([("image", png())], {"guidance_scale": "inf"}, "guidance_scale"),
        ([("image", png())], {"foo": "1"}, "foo"),
    ],
)
async def test_bad_edits_name_the_field(refusing, files, fields, param):
    parts = [(name, (None, value)) for name, value in (ASK | fields).items()]
    parts += [(name, ("a.png", content, "image/png")) for name, content in files]
    response = await refusing.http.post(EDIT, files=parts)
    error = response.json()["error"]
    assert (response.status_code, error["param"], error["type"]) == (400, param, "invalid_request_error")
    assert error["message"].startswith(f"{param}: ")


@pytest.mark.parametrize(
    ("wrong", "param"),
    [
        ({}, "images"),
        ({"images": []}, "images"),
        ({"images": [{}]}, "images[0]"),
        ({"images": [{"image_url": "data:,", "file_id": "file-1"}]}, "images[0]"),
        ({"images": [{"file_id": "file-1"}]}, "images[0].file_id"),
        ({"images": [SHOWN, {"image_url": "data:image/png;base64,AAAA"}]}, "images[1]"),
        ({"images": [SHOWN] * 4}, "images"),
        ({"images": [SHOWN], "mask": {"file_id": "file-1"}}, "mask.file_id"),
        ({"images": [SHOWN], "mask": {"image_url": "http://127.0.0.1/a.png"}}, "mask"),
        ({"images": [SHOWN], "image": "x"}, "image"),
    ],
)
async def test_bad_edits_in_json_name_the_member(refusing, wrong, param):
    response = await refusing.http.post(EDIT, json=ASK | wrong)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param), response.text


@pytest.mark.parametrize(
    ("error", "status", "param"),
    [
        (InvalidInput("prompt", "has 99 tokens; at most 77 are read: shorten it"), 400, "prompt"),
        (InvalidInput("width", "too wide"), 400, "size"),
        (InvalidInput("count", "too many"), 400, "n"),
        (InvalidInput("loras[0].name", "unknown"), 400, "lora"),
        (InvalidInput("images", "at least one is required"), 400, "image"),
        (InvalidInput("mask", "is 3 x 3, the picture 4 x 4"), 400, "mask"),
        (InvalidInput("previews", "too many"), 400, "partial_images"),
        (InvalidInput("arguments.strength", "must be float"), 400, "quartet.dit.arguments.strength"),
        (QueueFull("full", retry_after_s=3), 429, None),
        (Unavailable("draining"), 503, None),
        (InternalError("oh"), 500, None),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_stage_errors_reach_the_client(gateway, error, status, param, stream):
    gateway.scripts["dit"].error = error
    response = await gateway.http.post(GENERATE, json=ASK | {"stream": stream})
    assert (response.status_code, response.json()["error"]["param"]) == (status, param)
    if status == 429:
        assert response.headers["retry-after"] == "3"
    if status == 500:
        assert response.json()["error"]["code"] == "internal_error"
    if param:
        assert response.json()["error"]["message"].startswith(f"{param}: ")


async def test_an_error_in_mid_stream_is_an_event(gateway):
    script = gateway.scripts["dit"]
    script.error, script.after, script.hold = InternalError("oh"), 3, True
    stream = await gateway.openai.images.generate(**ASK, stream=True, partial_images=2)
    assert (await anext(stream)).type == "image_generation.partial_image"
    script.go_on()  # a failure overtakes what no client has read
    with pytest.raises(openai.APIError, match="internal error"):
        await anext(stream)


async def test_a_lost_stage_is_down_until_it_is_back(gateway):
    script = gateway.scripts["dit"]
    script.hold, script.after = True, 1
    asking = asyncio.create_task(gateway.http.post(GENERATE, json=ASK))
    await script.holding.wait()
    await gateway.stages.servers["dit"].stop(grace=None)
    response = await asking
    assert (response.status_code, response.json()["error"]["code"]) == (503, "stage_unavailable")
    assert response.json()["error"]["message"] == "the dit went away while it answered; try again in 1 s"
    response = await gateway.http.post(GENERATE, json=ASK)
    assert (response.status_code, response.headers["retry-after"]) == (503, "1")
    assert response.json()["error"]["message"] == "the dit is not serving; try again in 1 s"
    assert (await gateway.http.get("/ready")).status_code == 503
    script.hold = False
    await gateway.stages.start("dit")
    await gateway.until(lambda: gateway.app.state.gateway.pipeline.ready)
    assert (await gateway.http.post(GENERATE, json=ASK)).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [GENERATE, EDIT, CHAT])
async def test_a_disconnect_cancels_the_call(gateway, path, stream):
    script = gateway.scripts["dit"]
    script.hold, script.after = True, 3
    if path == EDIT:
        form = {"prompt": "a boat", "stream": str(stream).lower()}
        sending = gateway.http.post(path, data=form, files={"image": png()})
    elif path == CHAT:
        messages = [{"role": "user", "content": "a boat"}]
        sending = gateway.http.post(path, json={"model": MODEL, "messages": messages, "stream": stream})
    else:
        sending = gateway.http.post(path, json=ASK | {"stream": stream})
    asking = asyncio.create_task(sending)
    await script.holding.wait()
    asking.cancel()
    await gateway.until(lambda: script.ended == ["cancelled"])
    await gateway.until(lambda: gateway.app.state.gateway.admission.in_flight == 0)


async def test_limits_of_the_gateway(tmp_path):
    async with running(DIT, jobs_dir=tmp_path, max_running_requests=1) as gateway:
        script = gateway.scripts["dit"]
        script.hold = True
        asking = asyncio.create_task(gateway.http.post(GENERATE, json=ASK))
        await script.holding.wait()
        response = await gateway.http.post(GENERATE, json=ASK)
        assert response.status_code == 429
        assert int(response.headers["retry-after"]) >= 1
        script.release.set()
        assert (await asking).status_code == 200
    for limit_s in (0.5, 5, 50):  # on a machine that stands still it may be over before the stage has the request
        async with running(DIT, jobs_dir=tmp_path, request_timeout_s=limit_s) as gateway:
            script = gateway.scripts["dit"]
            script.hold = True
            response = await gateway.http.post(GENERATE, json=ASK)
            if script.requests:
                assert (response.status_code, response.json()["error"]["code"]) == (504, "deadline_exceeded")
                await gateway.until(lambda script=script: script.ended == ["cancelled"])
                break
    assert script.requests
    async with running(DIT, jobs_dir=tmp_path, media_max_bytes=100, max_body_bytes=20_000) as gateway:
        response = await gateway.http.post(EDIT, data=ASK, files={"image": png()})
        assert (response.status_code, response.json()["error"]["code"]) == (400, "invalid_media")
        response = await gateway.http.post(EDIT, data=ASK, files={"image": noise(1)})
        assert (response.status_code, response.json()["error"]["code"]) == (413, "body_too_large")


async def test_what_the_server_does_not_make(tmp_path):
    async with running() as gateway:
        response = await gateway.http.post(GENERATE, json=ASK)
        assert (response.status_code, response.json()["error"]["param"]) == (400, "model")
        assert "this server makes: text, speech" in response.json()["error"]["message"]
    async with running(DIT, jobs_dir=tmp_path) as gateway:
        stage = gateway.app.state.gateway.pipeline.output("image")
        del stage.info.dit.tasks[1]
        response = await gateway.http.post(EDIT, data=ASK, files={"image": png()})
        assert (response.status_code, response.json()["error"]["param"]) == (400, "model")
        assert (await gateway.http.get("/openapi.json")).text.count("output_compression") >= 2
