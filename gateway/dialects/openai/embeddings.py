"""`POST /v1/embeddings`: embeddings of texts."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from typing import Annotated, Any, Literal

import numpy as np
import orjson
import pybase64
from fastapi import APIRouter, Depends, Request
from pydantic import Field
from starlette.responses import Response

from gateway.answers import harmless
from gateway.answers.embeddings import InputMembers, check_count, embedder_info, make
from gateway.answers.gateway import Gateway
from gateway.answers.meter import Meter
from gateway.answers.prompt_messages import refuse_long
from gateway.answers.room import MAX_VALUES
from gateway.errors import invalid
from gateway.http.connection import StreamedResponse, admitted
from gateway.http.forms import JSON, page, read_json
from gateway.http.json_writer import to_json
from gateway.pipeline.embedder import Results
from gateway.validation import Listed, ModelName, Positive, TokenIds, ignoring
from quartet.v1 import embedder_pb2, server_info_pb2, thinker_pb2

router = APIRouter(tags=["embeddings"])
_PIECE = 16_384  # numbers that are written at a time, 0.3 MB as JSON


class EmbeddingRequest(ignoring(InputMembers, *harmless.EMBEDDINGS)):
    """A request for embeddings: OpenAI's parameters, and vLLM's further ones."""

    model: ModelName = Field(default="", description="default: the one that makes embeddings")
    input: str | Listed[str] | TokenIds | Listed[TokenIds] = Field(
        description="a text or token ids, or a list of either"
    )
    encoding_format: Literal["float", "base64"] | None = Field(
        default=None, description="base64: of the numbers as float32, little-endian; default: float"
    )
    dimensions: Positive | None = Field(
        default=None, description="a shorter length of the embeddings, of a model that was trained for it"
    )
    add_special_tokens: bool | None = Field(
        default=None, description="whether a text gets the model's special tokens; default: true"
    )

    @property
    def is_single(self) -> bool:
        return isinstance(self.input, str) or (bool(self.input) and isinstance(self.input[0], int))

    def message(self, info: server_info_pb2.EmbedderInfo) -> embedder_pb2.EmbedRequest:
        """Raises ApiError: 400, there is no input, or too many."""
        inputs = [self.input] if self.is_single else list[Any](self.input)
        check_count(len(inputs), "input", info)
        length = min(self.dimensions or info.dimensions, info.dimensions)
        if len(inputs) * length > MAX_VALUES:
            reason = f"has {len(inputs)} items, of {length} dimensions; at most {MAX_VALUES // length} are taken"
            raise invalid("input", f"{reason} in one request")
        refuse_long((each for each in inputs if isinstance(each, str)), "input")
        request = embedder_pb2.EmbedRequest(
            inputs=map(_input, inputs),
            dimensions=self.dimensions,
            no_special_tokens=self.add_special_tokens is False,
        )
        self.fill(request)
        return request

    def own_name(self, member: str) -> str:
        """A request's own name of what one with a list of inputs has."""
        return member.replace("input[0]", "input", 1) if self.is_single else member


def _input(given: Any) -> embedder_pb2.EmbedInput:
    """Of a text, or of token ids."""
    if isinstance(given, str):
        return embedder_pb2.EmbedInput(text=given)
    return embedder_pb2.EmbedInput(token_ids=thinker_pb2.TokenIds(ids=given))


@router.post("/v1/embeddings", openapi_extra=page(EmbeddingRequest, "a list of embeddings", answered=JSON))
async def embed(http: Request, gateway: Annotated[Gateway, Depends(admitted)]) -> Response:
    """Makes embeddings of texts."""
    request = await read_json(http, EmbeddingRequest)
    info = embedder_info(gateway, request.model, "embedding")
    message = request.message(info)
    meter = Meter.of(http.state, gateway.settings.request_timeout_s)
    values = len(message.inputs) * (request.dimensions or info.dimensions)
    body = _body(gateway, request, message, meter, values)
    return StreamedResponse(body, meter.left_s, JSON[0], {})


async def _body(
    gateway: Gateway, request: EmbeddingRequest, message: embedder_pb2.EmbedRequest, meter: Meter, values: int
) -> AsyncGenerator[bytes, None]:
    """The response in pieces: as JSON, embeddings are five times as large as they are. Raises ApiError."""
    async with gateway.embedding_room.hold(min(values, MAX_VALUES)):
        made = await make(gateway, message, meter, "input", request.own_name)
        at_a_time = max(1, _PIECE // max(1, len(made.values[0]) // 4))
        yield b'{"object":"list","data":['
        for begin in range(0, len(made.values), at_a_time):
            part = made.values[begin : begin + at_a_time]
            text = await asyncio.to_thread(_written, part, begin, request.encoding_format == "base64")
            yield text if begin == 0 else b"," + text
        yield b"]," + to_json(_tail(gateway, request, made))[1:]


def _written(embeddings: Sequence[bytes], first: int, base64: bool) -> bytes:
    """Members of `data`, the first of which has the index `first`."""
    written = [
        {
            "object": "embedding",
            "index": i,
            "embedding": pybase64.b64encode_as_string(each) if base64 else np.frombuffer(each, "<f4"),
        }
        for i, each in enumerate(embeddings, first)
    ]
    return orjson.dumps(written, option=orjson.OPT_SERIALIZE_NUMPY)[1:-1]


def _tail(gateway: Gateway, request: EmbeddingRequest, made: Results) -> dict[str, Any]:
    usage = {"prompt_tokens": made.prompt_tokens, "total_tokens": made.prompt_tokens}
    return {"model": gateway.catalog.meant(request.model, "embedding"), "usage": usage}
