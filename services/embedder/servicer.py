"""quartet.v1.EmbedderService: texts in, engine calls, embeddings or scores out; and its start-up."""

import asyncio
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from functools import partial
from typing import Any

import grpc
import numpy as np

from quartet.v1 import embedder_pb2, embedder_pb2_grpc, server_info_pb2, tensor_pb2, thinker_pb2
from services.common.engine.process import lower_priority
from services.common.errors import InvalidInput, Unavailable, require
from services.common.rpc.call import Call, serve_call
from services.common.stage import Stage
from services.embedder.config import EmbedderSettings
from services.embedder.engine import EmbedderEngine
from services.embedder.texts import InputCut, Prompt, Tokenizer, read_all

SERVICE_NAME = embedder_pb2.DESCRIPTOR.services_by_name["EmbedderService"].full_name
GRACE_S = 0.5  # requests in flight get the engine's own error before the process goes
_LONG_TEXT = 65_536  # characters
_LIMITS = ("max_input_tokens", "max_inputs", "max_request_tokens")  # of EmbedderInfo
_SIDES = {thinker_pb2.TRUNCATION_SIDE_LEFT: "left", thinker_pb2.TRUNCATION_SIDE_RIGHT: "right"}
Read = Callable[[], Prompt]
Request = embedder_pb2.EmbedRequest | embedder_pb2.ScoreRequest


class EmbedderServicer(embedder_pb2_grpc.EmbedderServiceServicer):
    """Serves requests of `stage`. Call `use` before admission opens."""

    def __init__(self, settings: EmbedderSettings, stage: Stage) -> None:
        self._settings, self._stage = settings, stage
        self._texts = ThreadPoolExecutor(settings.text_threads, "text")
        self._long_texts = ThreadPoolExecutor(1, "long-text", lower_priority)
        self._engine: EmbedderEngine
        self._tokenizer: Tokenizer

    def use(self, engine: EmbedderEngine) -> None:
        self._engine = engine
        tokenizer, most = engine.checkpoint.tokenizer, engine.max_input_tokens
        self._tokenizer = Tokenizer(tokenizer, most, engine.vocab_size, engine.lowercase)

    def close(self) -> None:
        for pool in (self._texts, self._long_texts):
            pool.shutdown(wait=False, cancel_futures=True)

    async def Embed(
        self, request: embedder_pb2.EmbedRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[embedder_pb2.EmbedResponse]:
        async with serve_call("embedder", request.request_id, context, self._stage.admission) as call:
            require(
                not self._engine.checkpoint.scores, "inputs", "this model scores pairs of texts; it makes no embeddings"
            )
            dimensions = self._dimensions(request)
            prompts = await self._read(request, "inputs", len(request.inputs), _characters(request), self._embed_reads)
            async with aclosing(self._results(call, request, prompts, dimensions)) as results:
                async for index, values in results:
                    tensor = tensor_pb2.Tensor(
                        dtype=tensor_pb2.DATA_TYPE_FLOAT32, shape=values.shape, inline=values.astype("<f4").tobytes()
                    )
                    tokens = len(prompts[index].token_ids)
                    embedding = embedder_pb2.Embedding(index=index, tokens=tokens, values=tensor)
                    yield embedder_pb2.EmbedResponse(embedding=embedding)
            summary = embedder_pb2.EmbedSummary(
                inputs=len(prompts), prompt_tokens=_tokens(prompts), timings=call.timings.to_message()
            )
            yield embedder_pb2.EmbedResponse(summary=summary)

    async def Score(
        self, request: embedder_pb2.ScoreRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[embedder_pb2.ScoreResponse]:
        async with serve_call("embedder", request.request_id, context, self._stage.admission) as call:
            require(self._engine.checkpoint.scores, "documents", "this model makes embeddings; it scores no pairs")
            queries, documents = len(request.queries), len(request.documents)
            require(queries in (1, documents), "queries", f"must be 1, or as many as the documents: {documents}")
            # a query is read once with each document
            characters = sum(map(len, request.queries)) * (documents if queries == 1 else 1)
            characters += sum(map(len, request.documents))
            prompts = await self._read(request, "documents", documents, characters, self._score_reads)
            async with aclosing(self._results(call, request, prompts)) as results:
                async for index, values in results:
                    tokens = len(prompts[index].token_ids)
                    score = embedder_pb2.PairScore(index=index, tokens=tokens, score=float(values[0]))
                    yield embedder_pb2.ScoreResponse(score=score)
            summary = embedder_pb2.ScoreSummary(
                pairs=len(prompts), prompt_tokens=_tokens(prompts), timings=call.timings.to_message()
            )
            yield embedder_pb2.ScoreResponse(summary=summary)

    async def _results(
        self, call: Call, request: Request, prompts: Sequence[Prompt], dimensions: int | None = None
    ) -> AsyncGenerator[tuple[int, np.ndarray]]:
        call.set(inputs=len(prompts), prompt_tokens=_tokens(prompts))
        call.timings.mark_started()
        running = self._engine.run(request.request_id, prompts, dimensions, request.priority)
        async with aclosing(running) as results:
            async for index, values in results:
                call.timings.mark_output()
                yield index, values

    async def _read(
        self,
        request: Any,
        field: str,
        count: int,
        characters: int,
        reads: Callable[[Any, InputCut], Sequence[Read]],
    ) -> list[Prompt]:
        """The prompts of a request of so many texts and characters. Cancelling leaves at once, and soon ends the rest.

        Raises:
            InvalidInput: names the text at fault, or `field`, of which there are none, or too many.
        """
        settings = self._settings
        require(count, field, "are missing; send at least one")
        require(count <= settings.max_inputs, field, f"are {count}; at most {settings.max_inputs} are taken at a time")
        most = settings.max_request_characters
        require(characters <= most, field, f"have {characters} characters; at most {most} are read in one request")
        gone, pool = threading.Event(), self._long_texts if characters > _LONG_TEXT else self._texts
        each = reads(request, _cut(request))
        work = partial(read_all, each, settings.max_request_tokens, field, gone.is_set)
        try:
            return await asyncio.get_running_loop().run_in_executor(pool, work)
        finally:
            gone.set()

    def _embed_reads(self, request: embedder_pb2.EmbedRequest, cut: InputCut) -> list[Read]:
        return [
            partial(self._read_input, f"inputs[{i}]", given, request, cut) for i, given in enumerate(request.inputs)
        ]

    def _read_input(
        self, field: str, given: embedder_pb2.EmbedInput, request: embedder_pb2.EmbedRequest, cut: InputCut
    ) -> Prompt:
        match given.WhichOneof("content"):
            case "text":
                return self._tokenizer.text(given.text, f"{field}.text", cut, not request.no_special_tokens)
            case "token_ids":
                return self._tokenizer.ids(given.token_ids.ids, f"{field}.token_ids", cut)
        raise InvalidInput(field, "must have a text or token_ids")

    def _score_reads(self, request: embedder_pb2.ScoreRequest, cut: InputCut) -> list[Read]:
        queries = list(request.queries) * (1 if len(request.queries) > 1 else len(request.documents))
        pairs = enumerate(zip(queries, request.documents, strict=True))
        return [partial(self._tokenizer.pair, *pair, f"documents[{i}]", cut) for i, pair in pairs]

    def _dimensions(self, request: embedder_pb2.EmbedRequest) -> int | None:
        """Raises InvalidInput: the model's embeddings cannot have that length."""
        engine, wanted = self._engine, request.dimensions
        if not request.HasField("dimensions") or (engine.shorter is None and wanted == engine.dimensions):
            return None
        if engine.shorter is None:
            raise InvalidInput("dimensions", f"this model's embeddings have {engine.dimensions}; leave it out")
        if engine.shorter and wanted not in engine.shorter:
            raise InvalidInput("dimensions", f"must be one of {', '.join(map(str, engine.shorter))}")
        require(1 <= wanted <= engine.dimensions, "dimensions", f"must be 1 to {engine.dimensions}")
        return wanted


def _characters(request: embedder_pb2.EmbedRequest) -> int:
    return sum(len(given.text) + len(given.token_ids.ids) for given in request.inputs)


def _tokens(prompts: Sequence[Prompt]) -> int:
    return sum(len(prompt.token_ids) for prompt in prompts)


def _cut(request: Any) -> InputCut:
    """Raises InvalidInput: it would keep nothing."""
    most = request.truncate_tokens if request.HasField("truncate_tokens") else None
    require(most is None or most == -1 or most >= 1, "truncate_tokens", "must be -1, or 1 or more")
    of_document = None
    if isinstance(request, embedder_pb2.ScoreRequest) and request.HasField("max_document_tokens"):
        of_document = request.max_document_tokens
        require(of_document >= 1, "max_document_tokens", "must be 1 or more")
    return InputCut(most, _SIDES.get(request.truncation_side), of_document)


async def serve(stage: Stage, settings: EmbedderSettings) -> None:
    """Runs the stage until it is told to stop. Raises if the engine cannot start, or died."""
    servicer = EmbedderServicer(settings, stage)
    embedder_pb2_grpc.add_EmbedderServiceServicer_to_server(servicer, stage.grpc)
    stage.resources.callback(servicer.close)

    async def start() -> server_info_pb2.GetServerInfoResponse:
        engine = await stage.load(EmbedderEngine.start(settings))
        stage.resources.push_async_callback(engine.close)
        stage.profiles.recorder = engine.recorder
        servicer.use(engine)
        async for _ in engine.run("warm-up", [Prompt([0, 0])]):
            pass
        watch = asyncio.create_task(_end_with(engine, stage))
        stage.resources.callback(watch.cancel)
        return stage.describe(engine.dtype, engine.device, volatile=_LIMITS, embedder=_info(engine, settings))

    await stage.serve(start)


def _info(engine: EmbedderEngine, settings: EmbedderSettings) -> server_info_pb2.EmbedderInfo:
    limits = server_info_pb2.EmbedderInfo(
        max_input_tokens=engine.max_input_tokens,
        max_inputs=settings.max_inputs,
        max_request_tokens=settings.max_request_tokens,
        pooling=engine.pooling,
    )
    if engine.checkpoint.scores:
        limits.scores = True
        return limits
    limits.embeds, limits.dimensions, limits.normalizes = True, engine.dimensions, engine.normalizes
    limits.shortens = engine.shorter is not None
    limits.shorter_dimensions.extend(engine.shorter or ())
    return limits


async def _end_with(engine: EmbedderEngine, stage: Stage) -> None:
    await engine.died()
    await asyncio.sleep(GRACE_S)
    stage.fatal(Unavailable("the embedder's engine died"))
