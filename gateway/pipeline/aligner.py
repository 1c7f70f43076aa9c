"""Requests for the times of words."""

import grpc

from gateway.pipeline.route import Lease, Route, by_one_stage
from gateway.pipeline.stage import Stage
from quartet.v1 import aligner_pb2


async def word_times(
    stage: Stage, request: aligner_pb2.AlignRequest, timeout_s: float
) -> list[aligner_pb2.AlignedWord]:
    """When an aligner says that each word is spoken. Cancelling ends its work. If a replica is lost, another one does
    all, once.

    Raises:
        StageError: the stage does not serve, refuses, fails or is lost.
    """
    return await by_one_stage(stage, request, timeout_s, _attempt)


async def _attempt(
    route: Route, lease: Lease, request: aligner_pb2.AlignRequest, timeout_s: float
) -> list[aligner_pb2.AlignedWord]:
    try:
        words = list((await lease.replica.call(request, (), timeout_s)).words)
    except grpc.aio.AioRpcError as error:
        raise route.failure(lease, error) from error
    if any(not 0 <= word.text_begin <= word.text_end <= len(request.text) for word in words):
        raise lease.stage.fault("sent a word that is not in the text")
    return words
