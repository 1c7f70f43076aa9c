"""The four processes say what transformers says: equal token ids, equal codec codes, waveforms within 1e-4.

Greedy, float32, for two checkpoints that share no size and no special id, and with every tensor between the stages in
shared memory, or by UCX; alone, from a warm prefix cache, eight at a time, and through the public API.
"""

import asyncio
import base64
import functools
import io
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
from PIL import Image

from services.thinker.config import ThinkerSettings
from services.thinker.conversation import MediaFile
from services.thinker.media import decode_video
from tests.support.references.qwen2_5_omni import reference_of
from tests.support.references.qwen3_omni import ReferenceAnswer
from tests.support.samples.media import AUDIO_RATE_HZ, Media
from tests.support.systems.stack import KV_BLOCK_TOKENS, Stack, running, until
from tests.support.systems.stages import Spoken, compare, converse, messages
from tests.support.weights.checkpoints import omni_checkpoint

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

MAX_TOKENS, MAX_FRAMES = 20, 30
VIDEO_FPS = 2.0
MEDIA_TYPES = {"image": "image/png", "audio": "audio/wav", "video": "video/mp4"}
# By default only large tensors are, which small models have none of.
EVERYTHING_BY = {
    "shared_memory": ["shared-memory-mib=16", "large-tensor-bytes=1"],
    "ucx": ["transports=inline,ucx", "large-tensor-bytes=1"],
}
# Part of the bytes that may go inline: UCX connects when the first request is there.
BEFORE_CONNECTED = {"ucx": 0.1}
IMAGE, AUDIO, VIDEO = ("image",), ("audio",), ("video",)

# Turns of (role, parts); a part is text or the kind of a file.
CASES: dict[str, list[tuple[str, list]]] = {
    "text": [("user", ["Tell me about the sea."])],
    "system": [("system", ["You are a sailor."]), ("user", ["Which way is north?"])],
    "chinese": [("user", ["你好，请介绍一下大海和天空。"])],
    "image": [("user", [IMAGE, "What do you see?"])],
    "audio": [("user", [AUDIO, "What do you hear?"])],
    "image and audio": [("user", ["Here is a picture", IMAGE, "and a sound", AUDIO])],
    "video": [("user", [VIDEO, "What happens?"])],
    "video with sound": [("user", [VIDEO, "What happens?"])],
    "several turns": [
        ("system", ["Answer at length, please."]),
        ("user", [IMAGE, "What is it?"]),
        ("assistant", ["A house by the lake, and a boat."]),
        ("user", [AUDIO, "And this?"]),
        ("assistant", ["A violin."]),
        ("user", ["Which do you like better?"]),
    ],
}


@dataclass
class System:
    """A running system on one checkpoint, and what the reference answers on the same one."""

    stack: Stack
    media: Media
    answers: dict[str, ReferenceAnswer]

    async def ask(self, case: str) -> Spoken:
        turns = [
            (role, [part if isinstance(part, str) else (part[0], getattr(self.media, part[0])) for part in parts])
            for role, parts in CASES[case]
        ]
        heard = case == "video with sound"
        return await converse(self.stack.addresses, messages(*turns), MAX_TOKENS, MAX_FRAMES, heard)

    def compare(self, case: str, spoken: Spoken) -> None:
        compare(self.answers[case], spoken)


# Its default cuts an utterance into windows, which the reference does not.
QWEN2_5 = {"qwen2.5-omni small": ("--code2wav-arg=--decoding=whole",)}
# Each checkpoint and each transport once: a system takes a minute to start.
OTHERS = [
    pytest.param("qwen2.5-omni small over shared_memory", marks=pytest.mark.long),
    pytest.param("small over ucx", marks=pytest.mark.weekly),
]


@pytest.fixture(scope="module", params=["tiny", *OTHERS])
def system(request: pytest.FixtureRequest, media: Media, tmp_path_factory) -> Iterator[System]:
    name, _, by = request.param.partition(" over ")
    if by == "ucx" and not find_spec("ucxx"):
        pytest.skip("needs ucxx: pip install 'quartet[ucx]'")
    arch, _, size = name.rpartition(" ")
    checkpoint = omni_checkpoint(size, arch=arch) if arch else request.getfixturevalue(f"{name}_checkpoint")
    answers = reference_answers(checkpoint, media)
    if request.param == "tiny":
        yield System(request.getfixturevalue("stack"), media, answers)
        return
    stages = ("thinker", "talker", "code2wav")
    flags = [f"--{stage}-arg=--{flag}" for stage in stages for flag in EVERYTHING_BY.get(by, ())]
    flags += QWEN2_5.get(name, ())
    with running(checkpoint, tmp_path_factory.mktemp("run"), *flags) as stack:
        yield System(stack, media, answers)
        for stage in ("thinker", "talker") if by else ():
            sent_bytes = stack.sent_bytes(stage)
            assert sent_bytes[by] > 0
            assert sum(sent_bytes.values()) - sent_bytes[by] <= BEFORE_CONNECTED.get(by, 0) * sent_bytes[by]
            until(lambda stage=stage: stack.metric(stage, "quartet_shared_memory_used_bytes") == 0, "all is free")


@functools.cache
def reference_answers(checkpoint: Path, media: Media) -> dict[str, ReferenceAnswer]:
    reference = reference_of(checkpoint)
    sampler = reference.processor.video_processor

    def frames(total: int, rate: float) -> np.ndarray:
        from transformers.video_utils import VideoMetadata

        return np.asarray(sampler.sample_frames(VideoMetadata(total_num_frames=total, fps=rate), fps=VIDEO_FPS))

    file = MediaFile("video", media.video, "video")
    video = decode_video(file, AUDIO_RATE_HZ, frames, ThinkerSettings(model=str(checkpoint)))
    sound, rate_hz = soundfile.read(io.BytesIO(media.audio), dtype="float32")
    assert rate_hz == AUDIO_RATE_HZ
    decoded = {"image": Image.open(io.BytesIO(media.image)), "audio": sound, "video": video.frames}
    answers = {}
    for case, turns in CASES.items():
        heard = case == "video with sound"
        conversation = []
        for role, parts in turns:
            content = []
            for part in parts:
                if isinstance(part, str):
                    content.append({"type": "text", "text": part})
                else:
                    content.append({"type": part[0], part[0]: decoded[part[0]]})
                    if heard:
                        content.append({"type": "audio", "audio": video.sound})
            conversation.append({"role": role, "content": content})
        has_video = any(VIDEO in parts for _, parts in turns)
        options: dict[str, Any] = {"fps": VIDEO_FPS} if has_video else {}
        answers[case] = reference.answer(conversation, MAX_TOKENS, MAX_FRAMES, use_audio_in_video=heard, **options)
    return answers


def test_the_reference_answers_differ_and_speak(system: System):
    answers = system.answers.values()
    # A random model may say the same twice, or nothing.
    assert len({tuple(a.token_ids) for a in answers}) >= len(CASES) - 1
    assert sum(len(a.codes) > 0 for a in answers) >= len(CASES) - 1
    assert any(len(a.token_ids) == MAX_TOKENS for a in answers)  # cut by length, and spoken whole


@pytest.mark.parametrize("case", CASES)
async def test_alone_and_from_a_warm_prefix_cache(system: System, case: str):
    async with system.stack.stages_reached():
        system.compare(case, await system.ask(case))
        again = await system.ask(case)
    system.compare(case, again)
    assert again.summary
    if again.summary.prompt_tokens > KV_BLOCK_TOKENS:
        assert again.summary.cached_tokens > 0


async def test_eight_mixed_requests_at_a_time(system: System):
    cases = list(CASES)[1:]
    assert len(cases) == 8
    async with system.stack.stages_reached():
        answers = await asyncio.gather(*map(system.ask, cases))
    for case, spoken in zip(cases, answers, strict=True):
        system.compare(case, spoken)


@pytest.mark.parametrize("case", CASES)
def test_through_the_public_api(system: System, case: str):
    answer = system.answers[case]

    def part(each) -> dict:
        if isinstance(each, str):
            return {"type": "text", "text": each}
        data = base64.b64encode(getattr(system.media, each[0])).decode()
        kind = f"{each[0]}_url"
        return {"type": kind, kind: {"url": f"data:{MEDIA_TYPES[each[0]]};base64,{data}"}}

    facts = system.stack.http.get("/v1/models").json()["data"][0]
    body = {
        "model": facts["id"],
        "messages": [{"role": role, "content": [part(each) for each in parts]} for role, parts in CASES[case]],
        "modalities": ["text", "audio"],
        "audio": {"format": "wav"},
        "temperature": 0,
        "max_tokens": MAX_TOKENS,
        "quartet": {
            "talker": {"temperature": 0, "max_frames": MAX_FRAMES},
            "thinker": {"use_audio_in_video": case == "video with sound"},
        },
    }
    response = system.stack.http.post("/v1/chat/completions", json=body, timeout=120)
    assert response.status_code == 200, response.text
    message = response.json()["choices"][0]["message"]
    if not len(answer.codes):
        assert message["content"] == answer.text
        assert not message.get("audio")
        return
    assert message["content"] == message["audio"]["transcript"] == answer.text
    samples, rate_hz = soundfile.read(io.BytesIO(base64.b64decode(message["audio"]["data"])))
    assert rate_hz == facts["quartet"]["sample_rate_hz"]
    assert samples.shape == answer.waveform.shape
    assert np.allclose(samples, answer.waveform, rtol=0, atol=1e-4)
