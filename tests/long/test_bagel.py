"""One model of two stages, as docs/bagel.md has it typed: it answers, makes pictures, and is asked about them."""

import io
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
from PIL import Image

from quartet import Answer, Chat, ImageDelta, Omni, TextDelta
from tests.support.clients import pictures
from tests.support.references.bagel import Bagel, Settings
from tests.support.systems.stack import Stack, running
from tests.support.systems.terminal import Terminal, lines
from tests.support.weights.checkpoints import diffusion_checkpoint

pytestmark = [pytest.mark.e2e, pytest.mark.long]
NAME, TOKENS, STEPS = "ByteDance-Seed/BAGEL-7B-MoT", 12, 3
PAGE = [line for line in lines("docs/bagel.md") if line.startswith("quartet")]
SMALL = {"size": "64x48", "num_inference_steps": STEPS}
PICTURE = Image.radial_gradient("L").resize((150, 70)).convert("RGB")


@pytest.fixture(scope="module")
def checkpoint() -> Path:
    return diffusion_checkpoint("bagel")


@pytest.fixture(scope="module")
def stack(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Started by the page's first line."""
    flags = shlex.split(PAGE[0].replace(NAME, str(checkpoint)))[2:]
    more = ["--thinker-arg=--kv-cache-bytes=16777216", f"--gateway-arg=--jobs-dir={tmp_path_factory.mktemp('jobs')}"]
    with running(None, tmp_path_factory.mktemp("run"), *flags, *more) as started:
        yield started


@pytest.fixture(scope="module")
def plain(checkpoint: Path) -> Bagel:
    return Bagel(checkpoint)


@pytest.fixture
def client(stack: Stack) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{stack.url}/v1", api_key=stack.key)


def shown(image: Image.Image) -> dict[str, Any]:
    file = io.BytesIO()
    image.save(file, "PNG")
    return pictures.shown(file.getvalue())


def opened(part: Any) -> Image.Image:
    return Image.fromarray(pictures.pixels(part["image_url"]["url"].partition(",")[2]))


def same(image: Image.Image, wanted: Any) -> None:
    """Within what rounding to bytes, and pixels that were bytes before, make of floats."""
    assert np.abs(np.asarray(image) - wanted.numpy() * 255).max() <= 1.0


def test_what_the_page_says_to_type(stack: Stack, checkpoint: Path, tmp_path: Path) -> None:
    at = f"--url {stack.url}"
    ours = {
        "quartet image": f".venv/bin/quartet image {at} --steps 2",
        "quartet chat": f".venv/bin/quartet chat {at} --max-tokens 8",
        "1024x768": "64x48",
    }
    typist = Terminal(tmp_path, ours, {})
    made, changed, asked = PAGE[1:4]
    assert typist.type(made).startswith("wrote fox.png: 64x48")
    assert typist.type(changed).startswith("wrote spring.png")
    assert typist.type(asked).strip()


def test_text_thoughts_and_pictures_in_one_conversation(client: openai.OpenAI, plain: Bagel) -> None:
    """Each turn is what the plain reference makes of all turns before."""
    model = client.models.list().data[0]
    assert (model.model_extra or {})["quartet"]["output_modalities"] == ["text", "image"]
    create = client.chat.completions.create
    words = Settings(max_tokens=TOKENS + 1)
    messages: list[Any] = [{"role": "user", "content": [shown(PICTURE), {"type": "text", "text": "What is it?"}]}]
    told = create(model=model.id, messages=messages, max_tokens=TOKENS, temperature=0).choices[0].message.content
    given: list[Any] = [PICTURE, "What is it?"]
    assert told == plain.make(given, understand=True, settings=words)[0]

    messages += [{"role": "assistant", "content": told}, {"role": "user", "content": "a red fox"}]
    given += [told, "a red fox"]
    arguments = {"think": True, "max_think_tokens": 6}
    extra = {"modalities": ["text", "image"], "quartet": {"dit": SMALL | {"arguments": arguments}}}
    thoughts, parts = "", list[Any]()
    for chunk in create(model=model.id, messages=messages, stream=True, seed=5, extra_body=extra):
        delta = chunk.choices[0].delta
        if thought := (delta.model_extra or {}).get("reasoning"):
            assert not parts
            thoughts += thought
        parts += delta.content or ()
    settings = Settings(
        points=STEPS + 1, max_tokens=6, image_scale=2.0, interval=(0.0, 1.0), renorm="text_channel", shift=3.0
    )
    wrote, pixels = sized(plain, (48, 64)).make(given, think=True, seed=5, settings=settings)
    assert thoughts == wrote
    made = opened(parts[0])
    same(made, pixels)

    messages += [{"role": "assistant", "content": parts}, {"role": "user", "content": "Is it red?"}]
    about = create(model=model.id, messages=messages, max_tokens=TOKENS, temperature=0).choices[0].message.content
    given += [made, "Is it red?"]
    assert about == plain.make(given, understand=True, settings=words)[0]


def test_the_same_in_python(stack: Stack, plain: Bagel) -> None:
    with Omni(address=stack.run_directory) as omni:
        chat = Chat().user("a red fox")
        options: Any = {"modalities": ["text", "image"], "seed": 5}
        arguments = {"think": True, "max_think_tokens": 6}
        thoughts, images, answer = "", list[Image.Image](), None
        for event in omni.stream(chat, **options, quartet={"dit": SMALL | {"arguments": arguments}}):
            if isinstance(event, TextDelta):
                thoughts += event.reasoning
            elif isinstance(event, ImageDelta):
                images.append(event.image)
            elif isinstance(event, Answer):
                answer = event
        assert answer is not None
        settings = Settings(points=STEPS + 1, max_tokens=6)
        wrote, pixels = plain.make(["a red fox"], think=True, size=(48, 64), seed=5, settings=settings)
        assert answer.reasoning == thoughts == wrote
        (made,) = images
        same(made, pixels)
        told = omni.generate(chat.assistant(answer).user("Is it red?"), max_tokens=TOKENS, temperature=0).text
        given = ["a red fox", made, "Is it red?"]
        assert told == plain.make(given, understand=True, settings=Settings(max_tokens=TOKENS + 1))[0]


def test_bad_requests_name_the_field(client: openai.OpenAI) -> None:
    model = client.models.list().data[0].id
    user = {"role": "user", "content": "a fox"}
    many = [{"role": "user", "content": [shown(PICTURE)]}] * 9
    image: dict[str, Any] = {"modalities": ["image"]}
    cases: list[tuple[list[Any], dict[str, Any], str]] = [
        ([user], image | {"quartet": {"dit": {"size": "65x64"}}}, "quartet.dit.size"),
        ([user], image | {"quartet": {"dit": {"size": "2048x64"}}}, "quartet.dit.size"),
        ([*many, user], image, "messages[8].content[0]"),
        (
            [user],
            image | {"quartet": {"dit": {"arguments": {"max_think_tokens": 0}}}},
            "quartet.dit.arguments.max_think_tokens",
        ),
        ([{"role": "user", "content": "fox " * 3000}, user], image, "messages"),
        ([user], {"modalities": ["audio", "text"]}, "modalities"),
        ([user], {"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools[0]"),
        ([user], {"quartet": {"dit": SMALL}}, "quartet.dit"),
    ]
    for messages, extra, param in cases:
        with pytest.raises(openai.BadRequestError) as refused:
            client.chat.completions.create(model=model, messages=messages, extra_body=extra)
        assert refused.value.param == param


def sized(plain: Bagel, size: tuple[int, int]) -> Bagel:
    """The reference with a size of its own for edits, (height, width), which the published program has not."""

    class Sized(Bagel):
        def draw(self, whole: Any, no_text: Any, no_image: Any, _: Any, generator: Any, s: Settings) -> Any:
            return super().draw(whole, no_text, no_image, size, generator, s)

    made = Sized.__new__(Sized)
    made.__dict__ = plain.__dict__
    return made
