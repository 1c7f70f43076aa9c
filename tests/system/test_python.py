"""Omni with real stages: the same answers as over HTTP, a lost stage, ctrl-C, and a program that is killed."""

import base64
import contextlib
import io
import json
import os
import signal
import subprocess
import sys
import tempfile
import wave
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from quartet import Answer, AsyncOmni, AudioDelta, Omni, TextDelta, image
from quartet.messages import PromptOptions
from tests.support.systems.omni_program import PROMPTS, THINGS
from tests.support.systems.stack import HANG_GUARD_S, Stack, processes_of, shared_memory_of, until

pytestmark = pytest.mark.e2e
SPOKEN: PromptOptions = {
    "speech": True,
    "max_tokens": 12,
    "temperature": 0.9,
    "seed": 11,
    "quartet": {"talker": {"max_frames": 24}},
}
ENDLESS: PromptOptions = {"speech": True, "ignore_eos": True, "quartet": {"talker": {"max_frames": 3000}}}
STEP = 1  # of 16 bit: the decoder's float32 sums depend on which frames it took together


def reach(stack: Stack) -> dict[str, Any]:
    """Arguments of an Omni of the stack's stages."""
    assert stack.access is not None
    return {"address": stack.run_directory, "tls": stack.access.tls}


@pytest.fixture(scope="module")
def omni(stack: Stack) -> Iterator[Omni]:
    with Omni(**reach(stack)) as omni:
        yield omni


@pytest.fixture(scope="module")
def picture() -> np.ndarray:
    """(height, width, 3) uint8."""
    y, x = np.mgrid[0:64, 0:96]
    return np.stack([2 * x, 3 * y, x + y], axis=-1).astype(np.uint8)


def test_a_request_has_the_tokens_and_samples_that_it_has_over_http(
    stack: Stack, omni: Omni, picture: np.ndarray
) -> None:
    png = io.BytesIO()
    Image.fromarray(picture).save(png, "png")
    url = f"data:image/png;base64,{base64.b64encode(png.getvalue()).decode()}"
    question = "What do you see?"
    content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": question}]
    body = {
        "model": stack.model,
        "messages": [{"role": "user", "content": content}],
        "modalities": ["text", "audio"],
        "audio": {"voice": "ethan", "format": "wav"},
        "logprobs": True,
        "max_tokens": 12,
        "temperature": 0.9,
        "seed": 11,
        "quartet": SPOKEN.get("quartet"),
    }
    told = stack.http.post("/v1/chat/completions", json=body).raise_for_status().json()
    choice = told["choices"][0]
    asked: PromptOptions = {**SPOKEN, "images": [picture], "voice": "ethan", "logprobs": True}
    ours = omni.generate(question, **asked)
    assert (ours.text, ours.finish_reason) == (choice["message"]["content"], choice["finish_reason"])
    tokens = [entry["token"] for entry in choice["logprobs"]["content"]]
    assert [entry["token"] for entry in ours.logprobs or ()] == tokens
    assert len(ours.token_ids) == len(tokens) == 12
    for name in ("prompt_tokens", "completion_tokens", "completion_tokens_details"):
        assert ours.usage[name] == told["usage"][name]
    with wave.open(io.BytesIO(base64.b64decode(choice["message"]["audio"]["data"]))) as file:
        assert ours.audio is not None
        assert ours.audio.rate_hz == file.getframerate()
        theirs = np.frombuffer(file.readframes(file.getnframes()), "<i2").astype(int)
    np.testing.assert_allclose(ours.audio.samples, theirs, rtol=0, atol=STEP)
    other = omni.generate(question, images=[picture], max_tokens=12, temperature=0.9, seed=12)
    assert other.token_ids != ours.token_ids  # the seed counts


async def test_a_stream_adds_up_and_leaving_it_frees_every_stage(stack: Stack) -> None:
    async with AsyncOmni(**reach(stack)) as omni:
        events = [event async for event in omni.stream("Say something.", **SPOKEN)]
        *deltas, last = events
        assert isinstance(last, Answer)
        assert last.audio is not None
        pieces = [event for event in deltas if isinstance(event, TextDelta)]
        assert "".join(piece.text for piece in pieces) == last.text
        assert [token for piece in pieces for token in piece.token_ids] == last.token_ids
        sounds = [event.audio.samples for event in deltas if isinstance(event, AudioDelta)]
        assert len(sounds) > 1
        np.testing.assert_array_equal(np.concatenate(sounds), last.audio.samples)

        cancelled = {name: stack.cancelled(name) for name in stack.addresses}
        left = omni.stream("Say all.", **ENDLESS)
        async for event in left:
            if isinstance(event, AudioDelta):
                break
        await left.aclose()
        until(lambda: not any(stack.in_flight().values()), "the stages to be free")
        assert all(stack.cancelled(name) == before + 1 for name, before in cancelled.items())


def test_an_image_may_be_a_path_bytes_pillows_or_an_array(omni: Omni, picture: np.ndarray, tmp_path: Path) -> None:
    file = tmp_path / "picture.png"
    Image.fromarray(picture).save(file)
    sources = (picture, Image.fromarray(picture), file, str(file), file.read_bytes())
    answers = omni.generate(
        [[{"role": "user", "content": [image(source), "What?"]}] for source in sources], max_tokens=8, temperature=0
    )
    assert answers[0].error is None
    assert {tuple(answer.token_ids) for answer in answers} == {tuple(answers[0].token_ids)}


@contextlib.contextmanager
def program(checkpoint: Path, run_directory: Path) -> Iterator[Stack]:
    """Runs the user's program around a block. `Stack.output` is what it has said."""
    command = [sys.executable, "-m", "tests.support.systems.omni_program", str(checkpoint), str(run_directory)]
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(command, stdout=output, stderr=errors)
        try:
            yield Stack(process, run_directory, output)
        except BaseException:
            print(os.pread(errors.fileno(), 100_000, 0).decode())
            raise
        finally:
            process.kill()
            process.wait()


def line(user: Stack, number: int) -> Any:
    """What the program says, line by line."""

    def said() -> list[str]:
        return user.output.splitlines(keepends=True)

    until(lambda: user.process.poll() is not None or (len(said()) > number and said()[number].endswith("\n")))
    assert user.process.poll() is None
    return json.loads(said()[number])


@pytest.mark.long  # it starts stages of its own
def test_a_program_outlives_a_stage_and_ctrl_c_and_leaves_nothing(tiny_checkpoint: Path, tmp_path: Path) -> None:
    with program(tiny_checkpoint, tmp_path / "run") as user:
        assert line(user, 0) == "ready"
        until(lambda: user.metric("talker", "quartet_requests_total") >= PROMPTS // 8, "prompts to be answered")
        before = user.pid("talker")
        os.kill(before, signal.SIGKILL)
        answers = line(user, 1)
        assert user.pid("talker") != before
        assert len(answers) == PROMPTS
        assert [answer["error"] for answer in answers] == [None] * PROMPTS  # those that it took along were asked again
        for i in range(THINGS):  # in their order, and as if nothing had happened
            assert {(each["text"], each["samples"]) for each in answers[i::THINGS]} == {
                (answers[i]["text"], answers[i]["samples"])
            }
        assert len({answer["text"] for answer in answers}) > 1
        assert all(answer["samples"] for answer in answers)

        assert line(user, 2) == "asking"
        until(lambda: all(user.in_flight().values()), "all stages to have something to do")
        user.process.send_signal(signal.SIGINT)
        assert line(user, 3) == "interrupted"
        until(lambda: not any(user.in_flight().values()), "the stages to be free")
        assert line(user, 4) == answers[0]["text"]

        shared = set(shared_memory_of(user.run_directory))
        assert list(processes_of(user.run_directory))
        user.process.kill()
        user.process.wait(HANG_GUARD_S)
        until(lambda: not list(processes_of(user.run_directory)), "its processes to end")
        until(lambda: not [file for file in shared if Path(file).exists()], "its shared memory to go")
