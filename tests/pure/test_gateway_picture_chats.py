"""Chats that are answered with pictures, and what clients are told of the models that make them."""

import pytest
import pytest_asyncio

from quartet.v1 import server_info_pb2
from services.common.errors import InvalidInput, QueueFull
from tests.support.clients.pictures import ASK, GENERATE, MODEL, bomb, pixels, png, said, same, shown, spoken
from tests.support.scripted.dit import DIT_STEPS, DIT_THOUGHTS, DRAWN_SEED
from tests.support.scripted.thinker import PIECES
from tests.support.systems.gateway import running

pytestmark = pytest.mark.asyncio(loop_scope="module")
TEXT = "".join(PIECES)
BOTH = """\
stages:
  thinker: {kind: thinker, address: 'h:1'}
  dit: {kind: dit, address: 'h:2'}
outputs: {text: thinker, image: dit}
"""


@pytest.fixture
def gateway(picture_gateway):
    return picture_gateway


@pytest_asyncio.fixture(loop_scope="module")
async def unified(tmp_path):
    """A thinker and a dit of one model, of which the dit reads conversations."""
    file = tmp_path / "both.yaml"
    file.write_text(BOTH)
    dit = server_info_pb2.DitInfo(reads_context=True)
    async with running(file, more={"dit": server_info_pb2.GetServerInfoResponse(model="scripted", dit=dit)}) as started:
        yield started


@pytest_asyncio.fixture(loop_scope="module")
async def both(tmp_path):
    """A thinker and a dit behind one gateway."""
    file = tmp_path / "both.yaml"
    file.write_text(BOTH)
    async with running(file) as started:
        yield started


async def test_chat_answers_with_a_picture(gateway):
    body = await gateway.openai.chat.completions.create(
        model=MODEL,
        messages=[{"role": "system", "content": "x"}, said(spoken("a boat"), spoken("at sea"))],
        seed=4,
        n=2,
        temperature=0.5,
        extra_body={
            "quartet": {"dit": {"size": "32x32", "num_inference_steps": 6, "lora": "ink", "arguments": {"eta": 1}}}
        },
    )
    for i, choice in enumerate(body.choices):
        (part,) = choice.message.content
        assert part["type"] == "image_url"
        same(pixels(part["image_url"]["url"].removeprefix("data:image/png;base64,")), 4 + i, 32, 32)
        assert choice.finish_reason == "stop"
    assert len(body.choices) == 2
    assert body.model_extra["quartet"]["seed"] == 4
    (start,) = gateway.scripts["dit"].requests
    assert (start.prompt, start.num_inference_steps, start.loras[0].name) == ("a boat\nat sea", 6, "ink")
    assert start.arguments == '{"eta": 1}'


async def test_chat_edits_the_pictures_of_the_last_message(gateway):
    earlier = [said(spoken("a boat")), said(shown(png(7)), role="assistant")]
    stream = await gateway.openai.chat.completions.create(
        model=MODEL,
        modalities=["image"],
        messages=[*earlier, said(spoken("in red"), shown(png(1)), shown(png(2)))],
        stream=True,
        extra_body={"quartet": {"dit": {"output_format": "webp"}}},
    )
    first, last = [chunk async for chunk in stream]
    (part,) = first.choices[0].delta.content
    assert part["image_url"]["url"].startswith("data:image/webp;base64,")
    assert last.choices[0].finish_reason == "stop"
    assert last.model_extra["quartet"]["seed"] == DRAWN_SEED
    (start,) = gateway.scripts["dit"].requests
    assert [image.field for image in start.images] == ["messages[2].content[1]", "messages[2].content[2]"]
    assert bytes(gateway.scripts["dit"].media) == png(1) + png(2)
    for part in (shown(png(3)), {"type": "image_url", "image_url": None}):
        chat = {"model": MODEL, "messages": [said(spoken("in blue"), part | {"uuid": "mine"})]}
        assert (await gateway.chat(chat)).status_code == 200
    assert bytes(gateway.scripts["dit"].media) == png(1) + png(2) + 2 * png(3)


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"messages": [{"role": "system", "content": "x"}]}, "messages"),
        ({"messages": [said(shown(png()))]}, "messages[0].content"),
        ({"messages": [said(spoken("x"), shown(b"nonsense"))]}, "messages[0].content[1]"),
        ({"messages": [said(spoken("x"), shown(bomb()))]}, "messages[0].content[1]"),
        ({"messages": [said(spoken("x"), *[shown(png())] * 4)]}, "messages[0].content[4]"),
        (
            {"messages": [said(spoken("x"), {"type": "audio_url", "audio_url": {"url": "data:,x"}})]},
            "messages[0].content[1]",
        ),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"logprobs": True}, "logprobs"),
        ({"n": 5}, "n"),
        ({"seed": -1}, "seed"),
        ({"quartet": {"dit": {"size": "7x7"}}}, "quartet.dit.size"),
        ({"quartet": {"dit": {"size": "x"}}}, "quartet.dit.size"),
        ({"quartet": {"dit": {"num_inference_steps": 99}}}, "quartet.dit.num_inference_steps"),
        ({"quartet": {"dit": {"foo": 1}}}, "quartet.dit.foo"),
    ],
)
async def test_bad_chats_name_the_field(refusing, changes, param):
    ask = {"model": MODEL, "messages": [{"role": "user", "content": "a boat"}]}
    status, error = await refusing.refusal(ask | changes)
    assert (status, error["param"]) == (400, param)
    assert error["message"].startswith(f"{param}: ")


async def test_stage_errors_of_a_chat(gateway):
    ask = {"model": MODEL, "messages": [{"role": "user", "content": "a boat"}]}
    gateway.scripts["dit"].error = InvalidInput("prompt", "is too long")
    assert (await gateway.refusal(ask))[1]["param"] == "messages[0].content"
    gateway.scripts["dit"].error = InvalidInput("width", "is too much")
    assert (await gateway.refusal(ask))[1]["param"] == "quartet.dit.size"
    gateway.scripts["dit"].error = InvalidInput("arguments.eta", "must be float")
    assert (await gateway.refusal(ask))[1]["param"] == "quartet.dit.arguments.eta"
    gateway.scripts["dit"].error = QueueFull("full")
    assert (await gateway.refusal(ask))[0] == 429


async def test_a_thinker_and_a_dit_have_a_name_each(both):
    chat = {"messages": [{"role": "user", "content": "hi"}]}
    assert (await both.chat(chat | {"model": "scripted"})).json()["choices"][0]["message"]["content"] == TEXT
    (part,) = (await both.chat(chat | {"model": MODEL})).json()["choices"][0]["message"]["content"]
    assert part["type"] == "image_url"
    assert (await both.refusal(chat | {"model": "other"}))[0] == 404
    response = await both.http.post(GENERATE, json=ASK | {"model": "scripted"})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "model")
    for refused in ({"modalities": ["image"]}, {"quartet": {"dit": {}}}):
        status, error = await both.refusal(chat | refused | {"model": "scripted"})
        assert (status, error["param"]) == (400, "quartet.dit" if "quartet" in refused else "modalities")
        assert MODEL in error["message"]
    history = [said(spoken("x")), said(shown(png()), role="assistant"), said(spoken("y"))]
    status, error = await both.refusal({"model": "scripted", "messages": history})
    assert (status, error["param"]) == (400, "messages[1].content[0]")
    assert [model.id for model in (await both.openai.models.list()).data] == ["scripted", MODEL]


async def test_a_model_of_two_stages_writes_or_makes_images(unified):
    chat = {"model": "scripted", "messages": [said(spoken("hi"))]}
    assert (await unified.chat(chat)).json()["choices"][0]["message"]["content"] == TEXT
    for modalities in (["image"], ["text", "image"]):
        answer = (await unified.chat(chat | {"modalities": modalities})).json()
        assert (answer["model"], answer["modality"]) == ("scripted", "image")
        same(pixels(answer["choices"][0]["message"]["content"][0]["image_url"]["url"].partition(",")[2]), DRAWN_SEED)
    (model,) = (await unified.http.get("/v1/models")).json()["data"]
    assert model["quartet"]["output_modalities"] == ["text", "image"]
    assert model["quartet"]["dit"]["reads_context"]
    assert model["quartet"]["dit"]["tasks"] == ["text_to_image", "image_edit"]


async def test_a_model_that_makes_images_reads_those_of_its_earlier_answers(unified):
    made = {"role": "assistant", "content": "here", "images": [shown(png(2))]}
    messages = [said(spoken("a boat")), said(shown(png(1)), role="assistant"), made, said(spoken("which?"))]
    response = await unified.chat({"model": "scripted", "messages": messages})
    assert response.status_code == 200, response.text
    (start,) = unified.scripts["thinker"].requests
    turns = [(each.role, [part.text or part.media.data for part in each.content]) for each in start.messages]
    assert turns == [
        ("user", ["a boat"]),
        ("user", [png(1)]),
        ("assistant", ["here"]),
        ("user", [png(2)]),
        ("user", ["which?"]),
    ]
    messages[1] = said(shown(b"nonsense"), role="assistant")
    status, error = await unified.refusal({"model": "scripted", "messages": messages})
    assert (status, error["param"]) == (400, "messages[1].content[0]")


async def test_thoughts_come_before_the_image(unified):
    chat = {"model": "scripted", "modalities": ["image"], "messages": [said(spoken("hi"))], "n": 2}
    chat |= {"quartet": {"dit": {"arguments": {"think": True}}}}
    body = (await unified.chat(chat)).json()
    assert [choice["message"]["reasoning"] for choice in body["choices"]] == [DIT_THOUGHTS] * 2
    assert body["choices"][0]["message"]["reasoning_content"] == body["quartet"]["thoughts"] == DIT_THOUGHTS
    extra, thoughts, images = {"quartet": chat["quartet"]}, {0: "", 1: ""}, set()
    create = unified.openai.chat.completions.create
    asked = {"model": "scripted", "messages": chat["messages"], "extra_body": extra | {"modalities": ["image"]}}
    async for chunk in await create(**asked, n=2, stream=True):
        (choice,) = chunk.choices
        if thought := (choice.delta.model_extra or {}).get("reasoning"):
            assert choice.index not in images
            thoughts[choice.index] += thought
        elif choice.delta.content:
            images.add(choice.index)
    assert thoughts == dict.fromkeys((0, 1), DIT_THOUGHTS)
    assert images == {0, 1}
    hidden = (await unified.chat(chat | {"include_reasoning": False})).json()
    assert "reasoning" not in hidden["choices"][0]["message"]


async def test_all_turns_come_before_the_prompt(unified):
    made = {"role": "assistant", "content": "here", "images": [shown(png(2)) | {"revised_prompt": "a boat"}]}
    messages = [
        {"role": "system", "content": "in oil"},
        said(spoken("a boat"), spoken("at sea"), shown(png(1)), spoken("as here")),
        made,
        said(shown(png(3)), role="assistant"),
        said(spoken("now as"), shown(png(4)), spoken("in red")),
        {"role": "assistant", "content": "I will"},
    ]
    chat = {"model": "scripted", "modalities": ["image"], "messages": messages}
    status, error = await unified.refusal(chat)
    assert (status, error["param"]) == (400, "messages[4].content[1]")
    messages[4] = said(spoken("in red"))
    assert (await unified.chat(chat)).status_code == 200
    (start,) = unified.scripts["dit"].requests
    context = [getattr(part, part.WhichOneof("part")) for part in start.context]
    assert context == ["in oil", "a boat\nat sea", 0, "as here", "here", 1, 2]
    assert start.prompt == "in red"
    fields = ["messages[1].content[2]", "messages[2].images[0].image_url.url", "messages[3].content[0]"]
    assert [image.field for image in start.images] == fields
    assert bytes(unified.scripts["dit"].media) == png(1) + png(2) + png(3)


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([{"role": "tool", "tool_call_id": "x", "content": "1"}], "messages[0].role"),
        ([said({"type": "video_url", "video_url": {"url": "data:,x"}})], "messages[0].content[0]"),
        ([{"role": "assistant", "images": "x"}], "messages[0].images"),
        ([{"role": "assistant", "images": [{"image_url": {}}]}], "messages[0].images[0].image_url.url"),
        ([said(spoken("x"), shown(b"nonsense"))], "messages[0].content[1]"),
    ],
)
async def test_bad_turns_name_the_field(unified, messages, param):
    chat = {"model": "scripted", "modalities": ["image"], "messages": [*messages, said(spoken("a boat"))]}
    status, error = await unified.refusal(chat)
    assert (status, error["param"]) == (400, param)
    assert unified.scripts["dit"].requests == []


async def test_a_stage_refuses_turns_in_the_words_of_the_chat(unified):
    unified.scripts["dit"].error = InvalidInput("context", "has 300 parts; at most 256 are read")
    status, error = await unified.refusal(
        {"model": "scripted", "modalities": ["image"], "messages": [said(spoken("x"))]}
    )
    assert (status, error["param"]) == (400, "messages")


async def test_models(gateway, both):
    (model,) = (await gateway.http.get("/v1/models")).json()["data"]
    assert model["id"] == MODEL
    facts = model["quartet"]
    assert facts["tasks"] == ["text_to_image", "image_edit"]
    assert (facts["input_modalities"], facts["output_modalities"]) == (["text", "image"], ["image"])
    assert (facts["default_width"], facts["default_height"], facts["size_multiple"]) == (64, 48, 16)
    assert (facts["max_pixels"], facts["default_inference_steps"], facts["loras"]) == (65536, DIT_STEPS, ["ink", "oil"])
    assert (facts["mask"], facts["default_guidance_scale"]) == (True, 4)
    assert "sample_rate_hz" not in facts
    assert (await gateway.http.get(f"/v1/models/{MODEL}")).json() == model
    assert (await gateway.http.get("/v1/models/other")).json()["error"]["code"] == "model_not_found"
    thinker, dit = (await both.http.get("/v1/models")).json()["data"]
    assert thinker["quartet"]["output_modalities"] == ["text"]
    assert dit["quartet"] == facts
