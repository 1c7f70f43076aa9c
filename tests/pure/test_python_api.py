"""AsyncOmni and Omni before scripted stages."""

import asyncio
import gc
import io
import os
import pickle
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import pytest_asyncio
import soundfile
from PIL import Image

from quartet import (
    Answer,
    AsyncOmni,
    AudioDelta,
    Chat,
    Error,
    ImageDelta,
    Omni,
    StartError,
    TextDelta,
    Tls,
    audio,
    image,
    video,
)
from services.common.errors import QueueFull
from tests.support.scripted.code2wav import PCM16, SAMPLE_RATE_HZ
from tests.support.scripted.dit import picture_of
from tests.support.scripted.stages import ScriptedStages, scripted_stages
from tests.support.scripted.thinker import PIECES

pytestmark = pytest.mark.asyncio(loop_scope="module")
TEXT = "".join(PIECES)
CONCURRENCY = 8
SOUND = np.frombuffer(PCM16, "<i2")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running() -> AsyncIterator[ScriptedStages]:
    async with scripted_stages() as stages:
        yield stages


@pytest_asyncio.fixture(loop_scope="module")
async def stages(running: ScriptedStages) -> AsyncIterator[ScriptedStages]:
    yield running
    for script in running.scripts.values():
        await script.reset()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def omni(running: ScriptedStages) -> AsyncIterator[AsyncOmni]:
    async with AsyncOmni(address=running.addresses, concurrency=CONCURRENCY) as omni:
        yield omni


def asked(stages: ScriptedStages):
    """The last request that the thinker got."""
    return stages.scripts["thinker"].requests[-1]


async def test_an_answer_has_text_sound_tokens_and_usage(omni: AsyncOmni, stages: ScriptedStages) -> None:
    answer = await omni.generate("Hello", speech=True, voice="Ethan", seed=5)
    assert (answer.text, answer.token_ids, answer.finish_reason) == (TEXT, [0, 1, 2], "stop")
    assert answer.usage["total_tokens"] == 10 + 3 + 3
    assert answer.error is None
    assert answer.audio is not None
    assert answer.audio.samples.dtype == np.int16
    np.testing.assert_array_equal(answer.audio.samples, SOUND)
    np.testing.assert_allclose(answer.audio.float32, SOUND / 32768)
    assert (answer.audio.rate_hz, answer.audio.seconds) == (SAMPLE_RATE_HZ, len(SOUND) / SAMPLE_RATE_HZ)
    assert stages.scripts["talker"].requests[0].speaker == "ethan"
    assert asked(stages).sampling.seed == 5
    written = await omni.generate("Hello")
    assert (written.text, written.audio) == (TEXT, None)


async def test_options_reach_the_thinker(omni: AsyncOmni, stages: ScriptedStages) -> None:
    function = {"name": "lamp", "parameters": {"type": "object"}}
    stages.scripts["thinker"].tool_call = True
    answer = await omni.generate(
        Chat("Be brief.").user("Light!"),
        max_tokens=7,
        temperature=0.5,
        stop=["x"],
        tools=[{"type": "function", "function": function}],
        response_format={"type": "json_object"},
    )
    request = asked(stages)
    assert (request.sampling.max_tokens, request.sampling.temperature, request.sampling.json_object) == (7, 0.5, True)
    assert [message.role for message in request.messages] == ["system", "user"]
    assert request.tools[0].name == "lamp"
    (call,) = answer.tool_calls
    assert call["function"] == {"name": "lamp", "arguments": '{"on":true}'}
    assert answer.finish_reason == "tool_calls"
    chat = Chat().user("Light!").assistant(answer).tool(call["id"], "on").user("Thanks")
    await omni.generate(chat)
    assert [message.role for message in asked(stages).messages] == ["user", "assistant", "tool", "user"]
    assert asked(stages).messages[1].tool_calls[0].arguments_json == '{"on":true}'


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"temperature": 9}, "temperature"),
        ({"voice": "nobody"}, "voice"),
        ({"max_token": 3}, "max_token"),
        ({"n": 2}, "n"),
        ({"speech": True, "modalities": ["text"]}, "speech"),
        ({"lora": "none"}, "lora"),
        ({"images": ["no/such.png"]}, "messages[0].content[0]"),
        ({"images": [b"no picture"]}, "messages[0].content[0]"),
        ({"audios": [np.zeros(8000, np.float32)]}, "messages[0].content[0]"),
        ({"images": [np.zeros((4, 4), np.float32)]}, "messages[0].content[0]"),
        ({"videos": [3]}, "messages[0].content[0]"),
        ({"images": ["https://nowhere.invalid/x.png"]}, "messages[0].content[0]"),
    ],
)
async def test_what_is_at_fault_is_named(omni: AsyncOmni, options, field: str) -> None:
    with pytest.raises(Error) as caught:
        await omni.generate("Hello", **options)
    assert caught.value.field == field
    assert field in str(caught.value)
    again = pickle.loads(pickle.dumps(caught.value))
    assert (str(again), again.field, again.code) == (str(caught.value), field, caught.value.code)


@pytest.mark.parametrize("prompt", [5, [{"content": "x"}], [{"role": "user", "content": [5]}], {"role": "no"}])
async def test_what_is_no_prompt_is_refused(omni: AsyncOmni, prompt) -> None:
    with pytest.raises(Error, match=r"prompt|messages\[0\]"):
        await omni.generate(prompt)


async def test_media_come_as_they_are(omni: AsyncOmni, stages: ScriptedStages, tmp_path: Path) -> None:
    pixels, tone = picture_of(7), np.sin(np.arange(8000) / 9).astype(np.float32)
    Image.fromarray(pixels).save(tmp_path / "picture.png")
    soundfile.write(tmp_path / "tone.wav", tone, 8000, subtype="FLOAT")
    parts = [
        *(image(each) for each in (pixels, tmp_path / "picture.png", str(tmp_path / "picture.png"))),
        *(Image.fromarray(pixels), (tmp_path / "picture.png"), image((tmp_path / "picture.png").read_bytes())),
        *((tone, 8000), audio(tone, 8000), tmp_path / "tone.wav"),
    ]
    await omni.generate(Chat().user("What?", *parts))
    text, *media = asked(stages).messages[0].content
    assert text.text == "What?"
    for part in media[:6]:
        assert part.media.kind == media[0].media.kind
        with Image.open(io.BytesIO(part.media.data)) as got:
            np.testing.assert_array_equal(np.asarray(got), pixels)
    for part in media[6:]:
        got, rate_hz = soundfile.read(io.BytesIO(part.media.data), dtype="float32")
        np.testing.assert_array_equal(got, tone)
        assert rate_hz == 8000


async def test_an_answers_sound_is_a_part_of_the_next_prompt(
    omni: AsyncOmni, stages: ScriptedStages, tmp_path: Path
) -> None:
    answer = await omni.generate("Hello", speech=True)
    assert answer.audio is not None
    answer.audio.save(tmp_path / "said.flac")
    await omni.generate("What was that?", audios=[answer.audio, tmp_path / "said.flac"])
    for part in asked(stages).messages[0].content[:2]:
        got, rate_hz = soundfile.read(io.BytesIO(part.media.data), dtype="int16")
        np.testing.assert_array_equal(got, SOUND)
        assert rate_hz == SAMPLE_RATE_HZ
    with pytest.raises(Error, match="must end with one of"):
        answer.audio.save(tmp_path / "said.doc")


async def test_prompts_are_answered_together_in_their_order_and_one_may_fail(
    omni: AsyncOmni, stages: ScriptedStages
) -> None:
    thinker = stages.scripts["thinker"]
    thinker.hold = True
    prompts = ["a", Chat().user("b"), [{"role": "user", "content": "c"}], 5, *(f"d{i}" for i in range(26))]
    task = asyncio.create_task(omni.generate(prompts))
    async with asyncio.timeout(60):
        while thinker.running < CONCURRENCY:
            await asyncio.sleep(0.005)
    await asyncio.sleep(0.05)  # for one too many
    assert thinker.running == CONCURRENCY
    thinker.go_on()
    answers = await task
    assert isinstance(answers, list)
    assert len(answers) == len(prompts)
    assert [i for i, answer in enumerate(answers) if answer.error] == [3]
    assert all(answer.text == TEXT for i, answer in enumerate(answers) if i != 3)
    assert await omni.generate([]) == []
    with pytest.raises(Error, match=r"^temperature"):  # not thirty times
        await omni.generate(["a", "b"], temperature=9)


async def test_a_bar_is_shown_when_asked_for(omni: AsyncOmni, capsys: pytest.CaptureFixture[str]) -> None:
    await omni.generate(["a", "b", "c"])
    assert capsys.readouterr() == ("", "")
    await omni.generate(["a", "b", "c"], progress=True)
    out, errors = capsys.readouterr()
    assert out == ""
    assert "3/3" in errors


async def test_a_stream_ends_with_the_whole_answer(omni: AsyncOmni, stages: ScriptedStages) -> None:
    stages.scripts["thinker"].thought = ["Hm"]
    events = [event async for event in omni.stream("Hello", speech=True)]
    *deltas, last = events
    assert isinstance(last, Answer)
    assert (last.text, last.reasoning, last.token_ids) == (TEXT, "Hm", [9, 0, 1, 2])
    written = [event for event in deltas if isinstance(event, TextDelta)]  # what comes together is one
    assert "".join(event.text for event in written) == TEXT
    assert (written[0].reasoning, "".join(event.reasoning for event in written[1:])) == ("Hm", "")
    sounds = [event.audio.samples for event in deltas if isinstance(event, AudioDelta)]
    np.testing.assert_array_equal(np.concatenate(sounds), SOUND)
    assert last.message == {"role": "assistant", "content": TEXT, "reasoning_content": "Hm"}


async def ended(stages: ScriptedStages) -> None:
    async with asyncio.timeout(60):
        while any(script.running for script in stages.scripts.values()):
            await asyncio.sleep(0.005)


@pytest.mark.parametrize("how", ["task", "stream", "batch"])
async def test_cancelling_frees_every_stage(omni: AsyncOmni, stages: ScriptedStages, how: str) -> None:
    for script in stages.scripts.values():
        script.hold, script.after = True, 1
    if how == "stream":
        stream = omni.stream("Hello", speech=True)
        assert isinstance(await anext(stream), TextDelta | AudioDelta)
        await asyncio.gather(*(script.holding.wait() for script in stages.scripts.values()))
        await stream.aclose()
    else:
        task = asyncio.create_task(omni.generate("a" if how == "task" else ["a", "b"], speech=True))
        await asyncio.gather(*(script.holding.wait() for script in stages.scripts.values()))
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    await ended(stages)
    for script in stages.scripts.values():
        assert set(script.ended) == {"cancelled"}


async def test_a_stage_that_others_run_is_an_error_when_it_is_lost(omni: AsyncOmni, stages: ScriptedStages) -> None:
    stages.scripts["talker"].error = (grpc.StatusCode.UNAVAILABLE, "Socket closed")
    answers = await omni.generate(["a"], speech=True)
    assert answers[0].error is not None
    assert (answers[0].error.code, answers[0].text) == ("stage_unavailable", "")
    stages.scripts["talker"].error = None
    async with asyncio.timeout(60):
        while (await omni.generate(["a"], speech=True))[0].error:
            await asyncio.sleep(0.05)


async def test_a_full_stage_is_asked_again(omni: AsyncOmni, stages: ScriptedStages) -> None:
    thinker = stages.scripts["thinker"]
    thinker.error = QueueFull("all places are taken")
    task = asyncio.create_task(omni.generate("Hello"))
    async with asyncio.timeout(60):
        while len(thinker.requests) < 2:
            await asyncio.sleep(0.01)
    thinker.error = None
    assert (await task).text == TEXT


async def test_pictures_come_as_pillows(tmp_path: Path) -> None:
    async with scripted_stages("dit") as drawing, AsyncOmni(address=drawing.addresses) as omni:
        made = await omni.images("a fox", n=2, size="64x48", seed=3)
        assert [np.asarray(picture).tolist() for picture in made] == [picture_of(3 + i).tolist() for i in range(2)]
        edited = await omni.images("a fox", images=[made[0], np.asarray(made[1])], seed=1)
        assert len(edited) == 1
        with pytest.raises(Error, match=r"^size"):
            await omni.images("a fox", size="65x48")
        with pytest.raises(Error, match=r"^colour"):
            await omni.images("a fox", colour="red")
        answer = await omni.generate("a fox", seed=4)
        np.testing.assert_array_equal(np.asarray(answer.images[0]), picture_of(4))
        with pytest.raises(Error, match="modalities"):
            await omni.generate("a fox", speech=True)


async def test_an_answer_has_text_and_images_and_the_next_turn_sees_them() -> None:
    kinds = ("thinker", "talker", "code2wav", "dit")
    async with scripted_stages(*kinds) as stages, AsyncOmni(address=stages.addresses) as omni:
        thinker, dit = stages.scripts["thinker"], stages.scripts["dit"]
        drawing: dict[str, Any] = {"tools": [{"type": "image_generation"}]}
        thinker.calls = [("image_generation", '{"prompt": "a cat", "action": "generate"}')]
        chat = Chat().user("draw a cat")
        events = [event async for event in omni.stream(chat, **drawing)]
        answer = events[-1]
        assert isinstance(answer, Answer)
        (made,) = [event for event in events if isinstance(event, ImageDelta)]
        assert (made.prompt, answer.text, answer.tool_calls, answer.image_errors) == ("a cat", TEXT, [], [])
        assert [picture.size for picture in answer.images] == [made.image.size]
        assert events.index(made) < min(
            i for i, event in enumerate(events) if isinstance(event, TextDelta) and event.text
        )

        thinker.calls = [("image_generation", '{"prompt": "a blue cat", "action": "edit"}')]
        changed = await omni.generate(chat.assistant(answer).user("make it blue"), speech=True, **drawing)
        assert (len(changed.images), changed.audio is not None) == (1, True)
        seen = thinker.requests[2].messages  # the call, and its result with the image, stand for the earlier answer
        assert [message.role for message in seen] == ["user", "assistant", "tool", "assistant", "user"]
        assert (dit.requests[1].prompt, len(dit.requests[1].images)) == ("a blue cat", 1)

        thinker.calls = [("image_generation", "nonsense")]
        failed = await omni.generate(chat, **drawing)
        assert (failed.images, failed.text, len(failed.image_errors)) == ([], TEXT, 1)
        with pytest.raises(Error, match=r"^tools\[0\]\.size"):
            await omni.generate("draw", tools=[{"type": "image_generation", "size": "large"}])


async def test_a_model_that_only_speaks_speaks(stages: ScriptedStages) -> None:
    addresses = {name: stages.addresses[name] for name in ("talker", "code2wav")}
    async with AsyncOmni(address=addresses) as omni:
        answer = await omni.generate("The boats are out.")
    assert answer.text == "The boats are out."
    assert answer.audio is not None
    np.testing.assert_array_equal(answer.audio.samples, SOUND)


async def test_a_model_without_pictures_says_so(omni: AsyncOmni) -> None:
    with pytest.raises(Error, match="nothing here makes image"):
        await omni.images("a fox")
    with pytest.raises(Error, match="this server makes no images"):
        await omni.generate("draw a fox", tools=[{"type": "image_generation"}])


@pytest.mark.parametrize(
    ("model", "setup", "told"),
    [
        (None, {}, "^model: say model"),
        ("a/b", {"address": {"thinker": "localhost:1"}}, "^model: .*not both"),
        (None, {"address": {"writer": "localhost:1"}}, "^address: no shipped pipeline"),
        (None, {"address": {"thinker": "localhost:1"}, "stages": {}}, "^stages: only for"),
        (None, {"address": "no/such/directory"}, "^address: .*state.json"),
        (None, {"address": {"thinker": "localhost:1"}, "concurrency": 0}, "^concurrency"),
        ("a/b", {"timeout_s": 0}, "^timeout_s"),
        ("a/b", {"modell": 0}, "^modell: no such argument"),
        ("no/such/directory", {}, "^model no/such/directory: there is no such directory"),
        ("a/b", {"pipeline": "no-such"}, "^pipeline: .*cannot be read"),
        ("a/b", {"stages": {"thinker": {"max_modellen": 3}}}, "^thinker: .*max-modellen"),
        ("a/b", {"stages": {"gateway": {"port": 3}}}, "^stages.gateway"),
        ("a/b", {"tls": Tls(Path("x"))}, "tls"),
    ],
)
async def test_what_cannot_start_says_why(model, setup, told: str) -> None:
    with pytest.raises(StartError, match=told):
        AsyncOmni(model, **setup)


async def test_stages_that_do_not_serve_are_named(stages: ScriptedStages, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quartet.client.REACH_S", 0.5)
    with pytest.raises(StartError, match=r"stages do not serve: .*code2wav"):
        await AsyncOmni(address=stages.addresses | {"code2wav": "127.0.0.1:9"}).generate("Hello")


async def test_an_omni_is_of_one_loop_and_ends_once(stages: ScriptedStages) -> None:
    omni = AsyncOmni(address=stages.addresses)
    assert (await omni.generate("Hello")).text == TEXT  # without the block
    with pytest.raises(RuntimeError, match="another event loop"):
        await asyncio.to_thread(asyncio.run, omni.generate("Hello"))
    await omni.close()
    await omni.close()
    with pytest.raises(RuntimeError, match="closed"):
        await omni.generate("Hello")


async def test_the_blocking_one_does_the_same_from_any_thread(stages: ScriptedStages) -> None:
    threads = threading.active_count()

    def use() -> None:
        with Omni(address=stages.addresses) as omni:
            assert omni.generate("Hello", speech=True).text == TEXT
            assert [answer.text for answer in omni.generate(["a", "b"])] == [TEXT, TEXT]
            *_, last = omni.stream("Hello", speech=True)
            assert isinstance(last, Answer)
            with pytest.raises(Error, match=r"^temperature"):
                omni.generate("Hello", temperature=9)
            stages.scripts["thinker"].hold, stages.scripts["thinker"].after = True, 2
            left = omni.stream("Hello", speech=True)
            next(left)
            left.close()
            assert next(iter(omni.stream("Hello")))  # one that is only forgotten
            stages.scripts["thinker"].go_on()
        with pytest.raises(RuntimeError, match="closed"):
            omni.generate("Hello")

    await asyncio.to_thread(use)
    await ended(stages)
    assert "cancelled" in stages.scripts["thinker"].ended

    def forget() -> None:
        omni = Omni(address=stages.addresses)
        assert omni.generate("Hello").text == TEXT
        del omni
        gc.collect()

    await asyncio.to_thread(forget)
    async with asyncio.timeout(60):
        while [thread for thread in threading.enumerate() if thread.name == "quartet-omni"]:
            await asyncio.sleep(0.005)
    assert threading.active_count() <= threads + 1  # of to_thread


async def test_a_forked_process_leaves_it_alone(stages: ScriptedStages) -> None:
    omni = AsyncOmni(address=stages.addresses)
    await omni.start()
    omni._process_id = os.getpid() + 1  # as a fork sees it
    with pytest.raises(RuntimeError, match="forked"):
        await omni.generate("Hello")
    await omni.close()
    omni._process_id = os.getpid()
    assert (await omni.generate("Hello")).text == TEXT
    await omni.close()


async def test_a_film_is_a_file(omni: AsyncOmni, stages: ScriptedStages, media) -> None:
    await omni.generate("What?", videos=[media.video, video(media.video)])
    assert [part.media.data for part in asked(stages).messages[0].content[:2]] == [media.video] * 2
