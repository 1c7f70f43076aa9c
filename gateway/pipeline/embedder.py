"""Requests for embeddings and scores, and their results."""

from dataclasses import dataclass
from typing import Any

import grpc

from gateway.pipeline.route import Lease, Route, by_one_stage
from gateway.pipeline.stage import Stage
from quartet.v1 import embedder_pb2, tensor_pb2


@dataclass(frozen=True)
class Results:
    """Of all inputs, in their order.

    Attributes:
        values: embeddings, (dimensions) float32, little-endian; or scores.
        prompt_tokens: of all inputs together.
    """

    values: list[Any]
    prompt_tokens: int


async def results(
    stage: Stage, request: embedder_pb2.EmbedRequest | embedder_pb2.ScoreRequest, timeout_s: float
) -> Results:
    """What an embedder makes of `request`. Cancelling ends its work. If a replica is lost, another one makes all, once.

    Raises:
        StageError: the stage does not serve, refuses, fails or is lost.
    """
    return await by_one_stage(stage, request, timeout_s, _attempt)


async def _attempt(route: Route, lease: Lease, request: Any, timeout_s: float) -> Results:
    pairs = isinstance(request, embedder_pb2.ScoreRequest)
    values: list[Any] = [None] * len(request.documents if pairs else request.inputs)
    call = lease.replica.call(request, (), timeout_s, method="Score" if pairs else "Embed")
    summary = None
    try:
        async for response in call:
            match response.WhichOneof("message"):
                case "embedding" if response.embedding.index < len(values):
                    values[response.embedding.index] = _bytes(lease.stage, response.embedding.values)
                case "score" if response.score.index < len(values):
                    values[response.score.index] = response.score.score
                case "summary":
                    summary = response.summary
    except grpc.aio.AioRpcError as error:
        raise route.failure(lease, error) from error
    finally:
        call.cancel()
    if summary is None or any(value is None for value in values):
        raise lease.stage.fault("ended the call without all results")
    return Results(values, summary.prompt_tokens)


def _bytes(stage: Stage, tensor: tensor_pb2.Tensor) -> bytes:
    if tensor.dtype != tensor_pb2.DATA_TYPE_FLOAT32 or len(tensor.shape) != 1:
        kind = tensor_pb2.DataType.Name(tensor.dtype)
        raise stage.fault(f"sent {kind} of shape {list(tensor.shape)} as an embedding")
    if len(tensor.inline) != 4 * tensor.shape[0]:
        raise stage.fault(f"sent {len(tensor.inline)} bytes as {tensor.shape[0]} numbers")
    return tensor.inline
