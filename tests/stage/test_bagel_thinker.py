"""BAGEL's understanding half as a thinker: it writes what the plain reference writes, of texts and pictures."""

import asyncio
import io
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import pytest_asyncio
import torch
from PIL import Image

from services.thinker.conversation import Conversation, MediaFile, Message
from tests.support.references.bagel import Bagel, Context, Segment, Settings, scaled
from tests.support.samples.media import png
from tests.support.stage.thinking import Thinking, thinking
from tests.support.tiers import tiered
from tests.support.weights.checkpoints import diffusion_checkpoint

pytestmark = pytest.mark.asyncio(loop_scope="module")
TOKENS = 16


@dataclass
class Served:
    """A thinker, and the reference on the same checkpoint."""

    thinking: Thinking
    plain: Bagel

    async def answer(self, conversation: Conversation) -> tuple[list[int], torch.Tensor]:
        """(token ids of the answer, their log-probabilities)."""
        written = await self.thinking.write(conversation, max_tokens=TOKENS, logprobs=0)
        return written.ids, written.scores

    def text(self, ids: list[int]) -> str:
        return self.thinking.engine.checkpoint.tokenizer.decode(ids, skip_special_tokens=True)

    @torch.no_grad()
    def scores(self, given: list[Any], ids: list[int]) -> tuple[list[int], torch.Tensor]:
        """The likeliest tokens where those of `ids` are written, and the log-probabilities of these."""
        plain, context = self.plain, Context()
        for each in given:
            if isinstance(each, str):
                plain.add_text(context, each)
            else:
                side = plain.latent_side * 16
                plain.add_patches(context, scaled(each.convert("RGB"), side, side // 2, 16))
        positions = torch.arange(len(ids)) + context.position
        states = plain.embed([plain.start, *ids[:-1]])
        own = Segment(states, positions, torch.zeros(len(ids), dtype=torch.bool), causal=True)
        logits = plain.linear(plain.forward([*context.segments, own]), "language_model.lm_head")
        return logits.argmax(-1).tolist(), logits.log_softmax(-1).gather(1, torch.tensor(ids)[:, None])[:, 0]


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=tiered(("tiny", "small"), "tiny", ("small",)))
async def served(request: pytest.FixtureRequest) -> AsyncIterator[Served]:
    checkpoint = diffusion_checkpoint("bagel", size=request.param)
    async with thinking(checkpoint, {"tiny": 104, "small": 256}[request.param]) as started:
        yield Served(started, Bagel(checkpoint))


def picture(width: int, height: int) -> tuple[MediaFile, Image.Image]:
    """A picture's file, and what is in it."""
    file = png(width, height)
    return MediaFile("image", file, "picture"), Image.open(io.BytesIO(file)).convert("RGB")


def turns(*parts: Any) -> tuple[Conversation, list[Any]]:
    """A conversation of a turn for each part, by turns the user's and the answer's, and what the reference is given."""
    messages = list[Message]()
    for part in parts:
        messages.append(Message("user", [part if isinstance(part, str) else part[0]]))
    return Conversation(messages), [part if isinstance(part, str) else part[1] for part in parts]


WIDE, TALL, LARGE = picture(150, 70), picture(33, 101), picture(800, 600)
ASKED = (
    turns("hello the world " * 12),
    turns(WIDE, "What is this?"),
    turns("Look:", TALL, "and", LARGE, "Which is larger?"),
    turns("The old king likes the boat. " * 12, LARGE, "And this?"),  # behind more than a step
    turns(TALL, WIDE, TALL, "it's  12,345\n\n\u4f60\u597d caf\u00e9"),
)


async def test_answers_are_those_of_the_reference_together_and_from_the_prefix_cache(served: Served) -> None:
    for _ in range(2):
        answers = await asyncio.gather(*(served.answer(conversation) for conversation, _ in ASKED))
        for (_, given), (ids, scores) in zip(ASKED, answers, strict=True):
            likeliest, expected = served.scores(given, ids)
            assert ids == likeliest
            assert (scores - expected).abs().max() < 1e-4


async def test_texts_are_those_of_the_reference(served: Served) -> None:
    conversation, given = ASKED[2]
    settings = Settings(max_tokens=TOKENS + 1)  # with the mark that begins the answer
    for think in (False, True):
        text, _ = served.plain.make(given, think=think, understand=True, settings=settings)
        asked = replace(conversation, template_kwargs={"enable_thinking": True} if think else {})
        ids, _ = await served.answer(asked)
        assert served.text(ids) == text
        assert text


async def test_earlier_answers_are_turns_as_all_others(served: Served) -> None:
    file, image = TALL
    asked = Conversation(
        [
            Message("system", ["Be brief."]),
            Message("user", ["What is this?", file]),
            Message("assistant", ["A boat."]),
            Message("user", ["Sure?"]),
        ]
    )
    ids, scores = await served.answer(asked)
    likeliest, expected = served.scores(["Be brief.", "What is this?", image, "A boat.", "Sure?"], ids)
    assert ids == likeliest
    assert (scores - expected).abs().max() < 1e-4
