"""Embeddings and scores are those of transformers, over gRPC and HTTP, alone and together. One engine a checkpoint."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import grpc
import numpy as np
import openai
import psutil
import pytest
import pytest_asyncio

from gateway.app import create_app
from gateway.pipeline.config import load_pipeline
from gateway.pipelines import SHIPPED
from gateway.settings import GatewaySettings
from quartet.v1 import embedder_pb2, embedder_pb2_grpc, server_info_pb2, server_info_pb2_grpc, thinker_pb2
from services.common.stage import Stage
from services.embedder.config import EmbedderSettings
from services.registry import embedder_pipeline, read_config
from services.thinker import environment
from tests.support.systems.gateway import HEALTH_TIMEOUT_S, clients, serving
from tests.support.tiers import tiered
from tests.support.weights.embedding_models import (
    BERT_MEAN,
    EMBEDDING,
    MOST_TOKENS,
    SCORING,
    Reference,
    embedding_checkpoint,
)

pytestmark = pytest.mark.asyncio(loop_scope="module")
QUICK = BERT_MEAN
OF_THE_GATE = ("qwen3_last", "bert_pairs")
TEXTS = [
    "The old king likes the boat.",
    "Which day comes after Monday?",
    "x",
    "it's  12,345\n\n\u4f60\u597d caf\u00e9 \U0001f600 [SEP] <|endoftext|>",
    "The boats are out. " * 4,
]
LONG = "the old king " * MOST_TOKENS
QUERY = "Where is the king?"
TOLERANCE = 1e-5


@dataclass
class Served:
    """A stage (its engine is a process), a gateway before it, and the reference on the same checkpoint."""

    name: str
    stage: Stage
    serving: asyncio.Task[None]
    engine: Any
    stub: Any
    info: server_info_pb2.GetServerInfoResponse
    http: openai.AsyncOpenAI
    reference: Reference

    @property
    def embeds(self) -> bool:
        return self.name in EMBEDDING

    async def embeddings(self, *texts: str | list[int], **members: Any) -> list[np.ndarray]:
        """Over gRPC, in the order of the texts."""
        inputs = [
            embedder_pb2.EmbedInput(text=each)
            if isinstance(each, str)
            else embedder_pb2.EmbedInput(token_ids=thinker_pb2.TokenIds(ids=each))
            for each in texts
        ]
        request = embedder_pb2.EmbedRequest(request_id=f"r{id(inputs)}", inputs=inputs, **members)
        found: dict[int, np.ndarray] = {}
        async for response in self.stub.Embed(request):
            if response.HasField("embedding"):
                found[response.embedding.index] = np.frombuffer(response.embedding.values.inline, "<f4")
        return [found[i] for i in range(len(texts))]

    async def scores(self, query: str, *documents: str, **members: Any) -> list[float]:
        request = embedder_pb2.ScoreRequest(request_id="r", queries=[query], documents=documents, **members)
        found: dict[int, float] = {}
        async for response in self.stub.Score(request):
            if response.HasField("score"):
                found[response.score.index] = response.score.score
        return [found[i] for i in range(len(documents))]

    def expected(self, text: str) -> list[float]:
        """Control tokens in a text are words, which the reference's tokenizer would not have."""
        return self.reference.embedding(self.reference.tokenizer(text, split_special_tokens=True)["input_ids"])


@pytest_asyncio.fixture(
    scope="module",
    loop_scope="module",
    params=tiered((*EMBEDDING, *SCORING), QUICK, OF_THE_GATE),
)
async def served(request: pytest.FixtureRequest) -> AsyncIterator[Served]:
    checkpoint = embedding_checkpoint(request.param)
    settings = EmbedderSettings(model=str(checkpoint), served_model_name="tiny", max_batch_inputs=8)
    environment.configure(settings, "embedder")
    from services.embedder.engine import EmbedderEngine
    from services.embedder.servicer import SERVICE_NAME, serve

    engines: list[Any] = []
    begin = EmbedderEngine.start

    async def start(given: EmbedderSettings) -> Any:
        engines.append(await begin(given))
        return engines[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(EmbedderEngine, "start", start)
        stage = Stage(settings, "embedder", SERVICE_NAME, streams=False)
        task = asyncio.create_task(serve(stage, settings))
        while not stage.has_served:
            await asyncio.sleep(0.05)
            if task.done():
                await task
    file = SHIPPED / (embedder_pipeline(checkpoint, read_config(checkpoint)) or "")
    address = f"127.0.0.1:{stage.port}"
    loaded = GatewaySettings(pipeline=file, health_timeout_s=HEALTH_TIMEOUT_S)
    app = create_app(loaded, load_pipeline(file, {"embedder": address}))
    async with grpc.aio.insecure_channel(address) as channel, serving(app, loaded) as url:
        http, client = clients(url)
        while not app.state.gateway.pipeline.ready:
            await asyncio.sleep(0.01)
        server_info: Any = server_info_pb2_grpc.ServerInfoServiceStub(channel)
        info = await server_info.GetServerInfo(server_info_pb2.GetServerInfoRequest())
        stub = embedder_pb2_grpc.EmbedderServiceStub(channel)
        yield Served(request.param, stage, task, engines[0], stub, info, client, Reference(request.param))
        await http.aclose()
        await client.close()
    stage.request_stop()
    await asyncio.gather(task, return_exceptions=True)  # it was killed, perhaps


async def read_to_the_end(call: Any) -> None:
    while await call.read() is not grpc.aio.EOF:  # pyright: ignore[reportAttributeAccessIssue]
        pass


def close(found: Any, expected: Any) -> bool:
    return np.abs(np.array(found) - np.array(expected)).max() < TOLERANCE


async def test_what_it_says_of_itself(served: Served) -> None:
    info = served.info.embedder
    assert (served.info.stage, served.info.dtype, served.info.device) == ("embedder", "float32", "cpu")
    assert (info.embeds, info.scores) == (served.embeds, not served.embeds)
    assert (info.dimensions, info.normalizes) == ((64, True) if served.embeds else (0, False))
    if served.embeds:
        assert info.pooling == served.reference.pooling
        assert info.max_input_tokens == MOST_TOKENS
    assert (info.shortens, list(info.shorter_dimensions)) == (
        (True, [16, 32, 64]) if served.name == "qwen3_last" else (False, [])
    )
    assert served.info.config_digest


async def test_embeddings_are_those_of_transformers_alone_and_together(served: Served) -> None:
    if not served.embeds:
        return
    expected = [served.expected(each) for each in TEXTS]
    alone = [(await served.embeddings(each))[0] for each in TEXTS]
    assert close(alone, expected)
    together = await asyncio.gather(*(served.embeddings(*TEXTS * 5) for _ in range(2)))
    assert all(close(each, expected * 5) for each in together)
    ids = served.reference.tokenizer(TEXTS[0])["input_ids"]
    assert close(await served.embeddings(ids), [expected[0]])


async def test_openais_client_gets_the_same(served: Served) -> None:
    if not served.embeds:
        return
    expected = [served.expected(each) for each in TEXTS]
    for form in ("float", "base64"):
        made = await served.http.embeddings.create(model="tiny", input=TEXTS, encoding_format=form)
        values: Any = [each.embedding for each in made.data]
        if form == "float":
            assert close(values, expected)
        assert made.usage.prompt_tokens > len(TEXTS)
    made = await served.http.embeddings.create(model="tiny", input=TEXTS)
    assert close([each.embedding for each in made.data], expected)


async def test_scores_are_those_of_transformers_alone_and_together(served: Served) -> None:
    if served.embeds:
        return
    documents = [each.partition("[SEP]")[0] for each in TEXTS]
    expected = [served.reference.score(QUERY, each) for each in documents]
    assert max(expected) - min(expected) > 100 * TOLERANCE
    assert close([(await served.scores(QUERY, each))[0] for each in documents], expected)
    assert close(await served.scores(QUERY, *documents), expected)
    answer: Any = await served.http.post(
        "/rerank", body={"query": QUERY, "documents": documents}, cast_to=object, options={"headers": {}}
    )
    results = answer["results"]
    order = sorted(range(len(documents)), key=lambda i: -expected[i])
    assert [each["index"] for each in results] == order
    assert close([each["relevance_score"] for each in results], [expected[i] for i in order])


async def test_long_input_is_refused_or_cut_as_transformers_does(served: Served) -> None:
    most = served.info.embedder.max_input_tokens
    if served.embeds:
        with pytest.raises(grpc.aio.AioRpcError, match=rf"tokens; this model takes {most}: shorten it") as refused:
            await served.embeddings("x", LONG)
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        for cut in (-1, 9):
            kept = served.reference.tokenizer(LONG, truncation=True, max_length=most if cut == -1 else cut)
            expected = served.reference.embedding(kept["input_ids"])
            assert close(await served.embeddings(LONG, truncate_tokens=cut), [expected])
        with pytest.raises(openai.BadRequestError, match=rf"input\[1\]: has \d+ tokens; this model takes {most}"):
            await served.http.embeddings.create(model="tiny", input=["x", LONG])
        return
    with pytest.raises(grpc.aio.AioRpcError, match=rf"documents\[1\]: has \d+ tokens; this model takes {most}"):
        await served.scores(QUERY, "x", LONG)
    for query, document in ((QUERY, LONG), (LONG, LONG), (LONG, "x")):
        expected = served.reference.score(query, document, truncation=True, max_length=most)
        assert close(await served.scores(query, document, truncate_tokens=-1), [expected])


async def test_shorter_embeddings(served: Served) -> None:
    if not served.embeds:
        return
    if not served.info.embedder.shortens:
        with pytest.raises(openai.BadRequestError, match="dimensions: this model's embeddings have 64; leave it out"):
            await served.http.embeddings.create(model="tiny", input="x", dimensions=32)
        assert len((await served.embeddings("x", dimensions=64))[0]) == 64
        return
    with pytest.raises(openai.BadRequestError, match="dimensions: must be one of 16, 32, 64"):
        await served.http.embeddings.create(model="tiny", input="x", dimensions=17)
    whole, short = np.array(served.expected(TEXTS[0])[:32]), (await served.embeddings(TEXTS[0], dimensions=32))[0]
    assert close(short, whole / np.linalg.norm(whole))


async def test_bad_input_is_refused_and_costs_nobody_else(served: Served) -> None:
    stub, embeds = served.stub, served.embeds
    bad: list[tuple[Any, str]] = [
        (stub.Embed(embedder_pb2.EmbedRequest(request_id="r")), "inputs: are missing" if embeds else "scores pairs"),
        (
            stub.Score(embedder_pb2.ScoreRequest(request_id="r")),
            "scores no pairs" if embeds else "documents: are missing",
        ),
        (stub.Embed(embedder_pb2.EmbedRequest()), "request_id: is required"),
    ]
    if embeds:
        vocabulary = served.engine.vocab_size
        inputs = [
            embedder_pb2.EmbedInput(),
            embedder_pb2.EmbedInput(token_ids=thinker_pb2.TokenIds(ids=[0, vocabulary])),
            embedder_pb2.EmbedInput(token_ids=thinker_pb2.TokenIds()),
            embedder_pb2.EmbedInput(text="x" * (2 * 1024 * 1024 + 1)),
        ]
        said = ("inputs[0]: must have", f"token_ids[1]: {vocabulary} is not in", "has no tokens", "characters; at most")
        bad += [
            (stub.Embed(embedder_pb2.EmbedRequest(request_id="r", inputs=[each])), words)
            for each, words in zip(inputs, said, strict=True)
        ]
        many = [embedder_pb2.EmbedInput(text="x")] * 2049
        bad.append((stub.Embed(embedder_pb2.EmbedRequest(request_id="r", inputs=many)), "are 2049; at most 2048"))
    for call, words in bad:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            async for _ in call:
                pass
        assert (refused.value.code(), words in (refused.value.details() or "")) == (
            grpc.StatusCode.INVALID_ARGUMENT,
            True,
        ), refused.value.details()
    assert served.stage.admission.in_flight == 0


def long_call(served: Served, request_id: str) -> Any:
    """Of 2,000 texts, or pairs."""
    if served.embeds:
        inputs = [embedder_pb2.EmbedInput(text=TEXTS[4])] * 2000
        return served.stub.Embed(embedder_pb2.EmbedRequest(request_id=request_id, inputs=inputs))
    documents = [TEXTS[4]] * 2000
    return served.stub.Score(embedder_pb2.ScoreRequest(request_id=request_id, queries=["x"], documents=documents))


async def test_a_cancelled_request_leaves_the_engine(served: Served) -> None:
    unfinished = served.engine._llm.output_processor.get_num_unfinished_requests
    call = long_call(served, "gone")
    await call.read()  # it has begun
    assert 0 < unfinished() <= 8  # a request has no more in the engine than a step takes
    call.cancel()
    async with asyncio.timeout(60):
        while unfinished() or served.stage.admission.in_flight:
            await asyncio.sleep(0.01)
    if served.embeds:
        assert close(await served.embeddings(TEXTS[0]), [served.expected(TEXTS[0])])


async def test_a_dead_engine_ends_the_stage_and_its_requests(served: Served) -> None:
    """The last test: nothing is left."""
    call = long_call(served, "dies")
    await call.read()
    for child in psutil.Process().children():  # not those of a system that other tests share
        with contextlib.suppress(psutil.NoSuchProcess):  # a zombie has no command
            if any("EngineCore" in word for word in (child.name(), *child.cmdline())):
                child.kill()
    with pytest.raises(grpc.aio.AioRpcError) as failed:
        await read_to_the_end(call)
    assert failed.value.code() is grpc.StatusCode.UNAVAILABLE
    assert "the embedder's engine died" in (failed.value.details() or "")
    with pytest.raises(Exception, match="the embedder's engine died"):
        await asyncio.wait_for(served.serving, 60)
