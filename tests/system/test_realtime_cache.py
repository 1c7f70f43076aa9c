"""A spoken conversation over `/v1/realtime`, whose turns cost the thinker their new tokens alone."""

import uuid
from collections.abc import AsyncIterator
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import numpy as np
import pytest
import pytest_asyncio

from cli.plan import PIPELINE
from gateway.app import create_app
from gateway.pipeline.config import load_pipeline
from gateway.settings import GatewaySettings
from quartet.v1 import thinker_pb2
from services.common.errors import InvalidInput
from services.common.rpc.status import from_rpc_error
from services.thinker.family import load_checkpoint
from tests.support.clients.realtime_client import base64_of, session
from tests.support.clock import until
from tests.support.samples.media import png, wav
from tests.support.systems.gateway import HEALTH_TIMEOUT_S, serving
from tests.support.systems.stack import KV_BLOCK_TOKENS, Stack
from tests.support.systems.stages import Spoken, messages, think

pytestmark = pytest.mark.e2e

TURNS = 10
# Nothing random: an answer that a random model draws may hold special tokens, and is given back as text then.
SAMPLING = "sampling: {temperature: 0}"
ANSWER_TOKENS = 13
RATE_HZ = 24_000


class Gateway(NamedTuple):
    """One of the test's own."""

    url: str


@pytest_asyncio.fixture(loop_scope="session")
async def gateway(stack: Stack, tmp_path) -> AsyncIterator[Gateway]:
    """In this process, before the shared system's stages."""
    assert stack.access is not None
    file = tmp_path / "pipeline.yaml"
    before, thinker, after = PIPELINE.read_text().partition("  thinker:")
    file.write_text(before + thinker + after.replace("sampling: {}", SAMPLING, 1))
    settings = GatewaySettings(pipeline=file, health_timeout_s=HEALTH_TIMEOUT_S)
    app = create_app(settings, load_pipeline(file, stack.addresses), stack.access.credentials)
    async with serving(app, settings) as url:
        await until(lambda: app.state.gateway.pipeline.ready)
        yield Gateway(url)


def spoken(turn: int) -> bytes:
    """A second and more of sound, other in each turn, now longer and now shorter than those before."""
    noise = np.random.default_rng(turn)
    samples = RATE_HZ + int(noise.integers(0, RATE_HZ // 2))
    wave = 6000 * np.sin(np.arange(samples) * (200 + 30 * turn) * 2 * np.pi / RATE_HZ) + noise.normal(0, 300, samples)
    return wave.astype("<i2").tobytes()


async def test_a_turn_costs_its_new_tokens_alone(gateway: Gateway) -> None:
    told = {
        "type": "realtime",
        "output_modalities": ["text"],
        "max_output_tokens": ANSWER_TOKENS,
        "audio": {"input": {"turn_detection": None}},
    }
    used = []
    async with session(gateway, None) as client:  # without instructions: the conversation begins with a sound
        await client.ask("session.update", "session.updated", session=told)
        for turn in range(TURNS):
            await client.send("input_audio_buffer.append", audio=base64_of(spoken(turn)))
            await client.send("input_audio_buffer.commit")
            used.append((await client.respond())[-1]["response"]["usage"])
    cached = [usage["input_token_details"]["cached_tokens"] for usage in used]
    for (before, after), found in zip(pairwise(used), cached[1:], strict=True):
        # What the thinker has read: of an answer all but the last token, which was only sampled.
        known = before["input_tokens"] + before["output_tokens"] - 1
        assert found == known // KV_BLOCK_TOKENS * KV_BLOCK_TOKENS
        assert after["input_tokens"] - before["input_tokens"] - before["output_tokens"] < 40  # the turn's own


async def test_ids_find_in_the_prefix_cache_what_the_text_does_not(stack: Stack, tiny_checkpoint: Path) -> None:
    """Media before and after answers that a random model draws: bytes that are no characters, split words."""
    special = load_checkpoint(str(tiny_checkpoint)).special_ids
    drawn: dict[str, Any] = {"temperature": 2, "top_k": 0, "seed": 5, "max_tokens": 40}
    asked = messages(
        ("user", [("audio", wav(1.3)), "What is this?", ("image", png())]),
        ("user", [("image", png(64, 96)), "And this?"]),
        ("user", "Thanks."),
    )

    async def think_of(history: list[thinker_pb2.ChatMessage], **sampling: Any) -> tuple[Spoken, int]:
        """An answer, and how much of its prompt was cached."""
        parameters = thinker_pb2.SamplingParameters(**{**drawn, **sampling}, logit_bias=dict.fromkeys(special, -100))
        start = thinker_pb2.GenerateStart(request_id=uuid.uuid4().hex, messages=history, sampling=parameters)
        spoken = await think(stack.addresses["thinker"], start)
        assert spoken.summary is not None
        return spoken, spoken.summary.cached_tokens

    async with stack.stages_reached():
        by_ids, by_text, known = [], [], 0
        for turn, question in enumerate(asked):
            by_ids.append(question)
            by_text.append(question)
            answer, cached = await think_of(by_ids)
            assert answer.summary is not None
            assert answer.summary.token_ids_reusable
            if turn:
                assert cached == known // KV_BLOCK_TOKENS * KV_BLOCK_TOKENS
                assert (await think_of(by_text, max_tokens=1))[1] < cached
            known = answer.summary.prompt_tokens + len(answer.token_ids) - 1
            said = thinker_pb2.ChatMessage(role="assistant", content=[thinker_pb2.ContentPart(text=answer.text)])
            by_text.append(said)
            by_ids.append(thinker_pb2.ChatMessage(role="assistant", token_ids=answer.token_ids))
        stopped, _ = await think_of(asked[-1:], stop=list("aeiounrst"))
        assert stopped.summary is not None
        assert not stopped.summary.token_ids_reusable  # the text is without the stop string
        by_ids[1].token_ids.insert(3, min(special))
        for history, field in ((by_ids, "messages[1].token_ids"), ([wrong_role()], "messages[0].token_ids")):
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await think_of(history)
            error = from_rpc_error(refused.value)
            assert isinstance(error, InvalidInput)
            assert error.field == field


def wrong_role() -> thinker_pb2.ChatMessage:
    return thinker_pb2.ChatMessage(role="user", token_ids=[1])
