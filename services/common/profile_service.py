"""quartet.v1.ProfileService, the same for every stage."""

import asyncio
import time
from collections.abc import AsyncIterator

import grpc

from quartet.v1 import profile_pb2, profile_pb2_grpc
from services.common.errors import StageError
from services.common.profiles import Profiles
from services.common.rpc.status import abort
from services.common.telemetry.spans import Spans, monotonic_to_unix_ns

SERVICE = profile_pb2.DESCRIPTOR.services_by_name["ProfileService"].full_name
PIECE_BYTES = 256 * 1024


class ProfileServicer(profile_pb2_grpc.ProfileServiceServicer):
    """Serves the profiles of a stage, and its spans."""

    def __init__(self, profiles: Profiles, spans: Spans) -> None:
        self._profiles, self._spans = profiles, spans

    async def StartProfile(
        self, request: profile_pb2.StartProfileRequest, context: grpc.aio.ServicerContext
    ) -> profile_pb2.StartProfileResponse:
        try:
            seconds = await self._profiles.start(request.seconds)
        except StageError as error:
            await abort(context, error)
        return profile_pb2.StartProfileResponse(seconds=seconds)

    async def StopProfile(
        self, request: profile_pb2.StopProfileRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[profile_pb2.StopProfileResponse]:
        try:
            recorded = await self._profiles.stop()
        except StageError as error:
            await abort(context, error)
        yield profile_pb2.StopProfileResponse(profile=recorded.summary)
        for process, file in recorded.files:
            with file.open("rb") as opened:
                described = profile_pb2.TraceFile(process=process, size_bytes=file.stat().st_size)
                yield profile_pb2.StopProfileResponse(file=described)
                while piece := await asyncio.to_thread(opened.read, PIECE_BYTES):
                    yield profile_pb2.StopProfileResponse(data=piece)
        self._profiles.drop(recorded)

    async def GetSpans(
        self, request: profile_pb2.GetSpansRequest, context: grpc.aio.ServicerContext
    ) -> profile_pb2.GetSpansResponse:
        received = time.time_ns()
        to_unix_ns = monotonic_to_unix_ns()
        spans = [span.to_message(to_unix_ns) for span in self._spans.find(request.request_id)]
        return profile_pb2.GetSpansResponse(spans=spans, received_unix_ns=received, answered_unix_ns=time.time_ns())
