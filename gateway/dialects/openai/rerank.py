"""`POST /v1/rerank` and `/v1/score`, as clients of Jina, Cohere and vLLM send them: how well documents fit a query."""

import time
from collections.abc import Sequence
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request
from pydantic import Field

from gateway.answers import harmless
from gateway.answers.embeddings import InputMembers, check_count, embedder_info, make
from gateway.answers.gateway import Gateway
from gateway.answers.meter import Meter
from gateway.answers.prompt_messages import refuse_long
from gateway.errors import invalid
from gateway.http.connection import admitted, while_connected
from gateway.http.forms import JSON, page, read_json
from gateway.http.json_writer import Json, in_thread
from gateway.pipeline.embedder import Results
from gateway.validation import Listed, ModelName, Positive, Strict, ignoring
from quartet.v1 import embedder_pb2

router = APIRouter(tags=["embeddings"])
_NAMES = {"text_1": "text_2", "queries": "documents"}  # of a score's queries, and of its documents


class _PairMembers(ignoring(InputMembers, *harmless.EMBEDDINGS)):
    model: ModelName = Field(default="", description="default: the one that scores")
    max_tokens_per_doc: Positive | None = Field(default=None, description="a longer document is cut to so many tokens")

    def pairs(self, queries: Sequence[str], documents: Sequence[str], field: str) -> embedder_pb2.ScoreRequest:
        """Raises ApiError: 400 naming `field`, too much text."""
        refuse_long((*queries, *documents), field)
        request = embedder_pb2.ScoreRequest(
            queries=queries, documents=documents, max_document_tokens=self.max_tokens_per_doc
        )
        self.fill(request)
        return request


class _Document(Strict):
    text: str


class RerankRequest(_PairMembers):
    """A query, and documents to put in order."""

    query: str
    documents: Listed[str | _Document] = Field(description="texts, or objects with a text")
    top_n: Positive | None = Field(default=None, description="results; default: all")
    return_documents: bool | None = Field(
        default=None, description="whether results have the documents; default: true, for /v2/rerank false"
    )

    @property
    def texts(self) -> list[str]:
        return [each if isinstance(each, str) else each.text for each in self.documents]


class ScoreRequest(_PairMembers):
    """Pairs of texts: one text and several, or as many of both."""

    text_1: str | Listed[str] | None = Field(default=None, description="a text, or as many as text_2")
    text_2: str | Listed[str] | None = Field(default=None, description="what is scored")
    queries: str | Listed[str] | None = Field(default=None, description="instead of text_1")
    documents: str | Listed[str] | None = Field(default=None, description="instead of text_2")

    def given(self) -> tuple[str, Sequence[str], Sequence[str]]:
        """(name of the documents, queries, documents). Raises ApiError: 400 naming what is missing or too much."""
        named = {name: getattr(self, name) for pair in _NAMES.items() for name in pair}
        sent = {name: value for name, value in named.items() if value is not None}
        first = "queries" if "queries" in sent or "documents" in sent else "text_1"
        second = _NAMES[first]
        for name in (first, second):
            if name not in sent:
                raise invalid(name, "required, but missing", "missing_required_parameter")
        if len(sent) > 2:
            raise invalid("text_1", "and queries are one name too many: send text_1 and text_2, or the other two")
        queries, documents = ([each] if isinstance(each, str) else each for each in (sent[first], sent[second]))
        if len(queries) not in (1, len(documents)):
            raise invalid(first, f"has {len(queries)} items, {second} {len(documents)}: send 1, or as many")
        return second, queries, documents


@router.post("/v1/rerank", openapi_extra=page(RerankRequest, "the documents in order", answered=JSON))
async def rerank(http: Request, gateway: Annotated[Gateway, Depends(admitted)]) -> Json:
    """Puts documents in order by how well they fit a query."""
    return await _rerank(http, gateway, returns_documents=True)


@router.post("/rerank", openapi_extra=page(RerankRequest, "the documents in order", answered=JSON))
async def rerank_plain(http: Request, gateway: Annotated[Gateway, Depends(admitted)]) -> Json:
    """As `/v1/rerank`."""
    return await _rerank(http, gateway, returns_documents=True)


@router.post("/v2/rerank", openapi_extra=page(RerankRequest, "the documents in order", answered=JSON))
async def rerank_v2(http: Request, gateway: Annotated[Gateway, Depends(admitted)]) -> Json:
    """As `/v1/rerank`; the results have no documents, as Cohere's."""
    return await _rerank(http, gateway, returns_documents=False)


async def _rerank(http: Request, gateway: Gateway, *, returns_documents: bool) -> Json:
    request = await read_json(http, RerankRequest)
    info, texts = embedder_info(gateway, request.model, "scores"), request.texts
    check_count(len(texts), "documents", info)
    meter = Meter.of(http.state, gateway.settings.request_timeout_s)
    message = request.pairs([request.query], texts, "documents")
    made = await while_connected(http.receive, make(gateway, message, meter, "documents"))
    order = sorted(range(len(texts)), key=lambda i: -made.values[i])[: request.top_n]
    if request.return_documents is not None:
        returns_documents = request.return_documents
    results = [
        {"index": i, "relevance_score": made.values[i]}
        | ({"document": {"text": texts[i]}} if returns_documents else {})
        for i in order
    ]
    body = {"id": f"rerank-{meter.request_id}", "model": _model(gateway, request), "usage": _usage(made)}
    return await in_thread(body | {"results": results})


@router.post("/v1/score", openapi_extra=page(ScoreRequest, "a list of scores", answered=JSON))
async def score(http: Request, gateway: Annotated[Gateway, Depends(admitted)]) -> Json:
    """Scores pairs of texts."""
    return await _score(http, gateway)


@router.post("/score", openapi_extra=page(ScoreRequest, "a list of scores", answered=JSON))
async def score_plain(http: Request, gateway: Annotated[Gateway, Depends(admitted)]) -> Json:
    """As `/v1/score`."""
    return await _score(http, gateway)


async def _score(http: Request, gateway: Gateway) -> Json:
    request = await read_json(http, ScoreRequest)
    info, (field, queries, documents) = embedder_info(gateway, request.model, "scores"), request.given()
    check_count(len(documents), field, info)
    meter = Meter.of(http.state, gateway.settings.request_timeout_s)
    message = request.pairs(queries, documents, field)

    def own_name(member: str) -> str:
        return member.replace("documents", field, 1)

    made = await while_connected(http.receive, make(gateway, message, meter, field, own_name))
    return Json(
        {
            "id": f"score-{meter.request_id}",
            "object": "list",
            "created": int(time.time()),
            "model": _model(gateway, request),
            "data": [{"index": i, "object": "score", "score": each} for i, each in enumerate(made.values)],
            "usage": _usage(made),
        }
    )


def _model(gateway: Gateway, request: _PairMembers) -> str | None:
    return gateway.catalog.meant(request.model, "scores")


def _usage(made: Results) -> dict[str, Any]:
    return {"prompt_tokens": made.prompt_tokens, "total_tokens": made.prompt_tokens}
