"""Requests for the times of words."""

import asyncio

import grpc

from gateway.pipeline.route import Lease, Route
from gateway.pipeline.stage import Stage
from quartet.v1 import aligner_pb2
from services.common.errors import StageError


async def word_times(
    stage: Stage, request: aligner_pb2.AlignRequest, timeout_s: float
) -> list[aligner_pb2.AlignedWord]:
    """When an aligner says that each word is spoken. Cancelling ends its work. If a replica is lost, another one does
    all, once.

    Raises:
        StageError: the stage does not serve, refuses, fails or is lost.
    """
    deadline = asyncio.get_running_loop().time() + timeout_s
    route = Route([stage], request.request_id)
    while True:
        left_s = max(0.001, deadline - asyncio.get_running_loop().time())
        try:
            with route.replicas() as (lease,):
                return await _attempt(route, lease, request, left_s)
        except StageError as error:
            if not await route.again(error):
                raise


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
