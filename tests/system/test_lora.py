"""Two adapters of the thinker, through HTTP: text and speech are those of transformers with merged weights."""

import base64
import io
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import soundfile
from PIL import Image

from tests.support.clients.realtime_client import kinds, session
from tests.support.references.qwen3_omni import Reference, ReferenceAnswer
from tests.support.samples.media import Media
from tests.support.systems.stack import Access, Stack, brief_pipeline, running
from tests.support.weights.lora import adapters_in, merged

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600), pytest.mark.long]

MAX_TOKENS, MAX_FRAMES = 12, 10
QUESTION = "What do you see there, and what is it called by those who live beside it?"


@pytest.fixture(scope="module")
def loaded(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """A system of its own: room for adapters slows each step of the thinker down, which others need not wait for."""
    home = tmp_path_factory.mktemp("system")
    root = f"--thinker-arg=--lora-root={adapters_in(home / 'adapters', tiny_checkpoint)}"
    pipeline = ("--pipeline", str(brief_pipeline(home)))
    with running(tiny_checkpoint, home / "run", *pipeline, root, access=Access(home)) as stack:
        for name in ("sea", "hill"):
            body = {"lora_name": name, "lora_path": name}
            assert stack.http.post("/v1/load_lora_adapter", json=body).raise_for_status().text.startswith("Success")
        yield stack
        for name in ("sea", "hill"):
            stack.http.post("/v1/unload_lora_adapter", json={"lora_name": name}).raise_for_status()


@pytest.fixture(scope="module")
def answers(loaded: Stack, tiny_checkpoint: Path, media: Media) -> dict[str, ReferenceAnswer]:
    root = loaded.run_directory.parent / "adapters"
    checkpoints = {loaded.model: tiny_checkpoint} | {
        name: merged(tiny_checkpoint, root / name) for name in ("sea", "hill")
    }
    picture = {"type": "image", "image": Image.open(io.BytesIO(media.image))}
    asked = [{"role": "user", "content": [picture, {"type": "text", "text": QUESTION}]}]
    return {
        model: Reference(checkpoint).answer(asked, MAX_TOKENS, MAX_FRAMES) for model, checkpoint in checkpoints.items()
    }


def ask(stack: Stack, media: Media, **members: str) -> dict:
    url = f"data:image/png;base64,{base64.b64encode(media.image).decode()}"
    content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": QUESTION}]
    body = {
        "messages": [{"role": "user", "content": content}],
        "modalities": ["text", "audio"],
        "audio": {"format": "wav"},
        "temperature": 0,
        "max_tokens": MAX_TOKENS,
        "quartet": {"talker": {"temperature": 0, "max_frames": MAX_FRAMES}},
        **members,
    }
    response = stack.http.post("/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text
    return response.json()


def test_answers_of_adapters_and_of_none_side_by_side(
    loaded: Stack, answers: dict[str, ReferenceAnswer], media: Media
) -> None:
    """The picture's states reach the talker, so its speech tells whether they are the adapted model's. The same prompt
    is asked of all, twice: none finds another's in the prefix cache."""
    model = loaded.model
    assert len({answer.text for answer in answers.values()}) == len(answers)
    asked = [{"model": model}, {"model": "sea"}, {"model": model, "lora": "hill"}]
    with ThreadPoolExecutor(len(asked)) as threads:
        for is_warm in (False, True):
            given = list(threads.map(lambda members: ask(loaded, media, **members), asked))
            for members, body in zip(asked, given, strict=True):
                expected, message = answers[members.get("lora", members["model"])], body["choices"][0]["message"]
                assert message["content"] == expected.text
                samples, _ = soundfile.read(io.BytesIO(base64.b64decode(message["audio"]["data"])))
                assert samples.shape == expected.waveform.shape
                assert np.allclose(samples, expected.waveform, rtol=0, atol=1e-4)
                cached = body["usage"]["prompt_tokens_details"]["cached_tokens"]
                assert (cached > 0) == is_warm


def test_they_are_listed_and_others_are_not_found(loaded: Stack) -> None:
    parents = {model["id"]: model["parent"] for model in loaded.http.get("/v1/models").json()["data"]}
    assert parents == {loaded.model: None, "sea": loaded.model, "hill": loaded.model}
    body = {"model": "lake", "messages": [{"role": "user", "content": "hi"}]}
    assert loaded.http.post("/v1/chat/completions", json=body).status_code == 404
    for path, reason in (("../run", "is not in the directory"), ("/etc", "is not in"), ("lake", "adapter_config.json")):
        refused = loaded.http.post("/v1/load_lora_adapter", json={"lora_name": "lake", "lora_path": path})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "lora_path")
        assert reason in refused.json()["error"]["message"]


async def test_a_session_is_answered_by_its_adapter(loaded: Stack, answers: dict[str, ReferenceAnswer]) -> None:
    headers = {"authorization": f"Bearer {loaded.key}"}
    texts = set()
    for model in answers:
        async with session(loaded, model=model, additional_headers=headers) as client:
            assert client.created["session"]["model"] == model
            await client.say(QUESTION)
            events = await client.respond(output_modalities=["text"], max_output_tokens=MAX_TOKENS)
            assert kinds(events)[-1] == "response.done"
            texts.add(events[-1]["response"]["output"][0]["content"][0]["text"])
    assert len(texts) == len(answers)
